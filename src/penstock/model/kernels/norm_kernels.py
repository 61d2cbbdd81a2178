# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""The backward pass of an RMS norm as one Triton kernel and a small sum, and a norm of a sum.

torch reads the inputs twice, once for the gradient of the input and once, slowly, for that of the weight.
The forward pass of a norm is torch's own, and so the engine's (`norms.py`). A norm of the residual sum
(`add_rms_norm`) rounds where the two plain operations round.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

_PROGRAMS = 528  # four for each processor of a large GPU
_ELEMENTS = 4096  # of the rows that a program holds at once
_BACK_ELEMENTS = 2048  # of them in the backward pass, which holds the next rows too
LARGEST = 8192  # width of a row


@triton.jit
def _add_norm(
    X, Added, Weight, Sum, Out, Inverse, eps, rows,
    WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row, at = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH_PAD)
    inside = at < WIDTH
    mask = (row < rows)[:, None] & inside[None, :]
    place = row[:, None].to(tl.int64) * WIDTH + at[None, :]
    kind = Sum.dtype.element_ty
    total = tl.load(X + place, mask=mask, other=0.0).to(tl.float32)
    total += tl.load(Added + place, mask=mask, other=0.0).to(tl.float32)
    total = total.to(kind)
    tl.store(Sum + place, total, mask=mask)
    total = total.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(total * total, 1) / WIDTH + eps)
    tl.store(Inverse + row, inverse, mask=row < rows)
    weight = tl.load(Weight + at, mask=inside, other=0.0).to(tl.float32)[None, :]
    tl.store(Out + place, (total * inverse[:, None] * weight).to(kind), mask=mask)


@triton.jit
def _back(
    Grad, X, Weight, Inverse, Added, XGrad, Partial, rows, WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr, ROWS: tl.constexpr, PROGRAMS: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    at = tl.arange(0, WIDTH_PAD)
    inside = at < WIDTH
    weight = tl.load(Weight + at, mask=inside, other=0.0).to(tl.float32)[None, :]
    total = tl.zeros((ROWS, WIDTH_PAD), tl.float32)  # of the weight's gradient
    row = program * ROWS + tl.arange(0, ROWS)
    mask = (row < rows)[:, None] & inside[None, :]
    place = row[:, None].to(tl.int64) * WIDTH + at[None, :]
    grad, x = tl.load(Grad + place, mask=mask, other=0.0), tl.load(X + place, mask=mask, other=0.0)
    inverse = tl.load(Inverse + row, mask=row < rows, other=0.0)
    for _ in range(program * ROWS, rows, PROGRAMS * ROWS):
        # The next rows are on their way while these are summed up.
        next_row = row + PROGRAMS * ROWS
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


def add_rms_norm(
    x: torch.Tensor, added: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x + added, its norm, and 1 / root mean square of each row; all inputs are contiguous."""
    rows, width, pad, at_once = _shape(x, weight)
    total, output = torch.empty_like(x), torch.empty_like(x)
    inverse = torch.empty(rows, dtype=torch.float32, device=x.device)
    kernel: Any = _add_norm
    kernel[(triton.cdiv(rows, at_once),)](
        x, added, weight, total, output, inverse, eps, rows, WIDTH=width, WIDTH_PAD=pad,
        ROWS=at_once, num_warps=4 if pad <= _ELEMENTS else 8,
    )  # fmt: skip
    return total, output, inverse


def norm_gradients(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    inverse: torch.Tensor,
    added: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of x, plus `added`, and of the weight, in float32; all are contiguous."""
    rows, width, pad, _ = _shape(x, weight)
    at_once = max(1, _BACK_ELEMENTS // pad)
    x_grad = torch.empty_like(x)
    programs = min(_PROGRAMS, triton.cdiv(rows, at_once))
    partial = torch.empty(programs, width, dtype=torch.float32, device=x.device)
    kernel: Any = _back
    kernel[(programs,)](
        grad, x, weight, inverse, grad if added is None else added, x_grad, partial, rows,
        WIDTH=width, WIDTH_PAD=pad, ROWS=at_once, PROGRAMS=programs, ADDS=added is not None,
        num_warps=4 if pad <= _ELEMENTS else 8,
    )  # fmt: skip
    return x_grad, partial.sum(0)


def _shape(x: torch.Tensor, weight: torch.Tensor) -> tuple[int, int, int, int]:
    """(rows, width, width of a block, rows that a program holds at once)."""
    pad = triton.next_power_of_2(len(weight))
    return x.numel() // len(weight), len(weight), pad, max(1, _ELEMENTS // pad)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        output, inverse = torch.ops.aten._fused_rms_norm(x, weight.shape, weight, eps)
        ctx.save_for_backward(x, weight, inverse)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight, inverse = ctx.saved_tensors
        x_grad, weight_grad = norm_gradients(grads[0].contiguous(), x, weight, inverse.contiguous())
        return x_grad, weight_grad.to(weight.dtype), None


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """torch's `rms_norm` of the last dimension; its backward pass is one kernel where it can be."""
    fits = weight.ndim == 1 and len(weight) <= LARGEST and x.is_contiguous()
    if not fits or x.dtype != weight.dtype or not x.numel():
        return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)
    output: torch.Tensor = _RmsNorm.apply(x, weight, eps)
    return output
