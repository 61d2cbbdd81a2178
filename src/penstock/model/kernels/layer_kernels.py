# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Triton kernels between the matrix products of a layer: rotary embedding and gated activation.

Each replaces several launches of plain operations, forward and backward, and keeps no intermediate
result. `fuse_layers` installs them in a model's layers after comparing each with the layer's own output; a
layer whose output would change by more than rounding keeps its own code. Only instances of this model
change, never a class or module of transformers. Imported only if Triton is installed and the model is on a
GPU; engine and trainer use the same kernels, so that their log-probs agree.
"""

from __future__ import annotations

import functools
import types
from typing import Any

import torch
import triton
import triton.language as tl
from torch import nn

from penstock.model.joint_projections import join_projections, separate_projections
from penstock.model.kernels.norm_kernels import rms_norm
from penstock.model.layer_form import is_silu
from penstock.model.norms import epsilon, is_fused

_TOLERANCE = {
    torch.float64: 1e-9,
    torch.float32: 1e-5,
    torch.bfloat16: 2e-2,
    torch.float16: 4e-3,
}
_ROTARY = "apply_rotary_pos_emb"
_COLUMNS = 1024  # of a gated activation, per program

KINDS = ("gated mlp", "rotary")  # of the engine; a trainer has more


# ---- rotary embedding


@triton.jit
def _rotate(
    X, Out, Cos, Sin, x_row, x_head, out_row, HEADS: tl.constexpr, HEADS_PAD: tl.constexpr,
    HALF: tl.constexpr, HALF_PAD: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head, at = tl.arange(0, HEADS_PAD), tl.arange(0, HALF_PAD)
    inside = (head < HEADS)[:, None] & (at < HALF)[None, :]
    source = X + row * x_row + head[:, None] * x_head + at[None, :]
    low = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    turn = row * 2 * HALF + at
    cos_low = tl.load(Cos + turn, mask=at < HALF, other=0.0).to(tl.float32)[None, :]
    cos_high = tl.load(Cos + turn + HALF, mask=at < HALF, other=0.0).to(tl.float32)[None, :]
    sin_low = tl.load(Sin + turn, mask=at < HALF, other=0.0).to(tl.float32)[None, :]
    sin_high = tl.load(Sin + turn + HALF, mask=at < HALF, other=0.0).to(tl.float32)[None, :]
    target = Out + row * out_row + head[:, None] * 2 * HALF + at[None, :]
    kind = Out.dtype.element_ty
    if BACK:  # the transposed matrix
        new_low, new_high = low * cos_low + high * sin_high, high * cos_high - low * sin_low
    else:
        new_low, new_high = low * cos_low - high * sin_low, high * cos_high + low * sin_high
    tl.store(target, new_low.to(kind), mask=inside)
    tl.store(target + HALF, new_high.to(kind), mask=inside)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, back: bool) -> torch.Tensor:
    """x [1, heads, rows, size], rotated by cos and sin [1, rows, size]; laid out by rows."""
    _, heads, rows, size = x.shape
    output = x.new_empty(1, rows, heads, size)
    steps = (x.stride(2), x.stride(1), output.stride(1))
    _launch_rotation(x, output, (rows, heads, size), steps, cos, sin, back=back)
    return output.transpose(1, 2)


def rotate_(
    rows_RC: torch.Tensor, heads: int, size: int, cos: torch.Tensor, sin: torch.Tensor
) -> None:
    """Rotate the first heads of each row in place, by contiguous cos and sin [1, rows, size]."""
    step = rows_RC.stride(0)
    _launch_rotation(rows_RC, rows_RC, (len(rows_RC), heads, size), (step, size, step), cos, sin)


def _launch_rotation(
    x: torch.Tensor,
    output: torch.Tensor,
    shape: tuple[int, int, int],
    steps: tuple[int, int, int],
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    back: bool = False,
) -> None:
    """Rotate (rows, heads, size); steps lead to the next row and head of x, and to the next row of output."""
    rows, heads, size = shape
    rotate: Any = _rotate
    rotate[(rows,)](
        x, output, cos, sin, *steps, HEADS=heads, HEADS_PAD=triton.next_power_of_2(heads),
        HALF=size // 2, HALF_PAD=triton.next_power_of_2(size // 2), BACK=back,
        num_warps=2 if heads > 4 else 1,
    )  # fmt: skip


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin, back=False)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (grad,) = grads
        grad = grad if grad.stride(3) == 1 else grad.contiguous()
        return _rotated(grad, *ctx.saved_tensors, back=True), None, None


def apply_rotary(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute transformers' `apply_rotary_pos_emb` for a batch of one; cos and sin are constants."""
    assert q.stride(3) == k.stride(3) == 1
    cos, sin = cos.contiguous(), sin.contiguous()
    return _Rotary.apply(q, cos, sin), _Rotary.apply(k, cos, sin)


# ---- gated activation


@triton.jit
def _gate(Gate, Up, Out, gate_row, up_row, WIDTH, BLOCK: tl.constexpr):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(Gate + row * gate_row + at, mask=at < WIDTH, other=0.0).to(tl.float32)
    up = tl.load(Up + row * up_row + at, mask=at < WIDTH, other=0.0).to(tl.float32)
    active = (gate / (1.0 + tl.exp(-gate))).to(Out.dtype.element_ty).to(tl.float32)
    tl.store(Out + row * WIDTH + at, (active * up).to(Out.dtype.element_ty), mask=at < WIDTH)


@triton.jit
def _gate_back(
    Grad, Gate, Up, GateGrad, UpGrad, Active, gate_row, up_row, out_row, WIDTH, BLOCK: tl.constexpr
):  # fmt: skip
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    grad = tl.load(Grad + row * WIDTH + at, mask=at < WIDTH, other=0.0).to(tl.float32)
    gate = tl.load(Gate + row * gate_row + at, mask=at < WIDTH, other=0.0).to(tl.float32)
    up = tl.load(Up + row * up_row + at, mask=at < WIDTH, other=0.0).to(tl.float32)
    open_share = 1.0 / (1.0 + tl.exp(-gate))
    slope = open_share * (1.0 + gate * (1.0 - open_share))
    kind = UpGrad.dtype.element_ty
    tl.store(GateGrad + row * out_row + at, (grad * up * slope).to(kind), mask=at < WIDTH)
    tl.store(UpGrad + row * out_row + at, (grad * gate * open_share).to(kind), mask=at < WIDTH)
    if Active is not None:
        active = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32)
        tl.store(Active + row * WIDTH + at, (active * up).to(kind), mask=at < WIDTH)


class _SiluGate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        width = gate.shape[-1]
        gate_RF, up_RF = gate.reshape(-1, width), up.reshape(-1, width)
        assert gate_RF.stride(1) == up_RF.stride(1) == 1
        ctx.save_for_backward(gate_RF, up_RF)
        return gate_values(gate_RF, up_RF).view(gate.shape)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate_RF, up_RF = ctx.saved_tensors
        grad = grads[0].contiguous()
        gate_grad, up_grad = torch.empty_like(grad), torch.empty_like(grad)
        gate_gradients(grad, gate_RF, up_RF, gate_grad, up_grad, grad.shape[-1])
        return gate_grad, up_grad


def gate_values(gate_RF: torch.Tensor, up_RF: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of matrices whose rows may lie apart."""
    rows, width = gate_RF.shape
    output = torch.empty(rows, width, dtype=gate_RF.dtype, device=gate_RF.device)
    kernel: Any = _gate
    kernel[(rows, triton.cdiv(width, _COLUMNS))](
        gate_RF, up_RF, output, gate_RF.stride(0), up_RF.stride(0), width, BLOCK=_COLUMNS,
        num_warps=4,
    )  # fmt: skip
    return output


def gate_gradients(
    grad: torch.Tensor,
    gate_RF: torch.Tensor,
    up_RF: torch.Tensor,
    gate_grad: torch.Tensor,
    up_grad: torch.Tensor,
    out_row: int,
    active: torch.Tensor | None = None,
) -> None:
    """Write the gradients of silu(gate) * up; `out_row` is the distance of the rows written.

    Write silu(gate) * up to `active`, with the bits of `gate_values`; `active` may be `grad` itself.
    """
    width = gate_RF.shape[1]
    kernel: Any = _gate_back
    kernel[(len(gate_RF), triton.cdiv(width, _COLUMNS))](
        grad, gate_RF, up_RF, gate_grad, up_grad, active, gate_RF.stride(0), up_RF.stride(0),
        out_row, width, BLOCK=_COLUMNS, num_warps=4,
    )  # fmt: skip


def silu_gate(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, rounded where the two plain operations round."""
    output: torch.Tensor = _SiluGate.apply(gate, up)
    return output


# ---- installing them


def fuse_layers(model: nn.Module, kinds: tuple[str, ...] = KINDS) -> dict[str, int]:
    """Install these kinds of kernels in the model's layers; return the number of layers of each."""
    fuse = {
        "gated mlp": _fuse_mlp,
        "rotary": _fuse_rotary,
        "joint qkv": join_projections,
        "norm": _fuse_norm,
    }
    counts = dict.fromkeys(kinds, 0)
    with torch.no_grad():
        for module in model.modules():
            for kind in kinds:
                counts[kind] += fuse[kind](module)
    return counts


def restore_layers(model: nn.Module) -> None:
    """Undo `fuse_layers`: every layer runs its own code again."""
    for module in model.modules():
        function = getattr(module.__dict__.get("forward"), "__func__", None)
        if function in (_mlp_forward, _norm_forward) or hasattr(function, "is_fused"):
            del module.forward
        separate_projections(module)


def _mlp_forward(module: Any, x: torch.Tensor) -> torch.Tensor:
    output: torch.Tensor = module.down_proj(silu_gate(module.gate_proj(x), module.up_proj(x)))
    return output


def _fuse_mlp(module: Any) -> bool:
    names = ("gate_proj", "up_proj", "down_proj")
    parts: list[Any] = [getattr(module, name, None) for name in names]
    if not all(isinstance(part, nn.Module) for part in parts) or not hasattr(module, "act_fn"):
        return False
    weight = getattr(parts[0], "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.ndim != 2 or not is_silu(module.act_fn):
        return False
    fused = types.MethodType(_mlp_forward, module)  # a bound method follows a copy of the model
    probe = torch.linspace(-1, 1, 3 * weight.shape[1], device=weight.device, dtype=weight.dtype)
    probe = probe.view(1, 3, -1)
    same = is_close(fused(probe), module(probe))
    if same:
        module.forward = fused
    return same


def _norm_forward(module: Any, x: torch.Tensor) -> torch.Tensor:
    eps = epsilon(module)
    assert eps is not None
    return rms_norm(x, module.weight, eps)


def _fuse_norm(module: nn.Module) -> bool:
    """Give a norm that `fuse_norms` found the kernel's backward pass."""
    if not is_fused(module):
        return False
    module.forward = types.MethodType(_norm_forward, module)
    return True


def _fuse_rotary(module: nn.Module) -> bool:
    forward: Any = type(module).forward
    if not isinstance(forward, types.FunctionType) or _ROTARY not in forward.__code__.co_names:
        return False
    model_rotary = forward.__globals__.get(_ROTARY)
    size = getattr(module, "head_dim", None)
    weight = next(module.parameters(), None)
    if model_rotary is None or not isinstance(size, int) or size % 2 or weight is None:
        return False
    if not _rotary_matches(model_rotary, size, weight):
        return False
    module.forward = types.MethodType(_with_kernel(forward), module)
    return True


@functools.cache
def _with_kernel(forward: Any) -> Any:
    """An attention layer's forward function that calls the kernel where its shapes fit."""
    model_rotary = forward.__globals__[_ROTARY]

    def rotary(
        q: torch.Tensor,
        k: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        *other: Any,
        **keywords: Any,
    ) -> Any:
        whole = cos.shape == sin.shape == (1, q.shape[2], q.shape[3])  # else a part of each head
        if other or keywords or q.shape[0] != 1 or q.shape[3] != k.shape[3] or not whole:
            return model_rotary(q, k, cos, sin, *other, **keywords)
        return apply_rotary(q, k, cos, sin)

    rebound: Any = types.FunctionType(
        forward.__code__,
        {**forward.__globals__, _ROTARY: rotary},
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    rebound.__kwdefaults__ = forward.__kwdefaults__
    rebound.is_fused = True
    return rebound


def _rotary_matches(model_rotary: Any, size: int, weight: torch.Tensor) -> bool:
    def draw(*shape: int) -> torch.Tensor:
        values = torch.linspace(-2, 2, int(torch.tensor(shape).prod()), device=weight.device)
        return values.sin().view(shape).to(weight.dtype)

    arguments = (draw(1, 4, 3, size), draw(1, 2, 3, size), draw(1, 3, size), draw(1, 3, size))
    try:
        expected = model_rotary(*arguments)
    except (TypeError, ValueError, RuntimeError):
        return False  # another signature: this model has a rotary embedding of its own
    return all(is_close(a, b) for a, b in zip(apply_rotary(*arguments), expected, strict=True))


def is_close(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two outputs differ by rounding only."""
    tolerance = _TOLERANCE.get(expected.dtype, 0.0)
    scale = float(expected.abs().max())
    return actual.shape == expected.shape and torch.allclose(
        actual, expected, rtol=tolerance, atol=tolerance * scale
    )
