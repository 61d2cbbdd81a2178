"""The automatic micro-batch, on numbers worked out by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from penstock.training.pack import LayerShape, choose_micro_batch_tokens

GIB = 2**30
SMALL = LayerShape(layers=30, hidden=576, intermediate=1536, bytes_per_number=2)  # SmolLM2-135M
LARGE = LayerShape(layers=28, hidden=3584, intermediate=18944, bytes_per_number=2)  # Qwen2.5-7B


def test_activations_of_a_token() -> None:
    assert SMALL.bytes_per_token(checkpointing=False) == 30 * (12 * 576 + 4 * 1536) * 2 == 783_360
    assert SMALL.bytes_per_token(checkpointing=True) == (30 * 576 + 13_056) * 2 == 60_672
    assert LARGE.bytes_per_token(checkpointing=False) == 28 * 118_784 * 2 == 6_651_904


@pytest.mark.parametrize(
    ("free", "trained", "shape", "checkpointing", "wanted"),
    [
        # 101 GiB hold 68,000 tokens in their half: as many as are useful
        (101 * GIB, 135_000_000, SMALL, False, 32768),
        # 20 GiB less 1.5 GiB to come, half of it: 12,694 tokens
        (20 * GIB, 135_000_000, SMALL, False, 12288),
        (20 * GIB, 135_000_000, SMALL, True, 32768),
        # 100 GiB less 85 GiB to come: 1,207 tokens, but never fewer than 2048
        (100 * GIB, 7_600_000_000, LARGE, False, 2048),
        (120 * GIB, 7_600_000_000, LARGE, False, 2048),
        (140 * GIB, 7_600_000_000, LARGE, False, 4096),
        # adapters have few moments
        (100 * GIB, 20_000_000, LARGE, False, 7168),
        (GIB, 135_000_000, SMALL, False, 2048),
    ],
)
def test_tokens(
    free: int, trained: int, shape: LayerShape, checkpointing: bool, wanted: int
) -> None:
    per_token = shape.bytes_per_token(checkpointing=checkpointing)
    assert choose_micro_batch_tokens(free, trained, per_token, shape.useful_tokens) == wanted


def test_small_layers_need_larger_packs() -> None:
    """Numbers of a layer: 4 x 576^2 + 3 x 576 x 1536 = 4.0 million; 4 x 768^2 + 3 x 768 x 3072 = 9.4 million."""
    medium = LayerShape(layers=24, hidden=768, intermediate=3072, bytes_per_number=2)
    assert [one.useful_tokens for one in (SMALL, medium, LARGE)] == [32768, 12288, 12288]


def test_shapes_of_configs() -> None:
    dense = SimpleNamespace(hidden_size=8, num_hidden_layers=2, intermediate_size=24)
    assert LayerShape.of(dense, 4).intermediate == 24
    experts = SimpleNamespace(**vars(dense), num_experts_per_tok=2, moe_intermediate_size=5)
    assert LayerShape.of(experts, 4).intermediate == 10
