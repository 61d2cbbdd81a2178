# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Small Triton kernels between the matrix products of a layer: rotary, gated activation, KV store.

Each replaces several launches of plain operations; at small batches launches are what a decode step
costs. `fuse_layers.py` puts them into a model's layers after checking them against the layer's own code.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl


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
    """[1, heads, rows, size] turned by [1, rows, size]; the result has the same shape."""
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
    """What transformers' `apply_rotary_pos_emb` computes for one row of tokens."""
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
    """silu(gate) * up, rounded where the two plain operations round."""
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
    """Row i of the new keys and values, [1, kv heads, rows, size], goes to token `target_R[i]`."""
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
