"""The GPU sampler over fifty million rows: in range, with mass, the exact distribution, right log-probs."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.gpu

ROWS, VOCABULARY, ROUNDS = 4096, 49152, 12_250  # 50.2 million rows


def hostile_logits() -> torch.Tensor:
    """Return logits as models produce them: ordinary, very certain, masked, or with broken values."""
    generator = torch.Generator(device="cuda").manual_seed(1)
    logits = torch.randn(ROWS, VOCABULARY, generator=generator, device="cuda")
    logits[0::8] *= 3
    logits[1::8] *= 30
    logits[2::8] = 0
    logits[3::8, 1000:] = -float("inf")
    logits[4::8, : VOCABULARY // 2] -= 80
    logits[5::8] = logits[5::8] * 1e-3 - 20
    logits[5::8, -1] = 0
    return logits.bfloat16()


@pytest.mark.timeout(500)
def test_fifty_million_rows() -> None:
    from penstock.model.kernels import decode_kernels as kernels

    logits = hostile_logits()
    temperature = torch.ones(ROWS, device="cuda")
    key = torch.arange(ROWS, device="cuda") * 0x9E3779B97F4A7C1 + 12345
    exact = logits.float().log_softmax(-1)
    worst = torch.zeros((), device="cuda")
    outside = torch.zeros((), dtype=torch.int64, device="cuda")
    counts = torch.zeros(8, VOCABULARY, dtype=torch.int64, device="cuda")
    kind = torch.arange(ROWS, device="cuda") % 8
    for round_ in range(ROUNDS):
        index = torch.full((ROWS,), round_, device="cuda")
        token, logprob = kernels.sample_rows(logits, key, index, temperature)
        inside = (token >= 0) & (token < VOCABULARY)
        outside += (~inside).sum()
        wanted = exact.gather(1, token.clamp(0, VOCABULARY - 1)[:, None])[:, 0]
        worst = torch.maximum(worst, (logprob - wanted).abs().nan_to_num(torch.inf).max())
        counts.view(-1).index_add_(
            0, kind * VOCABULARY + token.clamp(0, VOCABULARY - 1), torch.ones_like(token)
        )
    assert outside.item() == 0
    assert worst.item() < 1e-3
    for which in range(8):
        expected = exact[kind == which].double().exp().sum(0) * ROUNDS
        often = expected >= 50
        rest = torch.stack([counts[which][~often].sum().double(), expected[~often].sum()])
        observed = counts[which][often].double()
        chi = ((observed - expected[often]) ** 2 / expected[often]).sum()
        cells = int(often.sum())
        if rest[1] >= 50:
            chi, cells = chi + (rest[0] - rest[1]) ** 2 / rest[1], cells + 1
        # the statistic has mean cells - 1 and deviation sqrt(2 (cells - 1)); rows share uniforms by key only
        assert chi < (cells - 1) + 6 * (2 * max(1, cells - 1)) ** 0.5, (which, float(chi), cells)
