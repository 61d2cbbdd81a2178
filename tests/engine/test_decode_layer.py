"""A decoder layer's decode step against the layer's own code: on a GPU, else by Triton's interpreter."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch

from penstock.engine.transformers.kv_attention import KVShape
from penstock.model.kernels import decode_reference as reference

pytestmark = pytest.mark.gpu(stand_in=True)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytest.importorskip("triton")
from penstock.engine.transformers.cuda import decode_layer  # noqa: E402
from penstock.model.kernels import row_tiles  # noqa: E402

DEVICE = "cpu" if INTERPRETED else "cuda"


def small(kind: str, **fields: Any) -> Any:
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=64,
        hidden_size=48,
        intermediate_size=24 if INTERPRETED else 80,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
        **fields,
    )
    model = getattr(transformers, f"{kind}ForCausalLM")(config).to(DEVICE).eval()
    model.set_attn_implementation("penstock")
    return model.requires_grad_(False)


@pytest.mark.parametrize("few", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("kind", "fields", "fused"),
    [
        ("Qwen2", {}, 2),
        pytest.param(
            "Llama", {"attention_bias": True, "mlp_bias": False}, 2, marks=pytest.mark.slow
        ),
        ("Llama", {"hidden_act": "gelu"}, 0),
        ("Qwen3", {"head_dim": 12}, 0),  # has norms of heads
    ],
)
def test_a_layer_of_the_usual_form_decodes_as_its_own_code_does(
    kind: str, fields: dict[str, Any], fused: int, few: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three steps of five rows; the installed code runs, and a wrong kernel is not installed.

    `few`: with products of few rows, else with the library's.
    """
    from penstock.engine.transformers.cuda import cuda_steps
    from penstock.engine.transformers.cuda.regions import KVPool
    from penstock.engine.transformers.fuse import fuse_projections
    from penstock.engine.transformers.kv_attention import StepCache, probe_shape, running

    if INTERPRETED:
        monkeypatch.setattr(cuda_steps, "decode_attention", reference.decode_attention)  # faster
    model = small(kind, **fields)
    fuse_projections(model)
    shape = probe_shape(model)

    def decode() -> torch.Tensor:
        pool, outputs = KVPool.allocate(shape, 32, torch.device(DEVICE)), []
        start = torch.arange(0, 30, 6, device=DEVICE)
        for position in range(3):
            at = torch.full((5,), position, device=DEVICE)
            ids = (torch.arange(5, device=DEVICE) * 7 + position)[None]
            with running(cuda_steps.DecodeStep.at(pool, start, at)), torch.inference_mode():
                made = model(
                    input_ids=ids,
                    position_ids=at[None],
                    past_key_values=StepCache(),
                    use_cache=True,
                )
            outputs.append(made.logits)
        return torch.cat(outputs)

    wanted = decode()
    calls = []
    monkeypatch.setattr(row_tiles, "MOST_ROWS", 8 if few else 0)
    name = "gate_product" if few else "gate_values"
    own = getattr(decode_layer, name)
    monkeypatch.setattr(decode_layer, name, lambda *inputs: 1.1 * own(*inputs))
    assert decode_layer.fuse_decode(model, shape) == 0
    monkeypatch.setattr(decode_layer, name, lambda *given: calls.append(1) or own(*given))
    assert decode_layer.fuse_decode(model, shape) == fused
    calls.clear()
    torch.testing.assert_close(decode(), wanted, rtol=1e-4, atol=1e-4)
    assert len(calls) == 3 * fused


@pytest.mark.parametrize("off", [0, 1])
def test_a_model_is_judged_by_its_first_layer(off: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding adds up over layers: what is off later is no reason to refuse, a first layer that is off is one."""
    from penstock.engine.transformers.cuda import cuda_steps, decode_model
    from penstock.engine.transformers.fuse import fuse_projections
    from penstock.engine.transformers.kv_attention import probe_shape

    if INTERPRETED:
        monkeypatch.setattr(cuda_steps, "decode_attention", reference.decode_attention)  # faster
        monkeypatch.setattr(row_tiles, "MOST_ROWS", 0)
    model = small("Qwen2")
    fuse_projections(model)
    for name in ("decode", "prefill"):
        own = getattr(decode_layer, name)

        def rounded(layer: Any, step: Any, x: Any, turn: Any, own: Any = own) -> torch.Tensor:
            made: torch.Tensor = own(layer, step, x, turn)
            return made + 0.05 * made.roll(1, -1) if layer.number == off else made

        monkeypatch.setattr(decode_model, name, rounded)
    made = decode_model.make_decode_model(model, probe_shape(model), 2, 16)
    assert (made is not None) == (off == 1)
    assert len(model.base_model.layers) == 2


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "fields"), [("Qwen2", {}), ("Llama", {"attention_bias": True})])
def test_a_model_decodes_without_its_own_code(
    kind: str, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three tokens of two slots, one behind the other; a wrong kernel is not installed."""
    from types import SimpleNamespace

    from penstock.engine.transformers.cuda import cuda_steps, decode_model
    from penstock.engine.transformers.cuda.regions import KVPool
    from penstock.engine.transformers.fuse import fuse_projections
    from penstock.engine.transformers.kv_attention import StepCache, probe_shape, running

    if INTERPRETED:
        monkeypatch.setattr(cuda_steps, "decode_attention", reference.decode_attention)  # faster
        monkeypatch.setattr(row_tiles, "MOST_ROWS", 4)
    model = small(kind, **fields)
    fuse_projections(model)
    shape = probe_shape(model)
    fused = decode_layer.fuse_decode(model, shape)
    assert decode_model.make_decode_model(model, shape, fused - 1, 16) is None
    made = decode_model.make_decode_model(model, shape, fused, 16)
    assert made is not None
    pools = [KVPool.allocate(shape, 20, torch.device(DEVICE)) for _ in range(2)]
    for token in range(3):
        state = SimpleNamespace(
            token=torch.tensor([7 + token, 0, 40 - token], device=DEVICE),
            position=torch.tensor([token, 0, token + 4], device=DEVICE),
            start=torch.tensor([10, 0, 0], device=DEVICE),
        )
        slot = torch.tensor([2, 0], device=DEVICE)
        got = made.logits(state, pools[0], slot)
        with running(cuda_steps.DecodeStep.at(pools[1], state.start[slot], state.position[slot])):
            wanted = model(
                input_ids=state.token[slot][None],
                position_ids=state.position[slot][None],
                past_key_values=StepCache(),
                use_cache=True,
            ).logits[0]
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
        assert torch.equal(pools[0].keys, pools[1].keys)
    own = decode_model.norm_rows
    monkeypatch.setattr(decode_model, "norm_rows", lambda *inputs: 1.1 * own(*inputs))
    assert decode_model.make_decode_model(model, shape, fused, 16) is None


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_prompts_attend_as_each_by_itself(dtype: torch.dtype, window: int | None) -> None:
    """Three prompts of 6, 1 and 9 tokens; on a GPU in half precision by the flash kernel."""
    from penstock.engine.transformers.cuda.cuda_steps import PrefillStep, joined_ranges
    from penstock.engine.transformers.cuda.regions import KVPool
    from penstock.engine.transformers.sequences import Span
    from penstock.model.attention import AttentionCall, causal_attention

    lengths = np.array([6, 1, 9])
    spans = [Span(0, 6, 6), Span(6, 1, 1), Span(7, 9, 9)]
    shape = KVShape(layers=1, heads=2, key_size=16, value_size=16, dtype=dtype)
    pool = KVPool.allocate(shape, 40, torch.device(DEVICE))
    target = joined_ranges(np.array([20, 0, 30]), lengths)
    assert target.tolist() == [*range(20, 26), 0, *range(30, 39)]
    step = PrefillStep(pool, spans, np.arange(16), target)
    draw = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, heads, 16, 16, generator=draw).to(DEVICE, dtype) for heads in (4, 2, 2)
    )
    call = AttentionCall(query, key, value, 0.3, window, None, None)
    got = step.attend(0, call)
    wanted = torch.cat([causal_attention(call, slice(s.start, s.end)) for s in spans], dim=2)
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(got, wanted.transpose(1, 2), rtol=tolerance, atol=tolerance)
    step.store(0, key, value)
    assert torch.equal(pool.keys[0, 20:26], key[0, :, :6].transpose(0, 1))
    assert torch.equal(pool.values[0, 30:39], value[0, :, 7:].transpose(0, 1))


@pytest.mark.parametrize(
    ("kind", "fields"),
    [("Qwen2", {}), pytest.param("Llama", {"attention_bias": True}, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prompts_are_computed_without_the_models_own_code(
    kind: str, fields: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two prompts, the second in two regions; a wrong kernel is not installed."""
    from penstock.engine.transformers.cuda import cuda_steps, decode_model
    from penstock.engine.transformers.cuda.regions import KVPool
    from penstock.engine.transformers.fuse import fuse_projections
    from penstock.engine.transformers.kv_attention import StepCache, probe_shape, running
    from penstock.engine.transformers.sequences import Span

    if INTERPRETED:
        monkeypatch.setattr(cuda_steps, "decode_attention", reference.decode_attention)  # faster
        monkeypatch.setattr(row_tiles, "MOST_ROWS", 0)
    model = small(kind, **fields).to(dtype)
    fuse_projections(model)
    shape = probe_shape(model)
    fused = decode_layer.fuse_decode(model, shape)
    made = decode_model.make_decode_model(model, shape, fused, 16)
    assert made is not None
    spans, source = [Span(0, 5, 5), Span(5, 3, 3)], np.array([*range(8), 5, 6, 7])
    target = np.array([*range(12, 17), 0, 1, 2, 6, 7, 8])
    ids = torch.tensor([3, 9, 27, 1, 40, 8, 2, 6], device=DEVICE)
    positions = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2], device=DEVICE)
    last = torch.tensor([4, 7], device=DEVICE)
    pools = [KVPool.allocate(shape, 20, torch.device(DEVICE)) for _ in range(2)]
    steps = [cuda_steps.PrefillStep(pool, spans, source, target) for pool in pools]
    with torch.inference_mode():
        got = made.prefill(steps[0], ids, positions, last)
        with running(steps[1]):
            wanted = model(
                input_ids=ids[None],
                position_ids=positions[None],
                past_key_values=StepCache(),
                use_cache=True,
                logits_to_keep=last,
            ).logits[0]
    tolerance = 1e-4 if dtype is torch.float32 else 4e-2
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance * 4)
    for mine, own in ((pools[0].keys, pools[1].keys), (pools[0].values, pools[1].values)):
        torch.testing.assert_close(mine, own, rtol=tolerance, atol=tolerance * 4)
    right = decode_layer.rotate_
    monkeypatch.setattr(decode_layer, "rotate_", lambda rows, *turn: right(rows.mul_(1.1), *turn))
    assert decode_model.make_decode_model(model, shape, fused, 16) is None
