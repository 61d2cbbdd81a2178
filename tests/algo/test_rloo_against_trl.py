"""RLOO's loss and gradient against TRL's own code on random tensors, where TRL is installed."""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from penstock.algo.method import TokenView, algorithm_class, resolve_settings
from penstock.config import AlgorithmConfig

rloo_trainer = pytest.importorskip("trl.trainer.rloo_trainer", reason="TRL is not installed")

SEQUENCES, LENGTH = 6, 9


class OneProcess:
    """The part of accelerate that TRL's loss uses, for one process."""

    def gather(self, tensor):
        return tensor

    def reduce(self, tensor, reduction):
        return tensor


def trl_loss(logprobs, mask, old, advantages):
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (
            logprobs,
            torch.zeros_like(logprobs),
            None,
        ),
        aux_loss_enabled=False,
        epsilon_low=0.2,
        epsilon_high=0.2,
        model=SimpleNamespace(training=True),
        accelerator=OneProcess(),
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
    inputs = {
        "prompt_ids": torch.zeros(SEQUENCES, 1),
        "prompt_mask": torch.ones(SEQUENCES, 1),
        "completion_ids": torch.zeros(SEQUENCES, LENGTH),
        "completion_mask": mask,
        "old_logps": (old * mask).sum(1),
        "advantages": advantages,
    }
    return rloo_trainer.RLOOTrainer._compute_loss(trainer, None, inputs)


def our_loss(logprobs, mask, old, advantages):
    inside = mask.bool()
    sequence_N = torch.arange(SEQUENCES)[:, None].expand_as(inside)[inside]
    view = TokenView(
        logprobs_N=logprobs[inside],
        anchor_N=old[inside],
        advantages_N=advantages[sequence_N],
        sequence_N=sequence_N,
        num_sequences=SEQUENCES,
    )
    settings = resolve_settings(AlgorithmConfig(name="rloo"))
    loss_N = algorithm_class("rloo")(settings).surrogate(view).loss_N
    assert settings.aggregation == "sequence"
    return (loss_N / mask.sum(1)[sequence_N]).sum() / SEQUENCES


@pytest.mark.parametrize("seed", range(3))
def test_loss_and_gradient_are_trls(seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(2, SEQUENCES, LENGTH, generator=generator, dtype=torch.float64)
    lengths = torch.randint(1, LENGTH + 1, (SEQUENCES,), generator=generator)
    mask = (torch.arange(LENGTH) < lengths[:, None]).to(torch.float64)
    advantages = torch.randn(SEQUENCES, generator=generator, dtype=torch.float64)
    old = -1.5 + 0.5 * noise[0]
    results = []
    for function in (our_loss, trl_loss):
        logprobs = (old + 0.1 * noise[1]).requires_grad_()
        loss = function(logprobs, mask, old, advantages)
        results.append((loss.detach(), torch.autograd.grad(loss, logprobs)[0] * mask))
    (loss, gradient), (expected, expected_gradient) = results
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient, expected_gradient)
    assert expected_gradient.abs().sum() > 0
    assert (expected_gradient.abs().sum(1) == 0).sum() < SEQUENCES  # not every response is clipped
