"""The steps of the CPU runner: prompts of one length attend in one call, with the bits of calls of their own."""

from __future__ import annotations

import pytest
import torch

from penstock.engine.transformers.cpu.cpu_steps import PrefillRows, _prompt_runs
from penstock.engine.transformers.sequences import Span
from penstock.model.attention import AttentionCall, causal_attention

# rows 2 to 30; the third sequence has a partial response of three tokens
SPANS = [Span(2, 5, 5), Span(7, 5, 5), Span(12, 5, 8), Span(20, 5, 5), Span(25, 6, 6)]


def test_adjacent_prompts_of_one_length_are_joined() -> None:
    assert _prompt_runs(SPANS, joined=True) == [(2, 3, 5), (20, 1, 5), (25, 1, 6)]
    assert _prompt_runs(SPANS, joined=False) == [(s.start, 1, s.prompt_length) for s in SPANS]
    assert _prompt_runs([], joined=True) == []


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("softcap", [None, 20.0])
@torch.inference_mode()
def test_joined_prompts_have_the_bits_of_single_ones(
    window: int | None, softcap: float | None
) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, 31, 16) for heads in (4, 2, 2))
    call = AttentionCall(query, key, value, 0.25, window, softcap, None)
    output = torch.zeros(1, 31, 4, 16)
    PrefillRows(SPANS).attend(call, output)
    for span in SPANS:
        rows = slice(span.start, span.start + span.prompt_length)
        assert torch.equal(output[:, rows], causal_attention(call, rows).transpose(1, 2))
