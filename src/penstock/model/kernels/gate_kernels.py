# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Gated activations as Triton kernels, forward and backward; no intermediate result is kept."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from penstock.model.kernels.row_tiles import cdiv

ACTIVATIONS = {"silu": 0, "gelu_pytorch_tanh": 1}  # that the kernels compute
_COLUMNS = 1024  # per program


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
