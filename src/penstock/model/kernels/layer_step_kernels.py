# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""The steps of a decoder layer between its matrix products as kernels; `layer_steps.py` has them in plain torch.

Imported only if Triton is installed and the model is on a GPU, or by tests with Triton's interpreter.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.model.attention import flash_attention
from penstock.model.kernels import layer_kernels
from penstock.model.kernels.layer_steps import Heads
from penstock.model.kernels.norm_kernels import add_rms_norm, norm_gradients
from penstock.model.packed_attention import PackLayout, SharedKeys

add_norm = add_rms_norm
norm_back = norm_gradients


def norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The RMS norm of each row, and 1 / root mean square."""
    output_TD, inverse_T1 = torch.ops.aten._fused_rms_norm(x_TD, weight_D.shape, weight_D, eps)
    return output_TD, inverse_T1


def rotate_(joint_TC: Tensor, cos: Tensor, sin: Tensor, heads: Heads) -> None:
    """Rotate queries and keys in place; cos and sin are [1, rows, size]."""
    layer_kernels.rotate_(joint_TC, heads.queries + heads.keys, heads.size, cos, sin)


def gate(both_TF: Tensor) -> Tensor:
    """silu(gate) * up of rows that have the gate first."""
    width = both_TF.shape[1] // 2
    return layer_kernels.gate_values(both_TF[:, :width], both_TF[:, width:])


def gate_back(grad_TF: Tensor, both_TF: Tensor) -> tuple[Tensor, Tensor]:
    """(gradient of the input of `gate`, its output). The output is computed again and overwrites `grad_TF`."""
    grads_TF = torch.empty_like(both_TF)
    width = grad_TF.shape[1]
    layer_kernels.gate_gradients(
        grad_TF, both_TF[:, :width], both_TF[:, width:], grads_TF, grads_TF[:, width:], 2 * width,
        active=grad_TF,
    )  # fmt: skip
    return grads_TF, grad_TF


# ---- attention


def attend(joint_TC: Tensor, layout: PackLayout, heads: Heads) -> tuple[Tensor, ...]:
    """The attention output [rows, queries x size], and what backward needs."""
    query_THD, key_KHD, value_KHD = heads.split(joint_TC)
    if layout.shared is not None:  # keys and values lie side by side
        split = heads.queries * heads.size
        gathered_KC = joint_TC[:, split:].index_select(0, layout.shared.index_K)
        both_KHD = gathered_KC.view(len(gathered_KC), 2 * heads.keys, heads.size)
        key_KHD, value_KHD = both_KHD[:, : heads.keys], both_KHD[:, heads.keys :]
    keys: PackLayout | SharedKeys = layout.shared or layout
    output_THD, *rest = flash_attention(
        query_THD,
        key_KHD,
        value_KHD,
        (layout.bounds_S1, layout.longest),
        (keys.bounds_S1, keys.longest),
        scale=heads.scale,
    )
    output_TC = output_THD.view(len(joint_TC), heads.queries * heads.size)
    return output_TC, *rest, key_KHD, value_KHD


def attend_back(
    grad_TC: Tensor,
    joint_TC: Tensor,
    attended: tuple[Tensor, ...],
    layout: PackLayout,
    heads: Heads,
    cos: Tensor,
    sin: Tensor,
) -> Tensor:
    """The gradient of the joint product before its rotation."""
    output_TC, logsumexp, state, unused, key_KHD, value_KHD = attended
    shape = (len(joint_TC), heads.queries, heads.size)
    keys: PackLayout | SharedKeys = layout.shared or layout
    query, key, value = torch.ops.aten._flash_attention_backward(
        grad_TC.view(shape), heads.split(joint_TC)[0], key_KHD, value_KHD, output_TC.view(shape),
        logsumexp, layout.bounds_S1, keys.bounds_S1, layout.longest, keys.longest, 0.0, True,
        state, unused, scale=heads.scale, window_size_left=-1, window_size_right=0,
    )  # fmt: skip
    return joint_gradient(query, key, value, layout, heads, cos, sin)


@triton.jit
def _turned_back(low, high, cos_low, cos_high, sin_low, sin_high):
    return low * cos_low + high * sin_high, high * cos_high - low * sin_low


@triton.jit
def _join(
    Query, Key, Value, Out, Cos, Sin, Order, Bounds, HEADS: tl.constexpr, HEADS_PAD: tl.constexpr,
    KEYS: tl.constexpr, KEYS_PAD: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr,
    SHARED: tl.constexpr,
):  # fmt: skip
    # One token: rotates its queries' gradients back, adds up those of the copies of its key and value.
    row = tl.program_id(0).to(tl.int64)
    size: tl.constexpr = 2 * HALF
    kind = Out.dtype.element_ty
    at = tl.arange(0, HALF_PAD)
    narrow = at < HALF
    turn = row * size + at
    cos_low = tl.load(Cos + turn, mask=narrow, other=0.0).to(tl.float32)[None, :]
    cos_high = tl.load(Cos + turn + HALF, mask=narrow, other=0.0).to(tl.float32)[None, :]
    sin_low = tl.load(Sin + turn, mask=narrow, other=0.0).to(tl.float32)[None, :]
    sin_high = tl.load(Sin + turn + HALF, mask=narrow, other=0.0).to(tl.float32)[None, :]

    head = tl.arange(0, HEADS_PAD)
    inside = (head < HEADS)[:, None] & narrow[None, :]
    place = head[:, None] * size + at[None, :]
    low = tl.load(Query + row * HEADS * size + place, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(Query + row * HEADS * size + place + HALF, mask=inside, other=0.0).to(tl.float32)
    low, high = _turned_back(low, high, cos_low, cos_high, sin_low, sin_high)
    target = Out + row * (HEADS + 2 * KEYS) * size
    tl.store(target + place, low.to(kind), mask=inside)
    tl.store(target + place + HALF, high.to(kind), mask=inside)

    head = tl.arange(0, KEYS_PAD)
    inside = (head < KEYS)[:, None] & narrow[None, :]
    place = head[:, None] * size + at[None, :]
    low = tl.zeros((KEYS_PAD, HALF_PAD), tl.float32)
    high = tl.zeros((KEYS_PAD, HALF_PAD), tl.float32)
    value_low = tl.zeros((KEYS_PAD, HALF_PAD), tl.float32)
    value_high = tl.zeros((KEYS_PAD, HALF_PAD), tl.float32)
    first, last = row.to(tl.int32), row.to(tl.int32) + 1
    if SHARED:
        first, last = tl.load(Bounds + row), tl.load(Bounds + row + 1)
    for number in range(first, last):
        copy = row
        if SHARED:
            copy = tl.load(Order + number)
        source = copy * KEYS * size + place
        low += tl.load(Key + source, mask=inside, other=0.0).to(tl.float32)
        high += tl.load(Key + source + HALF, mask=inside, other=0.0).to(tl.float32)
        value_low += tl.load(Value + source, mask=inside, other=0.0).to(tl.float32)
        value_high += tl.load(Value + source + HALF, mask=inside, other=0.0).to(tl.float32)
    low, high = _turned_back(low, high, cos_low, cos_high, sin_low, sin_high)
    target += HEADS * size
    tl.store(target + place, low.to(kind), mask=inside)
    tl.store(target + place + HALF, high.to(kind), mask=inside)
    target += KEYS * size
    tl.store(target + place, value_low.to(kind), mask=inside)
    tl.store(target + place + HALF, value_high.to(kind), mask=inside)


def joint_gradient(
    query_THD: Tensor,
    key_KHD: Tensor,
    value_KHD: Tensor,
    layout: PackLayout,
    heads: Heads,
    cos: Tensor,
    sin: Tensor,
) -> Tensor:
    """The gradient of the joint product before its rotation, from those of the attention's inputs."""
    rows = len(query_THD)
    columns = heads.rotated + heads.keys * heads.size
    output_TC = torch.empty(rows, columns, dtype=query_THD.dtype, device=query_THD.device)
    order, bounds = query_THD, query_THD  # not read
    if layout.shared is not None:
        assert layout.shared.copies is not None
        order, bounds = layout.shared.copies.order_K, layout.shared.copies.bounds_T1
    kernel: Any = _join
    kernel[(rows,)](
        query_THD.contiguous(), key_KHD.contiguous(), value_KHD.contiguous(), output_TC, cos, sin,
        order, bounds, HEADS=heads.queries, HEADS_PAD=triton.next_power_of_2(heads.queries),
        KEYS=heads.keys, KEYS_PAD=triton.next_power_of_2(heads.keys), HALF=heads.size // 2,
        HALF_PAD=triton.next_power_of_2(heads.size // 2), SHARED=layout.shared is not None,
        num_warps=2,
    )  # fmt: skip
    return output_TC


# ---- gradients of weights


def add_product(total: Tensor | None, left_TO: Tensor, right_TI: Tensor) -> Tensor:
    """Total + left^T right in float32; the total changes in place."""
    left_OT = left_TO.t()
    if total is None:
        return torch.mm(left_OT, right_TI, out_dtype=torch.float32)
    if adds_in_float32(left_TO.device, left_TO.dtype):
        return torch.addmm(total, left_OT, right_TI, out_dtype=torch.float32, out=total)
    return total.add_(torch.mm(left_OT, right_TI, out_dtype=torch.float32))


@functools.cache
def adds_in_float32(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this torch adds a half-precision product to a float32 matrix in place; tried once."""
    left, total = torch.eye(16, device=device, dtype=dtype), torch.ones(16, 16, device=device)
    try:
        torch.addmm(total, left, 2 * left, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError):
        return False
    return bool((total == 1 + 2 * left.float()).all())
