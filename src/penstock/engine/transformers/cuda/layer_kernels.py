# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Small Triton kernels between the matrix products of a layer: rotary, gated activation, KV store.

Each replaces several launches of plain operations; at small batches, launches dominate a decode step.
`fuse_layers` installs them in a model's layers after comparing each with the layer's own output; a layer
whose output would change by more than rounding keeps its own code. Only instances of this model change,
never a class or module of transformers: a trainer in the same process keeps the plain code.
"""

from __future__ import annotations

import types
from typing import Any

import torch
import triton
import triton.language as tl
from torch import nn

_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
_ROTARY = "apply_rotary_pos_emb"


@triton.jit
def _rotate(
    X, Out, Cos, Sin, x_row, x_head, HEADS: tl.constexpr, HEADS_PAD: tl.constexpr,
    HALF: tl.constexpr, HALF_PAD: tl.constexpr,
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
    target = Out + (row * HEADS + head[:, None]) * 2 * HALF + at[None, :]
    kind = Out.dtype.element_ty
    tl.store(target, (low * cos_low - high * sin_low).to(kind), mask=inside)
    tl.store(target + HALF, (high * cos_high + low * sin_high).to(kind), mask=inside)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return x [1, heads, rows, size], rotated by cos and sin [1, rows, size]."""
    _, heads, rows, size = x.shape
    output = x.new_empty(1, rows, heads, size)
    rotate: Any = _rotate
    rotate[(rows,)](
        x, output, cos, sin, x.stride(2), x.stride(1), HEADS=heads,
        HEADS_PAD=triton.next_power_of_2(heads), HALF=size // 2,
        HALF_PAD=triton.next_power_of_2(size // 2), num_warps=2 if heads > 4 else 1,
    )  # fmt: skip
    return output.transpose(1, 2)


def apply_rotary(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute transformers' `apply_rotary_pos_emb` for a batch of one."""
    assert unsqueeze_dim == 1
    assert q.shape[0] == 1
    assert q.stride(3) == k.stride(3) == 1
    return _rotated(q, cos, sin), _rotated(k, cos, sin)


@triton.jit
def _gate(Gate, Up, Out, gate_row, up_row, WIDTH, BLOCK: tl.constexpr):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(Gate + row * gate_row + at, mask=at < WIDTH, other=0.0).to(tl.float32)
    up = tl.load(Up + row * up_row + at, mask=at < WIDTH, other=0.0).to(tl.float32)
    active = (gate / (1.0 + tl.exp(-gate))).to(Out.dtype.element_ty).to(tl.float32)
    tl.store(Out + row * WIDTH + at, (active * up).to(Out.dtype.element_ty), mask=at < WIDTH)


def silu_gate(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up, rounded where the two plain operations round."""
    width = gate.shape[-1]
    rows = gate.numel() // width
    assert gate.stride(-1) == up.stride(-1) == 1
    output = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    kernel: Any = _gate
    kernel[(rows, triton.cdiv(width, 1024))](
        gate, up, output, gate.stride(-2), up.stride(-2), width, BLOCK=1024, num_warps=4
    )
    return output


@triton.jit
def _store(
    Key, Value, Keys, Values, Target, key_row, key_head, value_row, value_head,
    HEADS: tl.constexpr, KEY: tl.constexpr, KEY_PAD: tl.constexpr,
    VALUE: tl.constexpr, VALUE_PAD: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    target = (tl.load(Target + row).to(tl.int64)) * HEADS + head
    at = tl.arange(0, KEY_PAD)
    key = tl.load(Key + row * key_row + head * key_head + at, mask=at < KEY, other=0.0)
    tl.store(Keys + target * KEY + at, key, mask=at < KEY)
    at = tl.arange(0, VALUE_PAD)
    value = tl.load(Value + row * value_row + head * value_head + at, mask=at < VALUE, other=0.0)
    tl.store(Values + target * VALUE + at, value, mask=at < VALUE)


def store_rows(
    key: torch.Tensor,
    value: torch.Tensor,
    keys_TGD: torch.Tensor,
    values_TGD: torch.Tensor,
    target_R: torch.Tensor,
) -> None:
    """Store row i of the new keys and values, [1, kv heads, rows, size], at token `target_R[i]`."""
    _, heads, rows, key_size = key.shape
    value_size = value.shape[3]
    assert key.stride(3) == value.stride(3) == 1
    kernel: Any = _store
    kernel[(rows, heads)](
        key, value, keys_TGD, values_TGD, target_R,
        key.stride(2), key.stride(1), value.stride(2), value.stride(1), HEADS=heads,
        KEY=key_size, KEY_PAD=triton.next_power_of_2(key_size),
        VALUE=value_size, VALUE_PAD=triton.next_power_of_2(value_size), num_warps=1,
    )  # fmt: skip


# ---- installing them


def fuse_layers(model: nn.Module) -> dict[str, int]:
    """Install the kernels in the model's layers; return the number of layers of each kind."""
    counts = {"gated mlp": 0, "rotary": 0}
    for module in model.modules():
        counts["gated mlp"] += _fuse_mlp(module)
        counts["rotary"] += _fuse_rotary(module)
    return counts


def _fuse_mlp(module: Any) -> bool:
    names = ("gate_proj", "up_proj", "down_proj")
    parts: list[Any] = [getattr(module, name, None) for name in names]
    if not all(type(part) is nn.Linear for part in parts) or not hasattr(module, "act_fn"):
        return False
    gate_proj, up_proj, down_proj = parts

    def forward(x: torch.Tensor) -> torch.Tensor:
        return down_proj(silu_gate(gate_proj(x), up_proj(x)))

    weight = gate_proj.weight
    probe = torch.linspace(-1, 1, 3 * weight.shape[1], device=weight.device, dtype=weight.dtype)
    probe = probe.view(1, 3, -1)
    same = _close(forward(probe), module(probe))
    if same:
        module.forward = forward
    return same


def _fuse_rotary(module: nn.Module) -> bool:
    forward: Any = type(module).forward
    if not isinstance(forward, types.FunctionType) or _ROTARY not in forward.__code__.co_names:
        return False
    own = forward.__globals__.get(_ROTARY)
    size = getattr(module, "head_dim", None)
    weight = next(module.parameters(), None)
    if own is None or not isinstance(size, int) or size % 2 or weight is None:
        return False
    if not _rotary_matches(own, size, weight):
        return False
    rebound = types.FunctionType(
        forward.__code__,
        {**forward.__globals__, _ROTARY: apply_rotary},
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    rebound.__kwdefaults__ = forward.__kwdefaults__
    module.forward = types.MethodType(rebound, module)
    return True


def _rotary_matches(own: Any, size: int, weight: torch.Tensor) -> bool:
    def draw(*shape: int) -> torch.Tensor:
        values = torch.linspace(-2, 2, int(torch.tensor(shape).prod()), device=weight.device)
        return values.sin().view(shape).to(weight.dtype)

    arguments = (draw(1, 4, 3, size), draw(1, 2, 3, size), draw(1, 3, size), draw(1, 3, size))
    try:
        wanted = own(*arguments)
    except (TypeError, ValueError, RuntimeError):
        return False  # another signature: this model has a rotary embedding of its own
    return all(_close(a, b) for a, b in zip(apply_rotary(*arguments), wanted, strict=True))


def _close(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    tolerance = _TOLERANCE.get(wanted.dtype, 0.0)
    scale = float(wanted.abs().max())
    return got.shape == wanted.shape and torch.allclose(
        got, wanted, rtol=tolerance, atol=tolerance * scale
    )
