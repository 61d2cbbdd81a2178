# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""RMS norms as Triton kernels: forward, also with a residual behind it, and backward with a small sum.

torch reads the inputs of the backward pass twice, once for the gradient of the input and once, slowly, for that of
the weight. A norm rounds once, as the engine's does; sums have a fixed order.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

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
