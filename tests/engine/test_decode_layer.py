"""A decoder layer's decode step against the layer's own code: on a GPU, else by Triton's interpreter."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from penstock.engine.transformers.cuda import decode_reference as reference

pytestmark = pytest.mark.gpu(stand_in=True)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytest.importorskip("triton")
from penstock.engine.transformers.cuda import decode_layer  # noqa: E402

DEVICE = "cpu" if INTERPRETED else "cuda"


def small(kind: str, **fields: Any) -> Any:
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=64,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
        **fields,
    )
    model = getattr(transformers, f"{kind}ForCausalLM")(config).to(DEVICE).eval()
    model.set_attn_implementation("penstock")
    return model.requires_grad_(False)


@pytest.mark.parametrize(
    ("kind", "fields", "fused"),
    [
        ("Qwen2", {}, 2),
        ("Llama", {"attention_bias": True, "mlp_bias": False}, 2),
        ("Llama", {"hidden_act": "gelu"}, 0),
        ("Qwen3", {"head_dim": 12}, 0),  # has norms of heads
    ],
)
def test_a_layer_of_the_usual_form_decodes_as_its_own_code_does(
    kind: str, fields: dict[str, Any], fused: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three steps of five rows; the installed code runs, and a wrong kernel is not installed."""
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
            with running(cuda_steps.DecodeStep(pool, start, at)), torch.inference_mode():
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
    own = decode_layer.silu_gate
    monkeypatch.setattr(decode_layer, "silu_gate", lambda *inputs: 1.1 * own(*inputs))
    assert decode_layer.fuse_decode(model, shape) == 0
    monkeypatch.setattr(decode_layer, "silu_gate", lambda *given: calls.append(1) or own(*given))
    assert decode_layer.fuse_decode(model, shape) == fused
    calls.clear()
    torch.testing.assert_close(decode(), wanted, rtol=1e-4, atol=1e-4)
    assert len(calls) == 3 * fused
