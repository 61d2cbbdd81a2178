"""The forward pass over rows on a CPU computes what the model's own code does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from penstock.engine.transformers.cpu.row_model import RowModel, _HeadNorms, _Norm, make_row_model
from penstock.engine.transformers.fuse import fuse_projections
from penstock.engine.transformers.kv_attention import OneSequence, StepCache, running
from penstock.weights.model_weights import load_weights

USUAL: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": 12},
    "Qwen2": {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1},
    "Qwen3": {"tie_word_embeddings": True},
}


def make_model(family: str, **fields: Any) -> Any:
    settings = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
    }
    settings |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    config = getattr(transformers, f"{family}Config")(**settings, **fields)
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="penstock")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model.eval()


def own_logits(model: Any, ids_R: torch.Tensor, position_R: torch.Tensor) -> torch.Tensor:
    with running(OneSequence()), torch.no_grad():
        output = model(
            input_ids=ids_R[None],
            position_ids=position_R[None],
            past_key_values=StepCache(),
            use_cache=True,
        )
    return output.logits[0]


def assert_same(rows: RowModel, model: Any) -> None:
    ids_R, position_R = torch.randint(97, (40,)), torch.arange(40)
    wanted = own_logits(model, ids_R, position_R)
    with torch.no_grad():
        whole = rows(OneSequence(), ids_R, position_R)
        kept = rows(OneSequence(), ids_R, position_R, torch.tensor([39, 7]))
    torch.testing.assert_close(whole, wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(kept, wanted[[39, 7]], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", USUAL)
def test_logits_are_the_models_own_and_follow_new_weights(family: str) -> None:
    model = make_model(family, **USUAL[family])
    rows = make_row_model(model, fuse_projections(model))
    assert rows is not None
    assert_same(rows, model)
    before = own_logits(model, torch.arange(5), torch.arange(5))
    load_weights(model, {n: p.detach() * 1.5 for n, p in model.named_parameters()})
    assert not torch.allclose(own_logits(model, torch.arange(5), torch.arange(5)), before)
    assert_same(rows, model)


def test_models_of_another_form_keep_their_own_code() -> None:
    model = make_model("Llama")
    assert make_row_model(model, []) is None  # products that are not fused
    for other in (
        make_model("Llama", hidden_act="gelu"),
        make_model("Granite"),
        make_model("Olmo2"),
    ):
        assert make_row_model(other, fuse_projections(other)) is None


def test_a_known_class_that_computes_something_else_keeps_its_own_code() -> None:
    model = make_model("Llama")
    fused = fuse_projections(model)
    assert make_row_model(model, fused) is not None
    model.base_model.layers[0].register_forward_hook(lambda layer, inputs, output: output + 0.1)
    assert make_row_model(model, fused) is None


def make_norm(size: int, dtype: torch.dtype = torch.float32, epsilon: float = 1e-6) -> Any:
    norm = torch.nn.RMSNorm(size, eps=epsilon, dtype=dtype)
    with torch.no_grad():
        norm.weight.normal_()
    return norm


def rms_norm(norm: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.rms_norm(x, norm.weight.shape, norm.weight, norm.eps)


@pytest.mark.parametrize("size", [8, 100, 128, 576, 4096])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_a_norm_has_the_bits_of_the_models_own(size: int, dtype: torch.dtype) -> None:
    norm, x = make_norm(size, dtype), torch.randn(6, size).to(dtype)
    assert torch.equal(_Norm(norm)(x), rms_norm(norm, x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("key_epsilon", [1e-6, 1e-3])
@torch.inference_mode()
def test_the_norms_of_heads_have_their_bits_together(
    dtype: torch.dtype, key_epsilon: float
) -> None:
    of_query, of_key = make_norm(32, dtype), make_norm(32, dtype, key_epsilon)
    both = torch.randn(5, 6, 32).to(dtype)
    before = both.clone()
    got = _HeadNorms(of_query, of_key, 4)(both)
    assert torch.equal(got[:, :4], rms_norm(of_query, both[:, :4]))
    assert torch.equal(got[:, 4:], rms_norm(of_key, both[:, 4:]))
    assert torch.equal(both, before)
