"""The kernels of experts against plain torch: on a GPU, else by Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch
from torch.nn import functional

from penstock.model.joint_weights import LinearStack

pytestmark = pytest.mark.gpu(stand_in=True)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytest.importorskip("triton")
from penstock.model.kernels import expert_kernels as kernels  # noqa: E402

DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.float32] if INTERPRETED else [torch.float32, torch.bfloat16]


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


@pytest.mark.slow
@pytest.mark.parametrize("renormalises", [True, False])
def test_rows_choose_their_best_experts_and_are_sorted_by_them(renormalises: bool) -> None:
    """More entries than a program compares at once; expert 5 gets none."""
    rows = 500
    logits = draw(rows, 6)
    logits[:, 5] = -9
    chosen = kernels.best_experts(logits, 3, renormalises=renormalises, rounds=False)
    routes = kernels.sort_entries(*chosen, 6)
    weight, expert = logits.softmax(-1).topk(3, -1)
    if renormalises:
        weight = weight / weight.sum(-1, keepdim=True)
    torch.testing.assert_close(routes.weight_N.view(rows, 3), weight)
    order = torch.sort(expert.flatten(), stable=True).indices
    assert torch.equal(routes.order_N.long(), order)
    counts = torch.bincount(expert.flatten(), minlength=6)
    assert routes.start_E1.tolist() == [0, *counts.cumsum(0).tolist()]
    assert routes.experts == 6


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("rows", "experts"), [(1, 4), (19, 3), (40, 8)])
def test_the_products_of_all_experts_are_added_to_the_residual(
    rows: int, experts: int, transposed: bool, dtype: torch.dtype
) -> None:
    """`transposed`: weights and clamped swiglu of gpt-oss, with biases; else silu."""
    width, inner, count = 40, 24, 2
    x, total = draw(rows, width, dtype=dtype), draw(rows, width, dtype=dtype, seed=1)
    gates, down = draw(experts, 2 * inner, width, dtype=dtype), draw(experts, width, inner, dtype=dtype)  # fmt: skip
    biases = (None, None)
    if transposed:
        gates, down = (w.transpose(1, 2).contiguous().transpose(1, 2) for w in (gates, down))
        biases = draw(experts, 2 * inner, dtype=dtype), draw(experts, width, dtype=dtype)
    chosen = kernels.best_experts(draw(rows, experts), count, renormalises=True, rounds=False)
    routes = kernels.sort_entries(*chosen, experts)
    weight_RC = routes.weight_N.view(rows, count)
    expert_RC = torch.empty(rows * count, dtype=torch.int64, device=DEVICE)
    bounds = routes.start_E1.tolist()
    for expert in range(experts):
        expert_RC[routes.order_N[bounds[expert] : bounds[expert + 1]].long()] = expert
    wanted = total.clone()
    for row in range(rows):
        for choice in range(count):
            expert = int(expert_RC[row * count + choice])
            gate_bias, down_bias = (None if bias is None else bias[expert] for bias in biases)
            product = functional.linear(x[row], gates[expert], gate_bias)
            if transposed:
                gate, up = product[::2].clamp(max=0.7), product[1::2].clamp(-0.7, 0.7)
                inner_I = (up + 1) * (gate * torch.sigmoid(gate * 1.7))
            else:
                gate, up = product.chunk(2)
                inner_I = functional.silu(gate) * up
            output = functional.linear(inner_I, down[expert], down_bias)
            wanted[row] += (output * weight_RC[row, choice]).to(dtype)
    clamp = (1.7, 0.7) if transposed else None
    gated = kernels.expert_gates(x, routes, LinearStack(gates, biases[0]), "silu", clamp)
    got = kernels.add_expert_outputs(total, gated, routes, LinearStack(down, biases[1]))
    assert got is total
    limit = 1e-5 if dtype is torch.float32 else 3e-2
    torch.testing.assert_close(got, wanted, rtol=limit, atol=limit * float(wanted.abs().max()))


@pytest.mark.parametrize("mean", [1, 16, 17, 65, 300])
def test_every_cut_fits_the_rows(mean: int) -> None:
    tiles = kernels.choose_tiles(mean * 8, 8, torch.bfloat16)
    assert tiles.rows in (16, 32, 64, 128)
    assert tiles.rows <= max(16, 2 * mean)
