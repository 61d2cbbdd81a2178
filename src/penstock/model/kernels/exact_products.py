# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Products on a GPU in which a row has the same bits in any batch: `model.arithmetic = "exact"`.

A library picks its kernel by the number of rows, and with it the order of additions. Here each output is one sum over
the inputs in their order, by the same instructions for few rows and many. Engine and trainer use them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.errors import UserError
from penstock.model.decoder_weights import Linear
from penstock.model.joint_weights import LinearStack, can_join, join_weights
from penstock.model.kernels.row_tiles import cdiv

_FILLED = 264  # tiles that keep a large GPU busy: two for each processor
_SHARED_BYTES = 160_000  # of a processor's memory, which the largest tile needs
_GROUP = 8  # tiles of rows that read the same weights one after another
Part = tuple[Tensor, Tensor | None]  # weight and bias


@triton.jit(do_not_specialize=["rows"])
def _multiply(
    X, Weight, Bias, Out, rows, x_row, out_row, K: tl.constexpr, WIDTH: tl.constexpr,
    BIASED: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    number, across = tl.program_id(0), tl.cdiv(WIDTH, COLUMNS)
    down = tl.cdiv(rows, ROWS)
    first = number // (GROUP * across) * GROUP
    height = tl.minimum(down - first, GROUP)
    place = number % (GROUP * across)
    row = ((first + place % height) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = place // height * COLUMNS + tl.arange(0, COLUMNS)
    here, inside, at = row < rows, column < WIDTH, tl.arange(0, BLOCK)
    source = Weight + column[None, :].to(tl.int64) * K
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for k in range(0, K, BLOCK):
        if EVEN:
            x_mask, weight_mask = here[:, None], inside[None, :]
        else:
            x_mask = here[:, None] & (k + at < K)[None, :]
            weight_mask = (k + at < K)[:, None] & inside[None, :]
        x = tl.load(X + row[:, None] * x_row + k + at[None, :], mask=x_mask, other=0.0)
        weight = tl.load(source + k + at[:, None], mask=weight_mask, other=0.0)
        total = tl.dot(x, weight, total, input_precision="ieee")
    if BIASED:
        total += tl.load(Bias + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    tl.store(
        Out + row[:, None] * out_row + column[None, :], total.to(Out.dtype.element_ty),
        mask=here[:, None] & inside[None, :],
    )  # fmt: skip


def multiply(x_RK: Tensor, parts: Sequence[Part]) -> Tensor:
    """x @ weight^T + bias of each part, side by side."""
    x_RK = x_RK if x_RK.stride(-1) == 1 else x_RK.contiguous()
    rows, inputs = x_RK.shape
    output_RN = x_RK.new_empty(rows, sum(len(weight) for weight, _ in parts))
    first, kernel = 0, _multiply
    for weight, bias in parts:
        width = len(weight)
        assert weight.is_contiguous()
        tile, block, how = _tiles(x_RK, width)
        launch: Any = kernel[(cdiv(rows, tile[0]) * cdiv(width, tile[1]),)]
        launch(
            x_RK, weight, weight if bias is None else bias, output_RN[:, first:], rows,
            x_RK.stride(0), output_RN.stride(0), K=inputs, WIDTH=width, BIASED=bias is not None,
            EVEN=inputs % block == 0, ROWS=tile[0], COLUMNS=tile[1], BLOCK=block, GROUP=_GROUP,
            **how,
        )  # fmt: skip
        first += width
    return output_RN


def _tiles(x_RK: Tensor, width: int) -> tuple[tuple[int, int], int, dict[str, int]]:
    """Rows and columns of a tile, inputs that it adds at once, and how it is launched.

    Any of the tiles of half precision gives the same bits: the largest of which there are enough is the fastest.
    """
    rows = len(x_RK)
    if x_RK.dtype.itemsize > 2:  # no tensor cores
        return (16, 32), 32, {"num_warps": 4, "num_stages": 2}
    if (
        cdiv(rows, 128) * cdiv(width, 256) >= 2 * _FILLED
        and _shared_bytes(x_RK.device) >= _SHARED_BYTES
    ):
        return (128, 256), 64, {"num_warps": 8, "num_stages": 3}
    if rows >= 512 and cdiv(rows, 128) * cdiv(width, 128) >= _FILLED:
        return (128, 128), 64, {"num_warps": 8, "num_stages": 3}
    if cdiv(rows, 64) * cdiv(width, 128) >= _FILLED:
        return (64, 128), 64, {"num_warps": 4, "num_stages": 3}
    if cdiv(rows, 64) * cdiv(width, 64) >= 100:
        return (64, 64), 64, {"num_warps": 4, "num_stages": 4}
    return (64, 32), 64, {"num_warps": 4, "num_stages": 4}


@functools.cache
def _shared_bytes(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor


class ExactLinear:
    """The product of linear layers of one input; a trainer's weights may change in place."""

    def __init__(self, modules: Sequence[Any]) -> None:
        self._modules = modules

    def __call__(self, x: Tensor) -> Tensor:
        parts = [(m.weight.detach(), None if m.bias is None else m.bias.detach()) for m in self._modules]  # fmt: skip
        return multiply(x, parts)


class _Joined:
    """Joint weights, as a layer."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias


class ExactStack(LinearStack):
    """Stacked weights, whose products have tiles of one size."""

    exact = True

    def __getitem__(self, index: Any) -> Any:
        bias = None if self.bias_EO is None else self.bias_EO[index]
        return ExactLinear([_Joined(self.weight_EOI[index], bias)])


class ExactProducts:
    """See `Products`. `joins`: siblings share one weight from now on, as an engine wants; else they stay in place."""

    def __init__(self, *, joins: bool) -> None:
        self._joins = joins

    def joint(self, modules: list[Any]) -> Linear:
        if not can_join(modules):
            raise UserError(
                f"model.arithmetic: got exact with layers of class {type(modules[0]).__name__}, allowed: "
                "deterministic or fast"
            )
        return ExactLinear([_Joined(*join_weights(modules))] if self._joins else modules)

    def stacked(self, weight_EOI: Tensor, bias_EO: Tensor | None) -> Sequence[Linear]:
        return ExactStack(weight_EOI, bias_EO)
