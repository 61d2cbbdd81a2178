"""The kernels of a layer, forward and backward, against plain torch: on a GPU, else by Triton's interpreter."""

from __future__ import annotations

import copy
import os
import types
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from stages import tiny_policy as tiny

pytestmark = pytest.mark.gpu(stand_in=True)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytest.importorskip("triton")
from penstock.model.kernels import layer_kernels as kernels  # noqa: E402

DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.float32] if INTERPRETED else [torch.float32, torch.bfloat16]


def relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


def draw(*shape: int, seed: int = 1) -> torch.Tensor:
    return 2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(3, 70), (2, 1200), (1, 1024)])
def test_a_gated_activation_and_its_gradients(rows: int, width: int, dtype: torch.dtype) -> None:
    """Gate and up may be views of one product, as in the engine."""
    product = draw(1, rows, 2 * width).to(dtype)
    grad = draw(1, rows, width, seed=2).to(dtype)
    exact = product.double().requires_grad_()
    gate, up = exact.split(width, dim=-1)
    wanted = nn.functional.silu(gate) * up
    wanted.backward(grad.double())

    own = product.to(DEVICE).requires_grad_()
    got = kernels.silu_gate(*own.split(width, dim=-1))
    got.backward(grad.to(DEVICE))
    limit = 1e-6 if dtype is torch.float32 else 5e-3
    assert relative_error(got.detach().cpu(), wanted.detach()) < limit
    assert own.grad is not None
    assert exact.grad is not None
    assert relative_error(own.grad.cpu(), exact.grad) < limit


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_backward_pass_computes_the_activation_again_in_place_of_its_gradient(
    dtype: torch.dtype,
) -> None:
    rows, width = 3, 1200
    product = draw(rows, 2 * width).to(DEVICE, dtype)
    grad = draw(rows, width, seed=2).to(DEVICE, dtype)
    gate, up = product[:, :width], product[:, width:]
    gate_grad, up_grad, gate_grad_2, up_grad_2 = (torch.empty_like(grad) for _ in range(4))
    kernels.gate_gradients(grad, gate, up, gate_grad, up_grad, width)
    kernels.gate_gradients(grad, gate, up, gate_grad_2, up_grad_2, width, active=grad)
    assert torch.equal(grad, kernels.gate_values(gate, up))
    assert torch.equal(gate_grad, gate_grad_2)
    assert torch.equal(up_grad, up_grad_2)


def test_a_gate_far_from_zero_has_finite_gradients() -> None:
    gate = torch.tensor([[[-200.0, -90.0, 0.0, 90.0, 200.0]]], device=DEVICE).requires_grad_()
    up = torch.ones_like(gate)
    kernels.silu_gate(gate, up).sum().backward()
    assert gate.grad is not None
    assert gate.grad[0, 0].tolist() == pytest.approx([0, 0, 0.5, 1, 1], abs=1e-6)


def test_layers_are_replaced_only_where_they_compute_the_same_and_can_be_restored() -> None:
    model = tiny.tiny_model().to(DEVICE)
    x = draw(1, 3, 64).to(DEVICE)
    model.model.layers[1].mlp.act_fn = nn.GELU()
    wanted = [layer.mlp(x) for layer in model.model.layers]
    assert kernels.fuse_layers(model, ("gated mlp",)) == {"gated mlp": 1}
    for layer, one in zip(model.model.layers, wanted, strict=True):
        assert relative_error(layer.mlp(x).detach().cpu(), one.detach().cpu()) < 1e-5
    assert "forward" in vars(model.model.layers[0].mlp)
    kernels.restore_layers(model)
    assert "forward" not in vars(model.model.layers[0].mlp)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(14, 2, 64), (3, 1, 20)])
def test_a_rotary_embedding_and_its_gradients(
    heads: int, kv_heads: int, size: int, dtype: torch.dtype
) -> None:
    """The halves of cos and sin differ here, so that a mixed-up half shows."""
    from transformers.models.qwen2.modeling_qwen2 import apply_rotary_pos_emb

    rows = 5
    product = draw(1, rows, (heads + kv_heads) * size).to(dtype)
    cos, sin = (draw(1, rows, size, seed=seed).to(dtype) for seed in (3, 4))

    def rotated(apply: Any, leaf: torch.Tensor, *turn: torch.Tensor) -> torch.Tensor:
        parts = leaf.split([heads * size, kv_heads * size], dim=-1)
        q, k = (part.view(1, rows, -1, size).transpose(1, 2) for part in parts)
        q, k = apply(q, k, *turn)
        (q.square().sum() + k.sin().sum()).backward()
        return torch.cat([q, k], dim=1).detach().cpu()

    exact, own = product.double().requires_grad_(), product.to(DEVICE).requires_grad_()
    wanted = rotated(apply_rotary_pos_emb, exact, cos.double(), sin.double())
    got = rotated(kernels.apply_rotary, own, cos.to(DEVICE), sin.to(DEVICE))
    assert relative_error(got, wanted) < (1e-6 if dtype is torch.float32 else 5e-3)
    assert own.grad is not None
    assert exact.grad is not None
    assert relative_error(own.grad.cpu(), exact.grad) < (1e-6 if dtype is torch.float32 else 2e-2)


def test_a_rotary_embedding_of_a_part_of_each_head_keeps_its_own_code() -> None:
    """The layer's function rotates as many dimensions as cos has; the kernel rotates all."""
    calls = []

    def own(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(inputs)
        return inputs[0], inputs[1]

    def forward(*inputs: Any) -> Any:
        return apply_rotary_pos_emb(*inputs)  # type: ignore[name-defined]  # noqa: F821

    layer = types.FunctionType(forward.__code__, {"apply_rotary_pos_emb": own})
    fused = kernels._with_kernel(layer)
    q, k = draw(1, 2, 3, 8).to(DEVICE), draw(1, 1, 3, 8).to(DEVICE)
    narrow, whole = torch.ones(1, 3, 4, device=DEVICE), torch.ones(1, 3, 8, device=DEVICE)
    fused(q, k, narrow, narrow)
    assert len(calls) == 1
    fused(q, k, whole, whole)
    assert len(calls) == 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 70), (9, 64), (5, 1300)])
def test_the_gradients_of_a_norm(
    rows: int, width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.model.kernels import norm_kernels

    monkeypatch.setattr(norm_kernels, "_PROGRAMS", 2)  # each has several blocks of rows
    monkeypatch.setattr(norm_kernels, "_ELEMENTS", 2 * 128)
    monkeypatch.setattr(norm_kernels, "_BACK_ELEMENTS", 2 * 128)
    x, weight, grad = (
        draw(*shape, seed=seed).to(dtype)
        for seed, shape in enumerate(((1, rows, width), (width,), (1, rows, width)), start=1)
    )
    x[0, 0] *= 30
    results = []
    for device, kind, norm in (
        ("cpu", torch.float64, None),
        (DEVICE, dtype, norm_kernels.rms_norm),
    ):
        leaves = [one.to(device, kind, copy=True).requires_grad_() for one in (x, weight)]
        norm = norm or (lambda x, w, eps: nn.functional.rms_norm(x, w.shape, w, eps))
        output = norm(*leaves, 1e-6)
        output.backward(grad.to(device, kind))
        results.append([one.detach().cpu() for one in (output, leaves[0].grad, leaves[1].grad)])
    for got, wanted in zip(results[1], results[0], strict=True):
        assert relative_error(got, wanted) < (1e-5 if dtype is torch.float32 else 1e-2)


@pytest.mark.parametrize("kind", ["Qwen2", "Llama"])  # with biases, and without
def test_one_product_for_queries_keys_and_values(kind: str) -> None:
    """Log-probs and gradients stay the same, in a copy of the model too; q, k and v can be separated again."""
    import transformers

    torch.manual_seed(0)
    fields = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    sizes = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48}
    config = getattr(transformers, f"{kind}Config")(**fields, **sizes)
    plain = getattr(transformers, f"{kind}ForCausalLM")(config)
    joined = copy.deepcopy(plain)
    assert kernels.fuse_layers(joined, ("joint qkv",)) == {"joint qkv": 2}
    joined = copy.deepcopy(joined)
    ids = torch.arange(30).view(2, 15)
    products = []
    own = nn.functional.linear
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.functional, "linear", lambda *given: products.append(1) or own(*given))
        got = joined(ids).logits
    assert len(products) == 2 * 5 + 1  # qkv, o, gate, up and down of each layer; the head
    wanted = plain(ids).logits
    torch.testing.assert_close(got, wanted)
    for logits in (got, wanted):
        logits.square().sum().backward()
    for (name, one), other in zip(joined.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, msg=name)
    kernels.restore_layers(joined)
    assert not any("forward" in vars(module) for module in joined.modules())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_policy_on_a_gpu_has_the_gradients_of_its_plain_layers(dtype: torch.dtype) -> None:
    from penstock.model import packed_attention
    from penstock.training import policy as policies
    from penstock.training.pack import make_pack

    packed_attention.register()

    def gradients(kinds: tuple[str, ...]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        model = tiny.tiny_model().to("cuda", dtype)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(policies, "FUSED", kinds)
            policy = policies.Policy(model)
        fused = sum("forward" in vars(layer.mlp) for layer in model.model.layers)
        assert fused == (2 if "gated mlp" in kinds else 0)
        ids = [np.arange(3, 40), np.arange(5, 25)]
        predictors = [np.arange(len(row) - 1) for row in ids]
        pack = make_pack(range(2), ids, predictors, np.array([0, 36, 55]), policy.device)
        logprobs, _ = policy(pack, torch.ones(len(pack.target_N), device="cuda"))
        logprobs.square().sum().backward()
        return logprobs.detach(), {
            n: p.grad for n, p in model.named_parameters() if p.grad is not None
        }

    got, got_gradients = gradients(policies.FUSED)
    wanted, wanted_gradients = gradients(())
    exact = dtype is torch.float32
    assert relative_error(got, wanted) < (1e-5 if exact else 5e-2)
    for name, one in wanted_gradients.items():
        assert relative_error(got_gradients[name], one) < (1e-4 if exact else 0.2), name
