"""What a run needs of memory, on numbers worked out by hand and on peaks that a GPU had."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from penstock.config.demo import policy_path
from penstock.config.memory import ModelShape, pack_tokens, read_shape, trainer_needs

GIB = 2**30


def shape(**settings: object) -> ModelShape:
    return ModelShape.of({"max_position_embeddings": 32768, **settings})


TINY = shape(
    hidden_size=8,
    num_hidden_layers=2,
    intermediate_size=24,
    num_attention_heads=2,
    num_key_value_heads=1,
    vocab_size=10,
)
SMOLLM = shape(  # SmolLM2-135M
    hidden_size=576,
    num_hidden_layers=30,
    intermediate_size=1536,
    num_attention_heads=9,
    num_key_value_heads=3,
    vocab_size=49152,
    tie_word_embeddings=True,
)
QWEN_HALF = shape(  # Qwen2.5-0.5B
    hidden_size=896,
    num_hidden_layers=24,
    intermediate_size=4864,
    num_attention_heads=14,
    num_key_value_heads=2,
    vocab_size=151936,
    tie_word_embeddings=True,
)
QWEN_TWO = shape(  # Qwen3-1.7B
    hidden_size=2048,
    num_hidden_layers=28,
    intermediate_size=6144,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=151936,
    tie_word_embeddings=True,
)
GEMMA = shape(  # Gemma 3 1B
    hidden_size=1152,
    num_hidden_layers=26,
    intermediate_size=6912,
    num_attention_heads=4,
    num_key_value_heads=1,
    head_dim=256,
    vocab_size=262144,
    tie_word_embeddings=True,
)
QWEN_SEVEN = shape(  # Qwen2.5-7B
    hidden_size=3584,
    num_hidden_layers=28,
    intermediate_size=18944,
    num_attention_heads=28,
    num_key_value_heads=4,
    vocab_size=152064,
)


def test_the_numbers_of_a_model_are_those_of_its_matrices() -> None:
    """A layer: 8 x (2 x 8 queries and output + 2 x 4 keys and values + 3 x 24) = 768; twice 10 x 8 at the ends."""
    assert TINY.parameters == 2 * 768 + 2 * 80
    assert (TINY.queries, TINY.keys) == (8, 4)
    assert TINY.kv_bytes(2) == 2 * 2 * 4 * 2
    # rank 3: 2 x (8 + 8) + 2 x (8 + 4) + 3 x (8 + 24) = 152 a layer
    assert TINY.adapters(3) == 3 * 2 * 152
    assert QWEN_HALF.parameters / 1e9 == pytest.approx(0.494, rel=0.01)
    assert QWEN_SEVEN.parameters / 1e9 == pytest.approx(7.62, rel=0.01)


def test_configs_of_other_forms_are_read() -> None:
    dense = SimpleNamespace(hidden_size=8, num_hidden_layers=2, intermediate_size=24)
    assert ModelShape.of(dense).intermediate == 24
    experts = SimpleNamespace(**vars(dense), num_experts_per_tok=2, moe_intermediate_size=5)
    assert ModelShape.of(experts).intermediate == 10
    assert ModelShape.of({"text_config": vars(dense), "hidden_size": 99}).hidden == 8
    assert ModelShape.of({"n_embd": 8, "n_layer": 2}).intermediate == 32
    assert ModelShape.of({**vars(dense), "intermediate_size": [16, 32]}).intermediate == 32
    named = SimpleNamespace(n_wide=8, num_hidden_layers=2, attribute_map={"hidden_size": "n_wide"})
    assert ModelShape.of(named).hidden == 8
    with pytest.raises(ValueError, match="hidden_size"):
        ModelShape.of({})


def test_a_header_says_how_many_numbers_a_checkpoint_has() -> None:
    demo = read_shape("demo")
    assert demo is not None
    size = (policy_path() / "model.safetensors").stat().st_size
    assert 4 * demo.parameters == pytest.approx(size, rel=0.02)
    assert read_shape("nobody/knows-it") is None


def test_a_trainer_of_small_numbers() -> None:
    """1,696 numbers: weights 2 bytes, masters 4, gradients 4, moments 8; 5 tokens of 2 layers and 10 logits."""
    needs = trainer_needs(TINY, each=2, tokens=5)
    assert (needs.weights, needs.masters) == (2 * 1696, 4 * 1696)
    assert (needs.gradients, needs.moments) == (4 * 1696, 8 * 1696)
    assert needs.saved == (2 + 4 + 8) * 1696
    assert needs.activations == 5 * (2 * (12 * 8 + 4 * 24) + 10) * 2
    again = trainer_needs(TINY, each=2, tokens=5, checkpointing=True)
    assert again.activations == 5 * (2 * 8 + 12 * 8 + 4 * 24 + 10) * 2
    exact = trainer_needs(TINY, each=4, tokens=5)
    assert (exact.weights, exact.masters) == (4 * 1696, 0)
    adapted = trainer_needs(TINY, each=2, tokens=5, rank=3)
    assert (adapted.weights, adapted.masters, adapted.moments) == (2 * 1696, 4 * 912, 8 * 912)
    more = trainer_needs(TINY, each=2, tokens=5, learners=2, scorers=1, averages=1, published=1)
    assert (more.weights, more.masters) == (4 * 2 * 1696, 3 * 4 * 1696)
    shared = trainer_needs(TINY, each=2, tokens=5, shards=4)
    assert (shared.weights, shared.masters) == (0, 1696)
    assert (shared.gradients, shared.moments) == (1696, 2 * 1696)


@pytest.mark.parametrize(
    ("model", "tokens", "peak"),
    [
        # bins of 32 x 512 tokens are even halves; of 64 groups of 64 + 8 x 256 tokens, five groups
        (QWEN_HALF, 8192, 16.4),
        (QWEN_HALF, 5 * 2112, 18.8),
        (QWEN_TWO, 8192, 44.6),
        (GEMMA, 8192, 30.9),
    ],
)
def test_the_peaks_that_an_h200_had_in_the_speed_table(
    model: ModelShape, tokens: int, peak: float
) -> None:
    """The figures of docs/performance.md, in GiB of allocated memory, within a tenth."""
    needs = trainer_needs(model, each=2, tokens=tokens, joint=True)
    assert needs.total / GIB == pytest.approx(peak, rel=0.1)


def test_activations_of_a_token() -> None:
    assert SMOLLM.bytes_per_token(2, checkpointing=False) == 30 * (12 * 576 + 4 * 1536) * 2
    assert SMOLLM.bytes_per_token(2, checkpointing=True) == (30 * 576 + 13_056) * 2 == 60_672
    assert QWEN_SEVEN.bytes_per_token(2, checkpointing=False) == 28 * 118_784 * 2 == 6_651_904


@pytest.mark.parametrize(
    ("free", "trained", "model", "checkpointing", "wanted"),
    [
        # 101 GiB hold 68,000 tokens in their half: as many as are useful
        (101 * GIB, 135_000_000, SMOLLM, False, 32768),
        # 20 GiB less 1.5 GiB to come, half of it: 12,694 tokens
        (20 * GIB, 135_000_000, SMOLLM, False, 12288),
        (20 * GIB, 135_000_000, SMOLLM, True, 32768),
        # 100 GiB less 85 GiB to come: 1,207 tokens, but never fewer than 2048
        (100 * GIB, 7_600_000_000, QWEN_SEVEN, False, 2048),
        (120 * GIB, 7_600_000_000, QWEN_SEVEN, False, 2048),
        (140 * GIB, 7_600_000_000, QWEN_SEVEN, False, 4096),
        # adapters have few moments
        (100 * GIB, 20_000_000, QWEN_SEVEN, False, 7168),
        (GIB, 135_000_000, SMOLLM, False, 2048),
    ],
)
def test_tokens_of_a_pack(
    free: int, trained: int, model: ModelShape, checkpointing: bool, wanted: int
) -> None:
    per_token = model.bytes_per_token(2, checkpointing=checkpointing)
    assert pack_tokens(free, 12 * trained, per_token, model.useful_tokens) == wanted


def test_small_layers_need_larger_packs() -> None:
    """Numbers of a layer: 4 x 576^2 + 3 x 576 x 1536 = 4.0 million; 4 x 768^2 + 3 x 768 x 3072 = 9.4 million."""
    medium = shape(hidden_size=768, num_hidden_layers=24, intermediate_size=3072)
    assert [one.useful_tokens for one in (SMOLLM, medium, QWEN_SEVEN)] == [32768, 12288, 12288]
