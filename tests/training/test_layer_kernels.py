"""The kernels of a layer, forward and backward, against plain torch: on a GPU, else by Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn

from stages import tiny_policy as tiny

pytestmark = pytest.mark.gpu(stand_in=True)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytest.importorskip("triton")
from penstock.models import layer_kernels as kernels  # noqa: E402

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
