# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Triton kernels of experts: routing, sorting, the products of all experts in one launch, and their sum.

Rows that each belong to one group (the adapter of a request) are one choice of one expert.

The host learns nothing of the choice of experts, so that CUDA graphs capture all of it. An entry is one choice of one
token. Entries are sorted by expert; a program of a product finds the expert of its rows by itself, and as many are
launched as the least even choice needs. Every sum has a fixed order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from penstock.model.joint_weights import LinearStack
from penstock.model.kernels.row_kernels import activate, halves, overlapped, wait_for_last
from penstock.model.kernels.row_tiles import cdiv, next_power_of_2

_COLUMNS = 1024  # of the sum, per program
_EXACT_MEAN = 128  # rows of an expert that tiles are chosen for where bits are those of any batch
_SORTED = 1024  # entries that a program compares at once


class Tiles(NamedTuple):
    """A program computes `rows` x `columns` outputs and reads `block` inputs at once."""

    rows: int
    columns: int
    block: int
    warps: int
    stages: int


def choose_tiles(entries: int, experts: int, dtype: torch.dtype, *, exact: bool = False) -> Tiles:
    """How to cut the products, by the mean number of rows of an expert; exact: always the same way."""
    mean = _EXACT_MEAN if exact else entries // experts
    if dtype.itemsize > 2:  # no tensor cores
        return Tiles(16, 32, 32, 4, 2)
    if mean <= 16:
        return Tiles(16, 64, 128, 4, 4)
    if mean <= 64:
        return Tiles(32, 64, 128, 4, 3)
    return Tiles(128, 64, 64, 8, 3) if mean > 256 else Tiles(64, 64, 64, 4, 3)


class Routes(NamedTuple):
    """The choices of tokens, [rows x choices], and the entries in the order of their experts."""

    weight_N: torch.Tensor  # float32; of rows in groups there are none
    order_N: torch.Tensor  # int32: entries
    start_E1: torch.Tensor  # int32: where the entries of each expert begin in this order
    choices: int  # experts per token

    @property
    def experts(self) -> int:
        return len(self.start_E1) - 1


@triton.jit
def _best_experts(
    Logits, Expert, Weight, EXPERTS: tl.constexpr, PAD: tl.constexpr, COUNT: tl.constexpr,
    COUNT_PAD: tl.constexpr, RENORMALISES: tl.constexpr, ROUNDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_last(PDL)
    row, at, choice = tl.program_id(0).to(tl.int64), tl.arange(0, PAD), tl.arange(0, COUNT_PAD)
    logit = tl.load(Logits + row * EXPERTS + at, mask=at < EXPERTS, other=-float("inf"))
    logit = logit.to(tl.float32)
    peak = tl.max(logit, 0)
    total = tl.sum(tl.exp(logit - peak), 0)
    weight, expert = tl.zeros((COUNT_PAD,), tl.float32), tl.zeros((COUNT_PAD,), tl.int32)
    for place in tl.static_range(COUNT):
        best = tl.argmax(logit, 0).to(tl.int32)
        weight = tl.where(choice == place, tl.exp(tl.max(logit, 0) - peak), weight)
        expert = tl.where(choice == place, best, expert)
        logit = tl.where(at == best, -float("inf"), logit)
    if RENORMALISES:
        total = tl.sum(weight, 0)
    weight = weight / total
    if ROUNDS:
        weight = weight.to(Logits.dtype.element_ty).to(tl.float32)
    tl.store(Weight + row * COUNT + choice, weight, mask=choice < COUNT)
    tl.store(Expert + row * COUNT + choice, expert, mask=choice < COUNT)


@triton.jit(do_not_specialize=["entries"])
def _sort_entries(Expert, Order, Start, entries, BLOCK: tl.constexpr, PDL: tl.constexpr):
    # One program per expert: it counts the entries of the experts before it, then places its own.
    wait_for_last(PDL)
    expert = tl.program_id(0)
    before = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, entries, BLOCK):
        at = first + tl.arange(0, BLOCK)
        before += (tl.load(Expert + at, mask=at < entries, other=1 << 30) < expert).to(tl.int32)
    place = tl.sum(before, 0)
    tl.store(Start + expert, place)
    for first in range(0, entries, BLOCK):
        at = first + tl.arange(0, BLOCK)
        mine = (tl.load(Expert + at, mask=at < entries, other=-1) == expert).to(tl.int32)
        tl.store(Order + place + tl.cumsum(mine, 0) - 1, at, mask=mine > 0)
        place += tl.sum(mine, 0)
    if expert == tl.num_programs(0) - 1:
        tl.store(Start + expert + 1, place)


def best_experts(
    logit_RE: torch.Tensor, count: int, *, renormalises: bool, rounds: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights, float32, and the numbers, int32, of the best experts of each row by a softmax of its logits.

    `rounds`: weights have the logits' format.
    """
    rows, experts = logit_RE.shape
    assert logit_RE.is_contiguous()
    weight_RC = logit_RE.new_empty(rows, count, dtype=torch.float32)
    expert_RC = torch.empty_like(weight_RC, dtype=torch.int32)
    kernel: Any = _best_experts
    kernel[(rows,)](
        logit_RE, expert_RC, weight_RC, EXPERTS=experts, PAD=next_power_of_2(experts),
        COUNT=count, COUNT_PAD=next_power_of_2(count), RENORMALISES=renormalises,
        ROUNDS=rounds, num_warps=1, **overlapped(logit_RE.device),
    )  # fmt: skip
    return weight_RC, expert_RC


def sort_entries(weight_RC: torch.Tensor, expert_RC: torch.Tensor, experts: int) -> Routes:
    """The entries of rows that take these of `experts`."""
    order_N = expert_RC.new_empty(expert_RC.numel(), dtype=torch.int32)
    start_E1 = expert_RC.new_empty(experts + 1, dtype=torch.int32)
    kernel: Any = _sort_entries
    kernel[(experts,)](
        expert_RC, order_N, start_E1, len(order_N), BLOCK=_SORTED, num_warps=4,
        **overlapped(expert_RC.device),
    )  # fmt: skip
    return Routes(weight_RC.flatten(), order_N, start_E1, expert_RC.shape[1])


@triton.jit
def _rows_of_tile(Start, tile, EXPERTS: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr):
    # Return the expert of a tile, its first place in the order and the end of the expert's; no rows: no such tile.
    expert = tl.arange(0, PAD)
    begin = tl.load(Start + expert, mask=expert < EXPERTS, other=0)
    end = tl.load(Start + expert + 1, mask=expert < EXPERTS, other=0)
    tiles = (end - begin + ROWS - 1) // ROWS
    last = tl.cumsum(tiles, 0)
    here = (tile < last) & (tile >= last - tiles)
    first = tl.sum(tl.where(here, begin + (tile - last + tiles) * ROWS, 0), 0)
    return (
        tl.sum(tl.where(here, expert, 0), 0).to(tl.int64), first, tl.sum(tl.where(here, end, 0), 0),
    )  # fmt: skip


@triton.jit
def _expert_gates(
    X, Weight, Bias, Order, Start, Out, weight_expert, weight_out, weight_in, alpha, limit,
    COUNT: tl.constexpr, EXPERTS: tl.constexpr, PAD: tl.constexpr, K: tl.constexpr,
    WIDTH: tl.constexpr, BIASED: tl.constexpr, CLAMPED: tl.constexpr, ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_last(PDL)
    expert, first, end = _rows_of_tile(Start, tl.program_id(0), EXPERTS, PAD, ROWS)
    if first >= end:
        return
    place, at = first + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    here = place < end
    token = (tl.load(Order + place, mask=here, other=0) // COUNT).to(tl.int64)
    # The gates and ups of some columns, in one product; they alternate where they are clamped.
    left, both = tl.program_id(1) * COLUMNS, tl.arange(0, 2 * COLUMNS)
    if CLAMPED:
        column = 2 * left + both
        inside = column < 2 * WIDTH
    else:
        column = left + both % COLUMNS
        inside = column < WIDTH
        column += both // COLUMNS * WIDTH
    source = Weight + expert * weight_expert + column[None, :] * weight_out
    product = tl.zeros((ROWS, 2 * COLUMNS), tl.float32)
    for k in range(0, K, BLOCK):
        x = tl.load(
            X + token[:, None] * K + k + at[None, :],
            mask=here[:, None] & (k + at < K)[None, :], other=0.0,
        )  # fmt: skip
        weight = tl.load(
            source + (k + at)[:, None] * weight_in,
            mask=(k + at < K)[:, None] & inside[None, :], other=0.0,
        )  # fmt: skip
        product = tl.dot(x, weight, product, input_precision="ieee")
    if BIASED:
        bias = tl.load(Bias + expert * 2 * WIDTH + column, mask=inside, other=0.0)
        product += bias.to(tl.float32)[None, :]
    kind = Out.dtype.element_ty
    product = product.to(kind).to(tl.float32)
    if CLAMPED:
        gate, up = tl.split(tl.reshape(product, (ROWS, COLUMNS, 2)))
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit) + 1.0
        active = gate / (1.0 + tl.exp(-gate * alpha))
    else:
        gate, up = halves(product, ROWS, 2 * COLUMNS)
        active = activate(gate, ACTIVATION).to(kind).to(tl.float32)
    column = left + tl.arange(0, COLUMNS)
    tl.store(
        Out + place.to(tl.int64)[:, None] * WIDTH + column[None, :], (active * up).to(kind),
        mask=here[:, None] & (column < WIDTH)[None, :],
    )  # fmt: skip


@triton.jit
def _expert_outputs(
    X, Weight, Bias, Order, Start, Share, Out, weight_expert, weight_out, weight_in,
    EXPERTS: tl.constexpr, PAD: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr,
    BIASED: tl.constexpr, GATHERS: tl.constexpr, ADDS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # Reads rows in the order of experts and writes entries; GATHERS: the other way round.
    # ADDS: onto what is there, without a share.
    wait_for_last(PDL)
    expert, first, end = _rows_of_tile(Start, tl.program_id(0), EXPERTS, PAD, ROWS)
    if first >= end:
        return
    place, at = first + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    here = place < end
    entry = tl.load(Order + place, mask=here, other=0).to(tl.int64)
    read, written = place.to(tl.int64), entry
    if GATHERS:
        read, written = entry, place.to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < WIDTH
    source = Weight + expert * weight_expert + column[None, :] * weight_out
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for k in range(0, K, BLOCK):
        x = tl.load(
            X + read[:, None] * K + k + at[None, :],
            mask=here[:, None] & (k + at < K)[None, :], other=0.0,
        )  # fmt: skip
        weight = tl.load(
            source + (k + at)[:, None] * weight_in,
            mask=(k + at < K)[:, None] & inside[None, :], other=0.0,
        )  # fmt: skip
        total = tl.dot(x, weight, total, input_precision="ieee")
    if BIASED:
        bias = tl.load(Bias + expert * WIDTH + column, mask=inside, other=0.0)
        total += bias.to(tl.float32)[None, :]
    kind = Out.dtype.element_ty
    target, shown = (
        Out + written[:, None] * WIDTH + column[None, :],
        here[:, None] & inside[None, :],
    )
    total = total.to(kind).to(tl.float32)
    if ADDS:
        total += tl.load(target, mask=shown, other=0.0).to(tl.float32)
    elif not GATHERS:
        total *= tl.load(Share + entry, mask=here, other=0.0)[:, None]
    tl.store(target, total.to(kind), mask=shown)


@triton.jit
def _add_entries(
    Entries, Total, WIDTH, COUNT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    wait_for_last(PDL)
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mixed = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(COUNT):
        source = Entries + (row * COUNT + choice) * WIDTH + at
        mixed += tl.load(source, mask=at < WIDTH, other=0.0).to(tl.float32)
    kind = Total.dtype.element_ty
    total = tl.load(Total + row * WIDTH + at, mask=at < WIDTH, other=0.0).to(tl.float32)
    total += mixed.to(kind).to(tl.float32)
    tl.store(Total + row * WIDTH + at, total.to(kind), mask=at < WIDTH)


def expert_gates(
    x_RD: torch.Tensor,
    routes: Routes,
    stack: LinearStack,
    activation: str,
    clamp: tuple[float, float] | None,
) -> torch.Tensor:
    """activation(gate) * up of each entry, in the order of experts.

    With a clamp (alpha, limit) it is the clamped swiglu of gpt-oss, whose gate and up alternate.
    """
    weight, inputs = stack.weight_EOI, x_RD.shape[1]
    width = weight.shape[1] // 2
    assert x_RD.is_contiguous()
    output_NF = x_RD.new_empty(len(routes.order_N), width)
    alpha, limit = clamp or (0.0, 0.0)
    grid, how = _launch(routes, x_RD, width, stack)
    kernel: Any = _expert_gates
    kernel[grid](
        x_RD, weight, weight if stack.bias_EO is None else stack.bias_EO, routes.order_N,
        routes.start_E1, output_NF, *weight.stride(), alpha, limit, COUNT=routes.choices, K=inputs,
        WIDTH=width, BIASED=stack.bias_EO is not None,
        CLAMPED=clamp is not None, ACTIVATION=activation, **how,
    )  # fmt: skip
    return output_NF


def add_expert_outputs(
    total_RD: torch.Tensor, gated_NF: torch.Tensor, routes: Routes, stack: LinearStack
) -> torch.Tensor:
    """Add the weighted outputs of each row's experts to the total in place; return the total."""
    rows, width = total_RD.shape
    assert total_RD.is_contiguous()
    entries_ND = total_RD.new_empty(len(gated_NF), width)
    _multiply(gated_NF, routes, stack, entries_ND)
    add: Any = _add_entries
    add[(rows, cdiv(width, _COLUMNS))](
        entries_ND, total_RD, width, COUNT=routes.choices, BLOCK=_COLUMNS, num_warps=4,
        **overlapped(total_RD.device),
    )  # fmt: skip
    return total_RD


def group_products(x_RD: torch.Tensor, routes: Routes, weight_GOI: torch.Tensor) -> torch.Tensor:
    """The product of each row with its group's matrix, in the order of groups; nothing behind the last one's."""
    output_RO = x_RD.new_empty(len(x_RD), weight_GOI.shape[1])
    _multiply(x_RD, routes, LinearStack(weight_GOI, None), output_RO, gathers=True)
    return output_RO


def add_group_products(
    total_RO: torch.Tensor, x_RD: torch.Tensor, routes: Routes, weight_GOI: torch.Tensor
) -> torch.Tensor:
    """Add the products of rows in the order of groups to the total in place; return the total."""
    _multiply(x_RD, routes, LinearStack(weight_GOI, None), total_RO, adds=True)
    return total_RO


def _multiply(
    x: torch.Tensor,
    routes: Routes,
    stack: LinearStack,
    output: torch.Tensor,
    *,
    gathers: bool = False,
    adds: bool = False,
) -> None:
    weight, width = stack.weight_EOI, output.shape[1]
    assert x.is_contiguous()
    assert output.is_contiguous()
    grid, how = _launch(routes, x, width, stack)
    kernel: Any = _expert_outputs
    kernel[grid](
        x, weight, weight if stack.bias_EO is None else stack.bias_EO, routes.order_N,
        routes.start_E1, routes.weight_N, output, *weight.stride(), K=x.shape[1], WIDTH=width,
        BIASED=stack.bias_EO is not None, GATHERS=gathers, ADDS=adds, **how,
    )  # fmt: skip


def _launch(
    routes: Routes, x: torch.Tensor, width: int, stack: LinearStack
) -> tuple[tuple[int, int], dict[str, Any]]:
    """The grid of a product for the least even choice, and what both products take."""
    entries, experts = len(routes.order_N), routes.experts
    tiles = choose_tiles(entries, experts, x.dtype, exact=stack.exact)
    most = min(entries, entries // tiles.rows + experts)
    how = {
        "EXPERTS": experts, "PAD": next_power_of_2(experts), "ROWS": tiles.rows,
        "COLUMNS": tiles.columns, "BLOCK": tiles.block, "num_warps": tiles.warps,
        "num_stages": tiles.stages, **overlapped(x.device),
    }  # fmt: skip
    return (most, cdiv(width, tiles.columns)), how
