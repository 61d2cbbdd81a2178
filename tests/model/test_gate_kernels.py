"""Gates and norms, forward and backward, against plain torch: on a GPU, else by Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.gpu(stand_in=True)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytest.importorskip("triton")
from transformers.activations import ACT2FN  # noqa: E402

from penstock.model.kernels import layer_kernels  # noqa: E402

DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.float32] if INTERPRETED else [torch.float32, torch.bfloat16]


def relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


def draw(*shape: int, seed: int = 1) -> torch.Tensor:
    return 2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize(("rows", "width"), [(3, 70), (2, 1200), (1, 1024)])
def test_a_gated_activation_and_its_gradients(
    rows: int, width: int, activation: str, dtype: torch.dtype
) -> None:
    """Gate and up are views of one product; the backward pass gives the same activation, in place of its gradient."""
    product, grad = draw(rows, 2 * width).to(dtype), draw(rows, width, seed=2).to(dtype)
    exact = product.double().requires_grad_()
    gate, up = exact.chunk(2, -1)
    wanted = ACT2FN[activation](gate) * up
    wanted.backward(grad.double())
    both, again = product.to(DEVICE), grad.to(DEVICE, copy=True)
    got = layer_kernels.gate_values(*both.chunk(2, -1), activation)
    got_grad = layer_kernels.gate_gradients(grad.to(DEVICE), both, activation, again=False)
    limit = 1e-6 if dtype is torch.float32 else 5e-3
    assert relative_error(got.cpu(), wanted.detach()) < limit
    assert exact.grad is not None
    assert relative_error(got_grad.cpu(), exact.grad) < limit
    assert torch.equal(layer_kernels.gate_gradients(again, both, activation, again=True), got_grad)
    assert torch.equal(again, got)


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
def test_a_gate_far_from_zero_has_finite_gradients(activation: str) -> None:
    gate = torch.tensor([[-200.0, -90.0, 0.0, 90.0, 200.0]], device=DEVICE)
    both = torch.cat([gate, torch.ones_like(gate)], -1)
    grad = layer_kernels.gate_gradients(torch.ones_like(gate), both, activation, again=False)
    assert grad[0, :5].tolist() == pytest.approx([0, 0, 0.5, 1, 1], abs=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("adds_one", [False, True])
@pytest.mark.parametrize(("rows", "width"), [(1, 70), (9, 64), (5, 1300)])
def test_a_norm_its_residual_and_its_gradients(
    rows: int, width: int, adds_one: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer_kernels, "_PROGRAMS", 2)  # each has several blocks of rows
    monkeypatch.setattr(layer_kernels, "_ELEMENTS", 2 * 128)
    monkeypatch.setattr(layer_kernels, "_BACK_ELEMENTS", 2 * 128)
    x, weight, grad, residual = (
        draw(*shape, seed=seed).to(dtype)
        for seed, shape in enumerate(((rows, width), (width,), *[(rows, width)] * 2), start=1)
    )
    x[0] *= 30
    exact = [one.double().requires_grad_() for one in (x, weight)]
    wanted = nn.functional.rms_norm(exact[0], (width,), exact[1] + adds_one, 1e-6)
    wanted.backward(grad.double())
    x, weight, grad, residual = (one.to(DEVICE) for one in (x, weight, grad, residual))
    got, inverse = layer_kernels.rms_norm(x, weight, 1e-6, adds_one=adds_one)
    added, _ = layer_kernels.rms_norm(
        x, weight, 1e-6, adds_one=adds_one, residual=residual, scale=0.5
    )
    grads = layer_kernels.norm_gradients(grad, x, weight, inverse, residual, adds_one=adds_one)
    pairs = [
        (got, wanted.detach()),
        (added, residual.cpu().double() + 0.5 * wanted.detach()),
        (grads[0], exact[0].grad + residual.cpu().double()),
        (grads[1], exact[1].grad),
    ]
    for actual, expected in pairs:
        limit = 1e-5 if dtype is torch.float32 else 1e-2
        assert relative_error(actual.cpu(), expected) < limit
