"""The head's Triton kernel against plain torch: on a GPU, else by Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch

from penstock.training import logprobs
from penstock.training.logprobs import LogitRule, chunk_logprobs_, token_logprobs

pytestmark = pytest.mark.gpu(stand_in=True)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytest.importorskip("triton")
from penstock.model.kernels import head_kernels  # noqa: E402

DEVICE = "cpu" if INTERPRETED else "cuda"


@pytest.mark.parametrize("bans", [False, True])
@pytest.mark.parametrize("rule", [LogitRule(), LogitRule(scale=0.3), LogitRule(softcap=2.0)])
@pytest.mark.parametrize("vocabulary", [70, 5000])
def test_scores_and_gradients_equal_plain_torch(
    vocabulary: int, rule: LogitRule, bans: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    raw = 4 * torch.randn(5, vocabulary, generator=generator)
    raw[1] *= 20  # a peaked row
    targets = torch.randint(0, vocabulary - 2, (5,), generator=generator)
    targets[1] = int(raw[1, :-2].argmax())
    temperatures = torch.rand(5, generator=generator) + 0.5
    banned = None
    if bans:
        banned = (torch.arange(5) % 2 == 0, torch.tensor([vocabulary - 2, vocabulary - 1]))
    how = (rule.scale, rule.softcap)
    wanted = chunk_logprobs_(raw.clone(), targets, temperatures, *how, banned, True, None)
    for gradient in (False, True):
        got = raw.clone().to(DEVICE)
        place = None if banned is None else (banned[0].to(DEVICE), banned[1].to(DEVICE))
        scores, entropies, own = head_kernels.chunk_logprobs_(
            got, targets.to(DEVICE), temperatures.to(DEVICE), *how, place, gradient, None
        )
        assert own is (got if gradient else None)
        torch.testing.assert_close(scores.cpu(), wanted[0], rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(entropies.cpu(), wanted[1], rtol=1e-4, atol=1e-4)
        expected = wanted[2] if gradient else raw
        torch.testing.assert_close(got.cpu(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("share", [logprobs.KEEP_SHARE_GPU, 0.0])
def test_half_precision_on_a_gpu_has_the_gradient_of_float32(
    share: float, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kept in one piece, or computed again chunk by chunk; a confident token keeps its small gradient."""
    monkeypatch.setattr(logprobs, "KEEP_SHARE_GPU", share)
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(300, 64, generator=generator)
    weight = torch.randn(1000, 64, generator=generator) / 8
    offset = torch.randn(1000, generator=generator) if bias else None
    targets = (hidden @ weight.t()).argmax(-1)  # likely tokens: 1 - p is small
    temperatures = torch.full((300,), 0.5)
    factors = torch.randn(300, generator=generator)

    def gradients(device: str, dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [
            t.detach().to(device, dtype).requires_grad_()
            for t in (hidden, weight, offset)
            if t is not None
        ]
        own = (*leaves, None)[:3]
        got, _ = token_logprobs(*own, targets.to(device), temperatures.to(device), chunk_tokens=128)
        (got * factors.to(device)).sum().backward()
        return [leaf.grad.float().cpu() for leaf in leaves]

    wanted = gradients("cpu", torch.float32)
    for own, other in zip(gradients("cuda", torch.bfloat16), wanted, strict=True):
        assert float((own - other).norm() / other.norm()) < 0.05
