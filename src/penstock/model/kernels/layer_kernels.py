# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Triton kernels of a layer that trains: RMS norms, gated activations, and rows taken by their numbers.

Of a norm, torch reads the inputs of the backward pass twice, once for the gradient of the input and once, slowly, for
that of the weight. A norm rounds once, as the engine's does; sums have a fixed order.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.model.kernels.row_tiles import cdiv, next_power_of_2

_PROGRAMS = 528  # four for each processor of a large GPU
_ELEMENTS = 4096  # of the rows that a program holds at once
_BACK_ELEMENTS = 2048  # of them in the backward pass, which holds the next rows too
LARGEST = 8192  # width of a row


@triton.jit(do_not_specialize=["rows"])
def _norm(
    X, Weight, Residual, Out, Inverse, eps, scale, rows, WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr, ROWS: tl.constexpr, ONE: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    row, at = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH_PAD)
    inside = at < WIDTH
    mask = (row < rows)[:, None] & inside[None, :]
    place = row[:, None].to(tl.int64) * WIDTH + at[None, :]
    kind = Out.dtype.element_ty
    x = tl.load(X + place, mask=mask, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, 1) / WIDTH + eps)
    tl.store(Inverse + row, inverse, mask=row < rows)
    weight = tl.load(Weight + at, mask=inside, other=0.0).to(tl.float32)[None, :] + ONE
    normed = (x * inverse[:, None] * weight).to(kind)
    if ADDS:
        added = (normed.to(tl.float32) * scale).to(kind).to(tl.float32)
        normed = (tl.load(Residual + place, mask=mask, other=0.0).to(tl.float32) + added).to(kind)
    tl.store(Out + place, normed, mask=mask)


@triton.jit(do_not_specialize=["rows", "programs"])
def _back(
    Grad, X, Weight, Inverse, Added, XGrad, Partial, rows, programs, WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr, ROWS: tl.constexpr, ADDS: tl.constexpr, ONE: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    at = tl.arange(0, WIDTH_PAD)
    inside = at < WIDTH
    weight = tl.load(Weight + at, mask=inside, other=0.0).to(tl.float32)[None, :] + ONE
    total = tl.zeros((ROWS, WIDTH_PAD), tl.float32)  # of the weight's gradient
    row = program * ROWS + tl.arange(0, ROWS)
    mask = (row < rows)[:, None] & inside[None, :]
    place = row[:, None].to(tl.int64) * WIDTH + at[None, :]
    grad, x = tl.load(Grad + place, mask=mask, other=0.0), tl.load(X + place, mask=mask, other=0.0)
    inverse = tl.load(Inverse + row, mask=row < rows, other=0.0)
    for _ in range(program * ROWS, rows, programs * ROWS):
        # The next rows are on their way while these are summed up.
        next_row = row + programs * ROWS
        next_mask = (next_row < rows)[:, None] & inside[None, :]
        next_place = next_row[:, None].to(tl.int64) * WIDTH + at[None, :]
        next_grad = tl.load(Grad + next_place, mask=next_mask, other=0.0)
        next_x = tl.load(X + next_place, mask=next_mask, other=0.0)
        next_inverse = tl.load(Inverse + next_row, mask=next_row < rows, other=0.0)
        added = grad
        if ADDS:
            added = tl.load(Added + place, mask=mask, other=0.0)
        scale = inverse.to(tl.float32)[:, None]
        normed = x.to(tl.float32) * scale
        total += grad.to(tl.float32) * normed
        weighted = grad.to(tl.float32) * weight
        mean = tl.sum(weighted * normed, 1) / WIDTH
        x_grad = (weighted - normed * mean[:, None]) * scale
        if ADDS:
            x_grad += added.to(tl.float32)
        tl.store(XGrad + place, x_grad.to(XGrad.dtype.element_ty), mask=mask)
        row, mask, place = next_row, next_mask, next_place
        grad, x, inverse = next_grad, next_x, next_inverse
    tl.store(Partial + program * WIDTH + at, tl.sum(total, 0), mask=inside)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    adds_one: bool = False,
    residual: torch.Tensor | None = None,
    scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of each row, and 1 / root mean square; or residual + scale x norm. All inputs are contiguous."""
    if residual is None and not adds_one:  # rounded once too, and launched in less time
        return torch.ops.aten._fused_rms_norm(x, weight.shape, weight, eps)
    rows, width, pad, at_once = _shape(x, weight)
    output = torch.empty_like(x)
    inverse = torch.empty(rows, dtype=torch.float32, device=x.device)
    kernel: Any = _norm
    kernel[(cdiv(rows, at_once),)](
        x, weight, x if residual is None else residual, output, inverse, eps, scale, rows,
        WIDTH=width, WIDTH_PAD=pad, ROWS=at_once, ONE=int(adds_one),
        ADDS=residual is not None, num_warps=4 if pad <= _ELEMENTS else 8,
    )  # fmt: skip
    return output, inverse


def norm_gradients(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    inverse: torch.Tensor,
    added: torch.Tensor | None = None,
    *,
    adds_one: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of x, plus `added`, and of the weight, in float32; all are contiguous."""
    rows, width, pad, _ = _shape(x, weight)
    at_once = max(1, _BACK_ELEMENTS // pad)
    x_grad = torch.empty_like(x)
    programs = max(1, min(_PROGRAMS, cdiv(rows, at_once)))
    partial = torch.empty(programs, width, dtype=torch.float32, device=x.device)
    kernel: Any = _back
    kernel[(programs,)](
        grad, x, weight, inverse, grad if added is None else added, x_grad, partial, rows, programs,
        WIDTH=width, WIDTH_PAD=pad, ROWS=at_once, ADDS=added is not None,
        ONE=int(adds_one), num_warps=4 if pad <= _ELEMENTS else 8,
    )  # fmt: skip
    return x_grad, partial.sum(0)


def _shape(x: torch.Tensor, weight: torch.Tensor) -> tuple[int, int, int, int]:
    """(rows, width, width of a block, rows that a program holds at once)."""
    pad = next_power_of_2(len(weight))
    return x.numel() // len(weight), len(weight), pad, max(1, _ELEMENTS // pad)


# ---- gated activations; no intermediate result is kept


ACTIVATIONS = {"silu": 0, "gelu_pytorch_tanh": 1}  # that the kernels compute
_COLUMNS = 1024  # per program, of a gate or of rows


@triton.jit
def _active(gate, ACTIVATION: tl.constexpr):
    # The activation and its slope.
    if ACTIVATION == 0:
        share = 1.0 / (1.0 + tl.exp(-gate))
        active, slope = gate / (1.0 + tl.exp(-gate)), share * (1.0 + gate * (1.0 - share))
    else:  # gelu by a tanh
        inner = 0.7978845608028654 * gate * (1.0 + 0.044715 * gate * gate)
        tanh = 1.0 - 2.0 / (1.0 + tl.exp(2.0 * inner))
        active = 0.5 * gate * (1.0 + tanh)
        slope = 0.7978845608028654 * (1.0 + 0.134145 * gate * gate)
        slope = 0.5 * (1.0 + tanh) + 0.5 * gate * (1.0 - tanh * tanh) * slope
    return active, slope


@triton.jit
def _gate(
    Gate, Up, Out, gate_row, up_row, WIDTH, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr
):  # fmt: skip
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(Gate + row * gate_row + at, mask=at < WIDTH, other=0.0).to(tl.float32)
    up = tl.load(Up + row * up_row + at, mask=at < WIDTH, other=0.0).to(tl.float32)
    active, _ = _active(gate, ACTIVATION)
    active = active.to(Out.dtype.element_ty).to(tl.float32)
    tl.store(Out + row * WIDTH + at, (active * up).to(Out.dtype.element_ty), mask=at < WIDTH)


@triton.jit
def _gate_back(
    Grad, Gate, Up, GateGrad, UpGrad, Active, gate_row, up_row, out_row, WIDTH,
    BLOCK: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    grad = tl.load(Grad + row * WIDTH + at, mask=at < WIDTH, other=0.0).to(tl.float32)
    gate = tl.load(Gate + row * gate_row + at, mask=at < WIDTH, other=0.0).to(tl.float32)
    up = tl.load(Up + row * up_row + at, mask=at < WIDTH, other=0.0).to(tl.float32)
    active, slope = _active(gate, ACTIVATION)
    kind = UpGrad.dtype.element_ty
    tl.store(GateGrad + row * out_row + at, (grad * up * slope).to(kind), mask=at < WIDTH)
    tl.store(UpGrad + row * out_row + at, (grad * active).to(kind), mask=at < WIDTH)
    if Active is not None:
        active = active.to(kind).to(tl.float32)
        tl.store(Active + row * WIDTH + at, (active * up).to(kind), mask=at < WIDTH)


def gate_values(
    gate_RF: torch.Tensor, up_RF: torch.Tensor, activation: str = "silu"
) -> torch.Tensor:
    """activation(gate) * up of matrices whose rows may lie apart, rounded where the plain operations round."""
    rows, width = gate_RF.shape
    output = torch.empty(rows, width, dtype=gate_RF.dtype, device=gate_RF.device)
    kernel: Any = _gate
    kernel[(rows, cdiv(width, _COLUMNS))](
        gate_RF, up_RF, output, gate_RF.stride(0), up_RF.stride(0), width, BLOCK=_COLUMNS,
        ACTIVATION=ACTIVATIONS[activation], num_warps=4,
    )  # fmt: skip
    return output


def gate_gradients(
    grad_RF: torch.Tensor, both_RF: torch.Tensor, activation: str, *, again: bool
) -> torch.Tensor:
    """The gradient of gate and up, side by side; `again`: overwrite `grad_RF` with `gate_values`, bit for bit."""
    rows, width = grad_RF.shape
    output = torch.empty_like(both_RF)
    kernel: Any = _gate_back
    kernel[(rows, cdiv(width, _COLUMNS))](
        grad_RF, both_RF, both_RF[:, width:], output, output[:, width:],
        grad_RF if again else None, both_RF.stride(0), both_RF.stride(0), output.stride(0), width,
        BLOCK=_COLUMNS, ACTIVATION=ACTIVATIONS[activation], num_warps=4,
    )  # fmt: skip
    return output


# ---- rows taken by their numbers, and gradients added up in a fixed order: embeddings and predictors


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
