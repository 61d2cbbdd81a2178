"""The products of few rows against plain torch: on a GPU, else by Triton's interpreter."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from penstock.model.kernels.row_tiles import Norm, Product, Tiles, choose

pytestmark = pytest.mark.gpu(stand_in=True)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytest.importorskip("triton")
from penstock.model.kernels import row_kernels as kernels  # noqa: E402

DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.float32] if INTERPRETED else [torch.float32, torch.bfloat16]
CUTS = [Tiles(columns=16, split=4, block=16), Tiles(columns=8, split=8, block=16, warps=8)]

Draw = Callable[..., torch.Tensor]


@pytest.fixture
def draw() -> Draw:
    generator = torch.Generator().manual_seed(1)

    def values(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) / shape[-1] ** 0.5).to(dtype).to(DEVICE)

    return values


def plain_norm(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    wide = x.float()
    scaled = wide * (wide.square().mean(-1, keepdim=True) + norm.epsilon).rsqrt()
    return (scaled * (norm.weight.float() + norm.offset)).to(x.dtype)


def plain_turn(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    wide = heads.float()
    turned = wide * cos.float() + wide.roll(heads.shape[-1] // 2, -1) * sin.float()
    return turned.to(heads.dtype)


def draw_turn(draw: Draw, rows: int, size: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Cosines and signed sines [rows, 1, size], as views of one table."""
    table = draw(rows, 2 * size, dtype=dtype)
    half = size // 2
    table[:, half:size] = table[:, :half]
    table[:, size : size + half] = -table[:, size + half :]
    return table[:, None, :size], table[:, None, size:]


def assert_close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    limit = 1e-5 if wanted.dtype is torch.float32 else 2e-2
    torch.testing.assert_close(got, wanted, rtol=limit, atol=limit)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tiles", CUTS, ids=str)
@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads", "size", "biased", "offset"),
    [(1, 4, 2, 12, True, 0.0), (18, 3, 3, 20, False, 1.0), (16, 2, 1, 32, True, 0.0)],
)
def test_heads_are_projected_turned_and_stored(
    rows: int, heads: int, kv_heads: int, size: int, biased: bool, offset: float,
    tiles: Tiles, dtype: torch.dtype, draw: Draw,
) -> None:  # fmt: skip
    width, outputs = 56, (heads + 2 * kv_heads) * size
    x, weight = 3 * draw(rows, width, dtype=dtype), draw(outputs, width, dtype=dtype)
    norm = Norm(draw(width, dtype=dtype), 1e-6, offset)
    bias = draw(outputs, dtype=dtype) if biased else None
    turn = draw_turn(draw, rows, size, dtype)
    target = (torch.arange(rows, device=DEVICE) * 7) % 19
    pools = [torch.full((19, kv_heads, size), 5.0, dtype=dtype, device=DEVICE) for _ in range(4)]
    got = kernels.project_and_store(x, norm, weight, bias, turn, *pools[:2], target, tiles)
    product = functional.linear(plain_norm(x, norm), weight, bias).view(rows, -1, size)
    turned, values = plain_turn(product[:, :-kv_heads], *turn), product[:, -kv_heads:]
    assert_close(got, turned[:, :heads])
    pools[2][target], pools[3][target] = turned[:, heads:], values
    assert_close(pools[0], pools[2])
    assert_close(pools[1], pools[3])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tiles", CUTS, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(5, 40), (35, 24)])
def test_a_gated_product_equals_the_reference(
    rows: int, width: int, tiles: Tiles, dtype: torch.dtype, draw: Draw
) -> None:
    x, weight = 3 * draw(rows, 56, dtype=dtype), 4 * draw(2 * width, 56, dtype=dtype)
    norm = Norm(1 + draw(56, dtype=dtype), 1e-6)
    got = kernels.gate_product(x, norm, weight, "silu", tiles)
    gate, up = functional.linear(plain_norm(x, norm), weight).chunk(2, 1)
    assert_close(got, functional.silu(gate) * up)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tiles", CUTS, ids=str)
@pytest.mark.parametrize("inputs", [56, 160])
@pytest.mark.parametrize("biased", [False, True])
def test_a_product_is_added_to_the_residual(
    inputs: int, biased: bool, tiles: Tiles, dtype: torch.dtype, draw: Draw
) -> None:
    total, x, weight = (draw(*shape, dtype=dtype) for shape in ((7, 40), (7, inputs), (40, inputs)))
    bias, wanted = draw(40, dtype=dtype) if biased else None, total.clone()
    made = kernels.add_product(total, x, weight, bias, tiles)
    assert made is total
    assert_close(total, wanted + functional.linear(x, weight, bias))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_normed(dtype: torch.dtype, draw: Draw) -> None:
    """Also in place, of a part of each row, and added to a total."""
    x, norm = 3 * draw(5, 260, dtype=dtype), Norm(draw(200, dtype=dtype), 1e-6, 1.0)
    part, total = x[:, 30:230], draw(5, 200, dtype=dtype)
    wanted = plain_norm(part, norm)
    assert_close(kernels.norm_rows(part.contiguous(), norm), wanted)
    assert_close(kernels.add_norm(total.clone(), part, norm, 0.3), total + 0.3 * wanted)
    before = x.clone()
    kernels.norm_rows(part, norm, part)
    assert_close(part, wanted)
    assert torch.equal(x[:, :30], before[:, :30])
    assert torch.equal(x[:, 230:], before[:, 230:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", kernels.ACTIVATIONS)
def test_gates_have_the_activation_of_a_config(name: str, dtype: torch.dtype, draw: Draw) -> None:
    from penstock.model.ops import activation

    product = 40 * draw(3, 2 * 1100, dtype=dtype)
    gate, up = product.chunk(2, 1)
    assert_close(kernels.gate_values(product, name), activation(name)(gate) * up)


@pytest.mark.parametrize(
    ("product", "rows", "inputs", "outputs", "ours"),
    [
        ("heads", 32, 896, 1152, True),  # Qwen2.5-0.5B
        ("out", 32, 896, 896, True),
        ("gate", 8, 896, 2 * 4864, False),
        ("down", 16, 4864, 896, True),
        ("down", 17, 4864, 896, False),
        ("gate", 16, 576, 2 * 1536, True),  # SmolLM2-135M
        ("gate", 17, 576, 2 * 1536, False),
        ("down", 16, 1536, 576, True),
        ("down", 17, 1536, 576, False),
        ("out", 33, 576, 576, False),
        ("heads", 8, 2048, 1024, False),  # a norm needs whole rows
        ("down", 8, 8192, 896, False),
    ],
)
def test_small_products_of_few_rows_are_ours(
    product: Product, rows: int, inputs: int, outputs: int, ours: bool
) -> None:
    x, weight = torch.empty(rows, inputs), torch.empty(outputs, inputs)
    assert choose(product, x, weight) is None
    half = torch.bfloat16
    assert (choose(product, x.to(half), weight.to(half)) is not None) == ours
