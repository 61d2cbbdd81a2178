# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Rows that are taken by their numbers, and gradients added up in a fixed order: embeddings and predictors."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.model.kernels.row_tiles import cdiv, next_power_of_2

_COLUMNS = 1024
_AT_ONCE = 8  # rows that a program loads together


@triton.jit(do_not_specialize=["skipped"])
def _add_runs(
    Rows, Order, Numbers, Ends, Total, skipped, WIDTH, BLOCK: tl.constexpr, AT_ONCE: tl.constexpr
):  # fmt: skip
    # The program at the first of equal numbers adds up their rows.
    first = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    number, end = tl.load(Numbers + first), tl.load(Ends + first).to(tl.int32)
    before = tl.load(Numbers + first - 1, mask=first > 0, other=-1)
    adds = (number != before) & (number != skipped)
    end = tl.where(adds, end, first)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(first, end, AT_ONCE):
        place = start + tl.arange(0, AT_ONCE)
        row = tl.load(Order + place, mask=place < end, other=0)
        mask = (place < end)[:, None] & (at < WIDTH)[None, :]
        values = tl.load(Rows + row[:, None] * WIDTH + at[None, :], mask=mask, other=0.0)
        total += tl.sum(values.to(tl.float32), 0)
    target = Total + number * WIDTH + at
    mask = (at < WIDTH) & adds
    total += tl.load(target, mask=mask, other=0.0).to(tl.float32)
    tl.store(target, total.to(Total.dtype.element_ty), mask=mask)


def add_rows_(total_VD: Tensor, number_T: Tensor, rows_TD: Tensor, skipped: int = -1) -> Tensor:
    """total[number] += row for each row, those of equal numbers in their order; `skipped` gets nothing."""
    sorted_T, order_T = number_T.sort(stable=True)
    ends_T = torch.searchsorted(sorted_T, sorted_T, right=True)
    count, width = rows_TD.shape
    block = min(_COLUMNS, next_power_of_2(width))
    kernel: Any = _add_runs
    kernel[(count, cdiv(width, block))](
        rows_TD, order_T, sorted_T, ends_T, total_VD, skipped, width, BLOCK=block, AT_ONCE=_AT_ONCE,
        num_warps=4,
    )  # fmt: skip
    return total_VD


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_TD: Tensor, number_N: Tensor) -> Tensor:
        ctx.save_for_backward(number_N)
        ctx.count = len(rows_TD)
        return rows_TD.index_select(0, number_N)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (number_N,) = ctx.saved_tensors
        grad_ND = grads[0].contiguous()
        total_TD = grad_ND.new_zeros(ctx.count, grad_ND.shape[1])
        return add_rows_(total_TD, number_N, grad_ND), None


def take_rows(rows_TD: Tensor, number_N: Tensor) -> Tensor:
    """rows[number]; numbers may repeat."""
    taken: Tensor = _TakeRows.apply(rows_TD, number_N)
    return taken
