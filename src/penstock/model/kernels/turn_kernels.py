# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Norms and rotation of queries and keys as Triton kernels, forward and backward, on the joint product.

A row of the joint product holds the queries, keys and values of a token. One program computes a token forward; in the
backward pass it also adds up the gradients of the copies of a token's key and value, where sequences share a
context. Sums have a fixed order.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.model.families import Family
from penstock.model.kernels.row_tiles import next_power_of_2
from penstock.model.ops import Table
from penstock.model.packed_attention import Copies

_PROGRAMS = 528  # four for each processor of a large GPU; each sums up the gradients of norms


@triton.jit
def _load(Base, place, inside):
    return tl.load(Base + place, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _inverse(
    low, high, rest, eps, HEADS: tl.constexpr, SIZE: tl.constexpr, WHOLE: tl.constexpr
):  # fmt: skip
    # 1 / root mean square of each head, or of all heads, as a column.
    squares = tl.sum(low * low, 1) + tl.sum(high * high, 1) + tl.sum(rest * rest, 1)
    if WHOLE:
        squares = tl.zeros_like(squares) + tl.sum(squares, 0) / HEADS
    return tl.rsqrt(squares / SIZE + eps)[:, None]


@triton.jit
def _weight(
    Weight, head, at, HEADS: tl.constexpr, SIZE: tl.constexpr, END: tl.constexpr,
    ONE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    # Of a norm, from `at` to before END of each head.
    if WHOLE:
        weight = _load(Weight, head * SIZE + at, (head < HEADS) & (at < END))
    else:
        weight = _load(Weight, at, at < END)
    return weight + ONE


@triton.jit
def _turn_heads(
    X, Out, Weight, Cos, Sin, eps, HEADS: tl.constexpr, HEADS_PAD: tl.constexpr,
    SIZE: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr, REST_PAD: tl.constexpr,
    NORM: tl.constexpr, WHOLE: tl.constexpr, ONE: tl.constexpr, COPIES: tl.constexpr,
):  # fmt: skip
    # A head is the half that turns with the second one, that one, and the rest, which does not turn.
    kind: tl.constexpr = Out.dtype.element_ty
    head, at = tl.arange(0, HEADS_PAD)[:, None], tl.arange(0, HALF_PAD)[None, :]
    last = 2 * HALF + tl.arange(0, REST_PAD)[None, :]
    inside, inside_last = (head < HEADS) & (at < HALF), (head < HEADS) & (last < SIZE)
    place, place_last = head * SIZE + at, head * SIZE + last
    low, high = _load(X, place, inside), _load(X, place + HALF, inside)
    rest = _load(X, place_last, inside_last)
    if NORM:
        inverse = _inverse(low, high, rest, eps, HEADS, SIZE, WHOLE)
        low_weight = _weight(Weight, head, at, HEADS, SIZE, HALF, ONE, WHOLE)
        high_weight = _weight(Weight + HALF, head, at, HEADS, SIZE, HALF, ONE, WHOLE)
        rest_weight = _weight(Weight, head, last, HEADS, SIZE, SIZE, ONE, WHOLE)
        low = (low * inverse * low_weight).to(kind).to(tl.float32)
        high = (high * inverse * high_weight).to(kind).to(tl.float32)
        rest = (rest * inverse * rest_weight).to(kind).to(tl.float32)
    cos_low, sin_low = _load(Cos, at, at < HALF), _load(Sin, at, at < HALF)
    cos_high, sin_high = _load(Cos, at + HALF, at < HALF), _load(Sin, at + HALF, at < HALF)
    new_low, new_high = low * cos_low + high * sin_low, high * cos_high + low * sin_high
    tl.store(Out + place, new_low.to(kind), mask=inside)
    tl.store(Out + place + HALF, new_high.to(kind), mask=inside)
    if NORM or COPIES:
        tl.store(Out + place_last, rest.to(kind), mask=inside_last)


@triton.jit
def _turn(
    X, Out, QueryWeight, KeyWeight, Cos, Sin, eps, x_row, QUERIES: tl.constexpr,
    QUERIES_PAD: tl.constexpr, KEYS: tl.constexpr, KEYS_PAD: tl.constexpr, SIZE: tl.constexpr,
    HALF: tl.constexpr, HALF_PAD: tl.constexpr, REST_PAD: tl.constexpr, SIZE_PAD: tl.constexpr,
    NORM: tl.constexpr, WHOLE: tl.constexpr, ONE: tl.constexpr, COPIES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    X += row * x_row
    Out += row * (QUERIES + 2 * KEYS) * SIZE
    Cos += row * 2 * HALF
    Sin += row * 2 * HALF
    _turn_heads(
        X, Out, QueryWeight, Cos, Sin, eps, QUERIES, QUERIES_PAD, SIZE, HALF, HALF_PAD, REST_PAD,
        NORM, WHOLE, ONE, COPIES,
    )  # fmt: skip
    first = QUERIES * SIZE
    _turn_heads(
        X + first, Out + first, KeyWeight, Cos, Sin, eps, KEYS, KEYS_PAD, SIZE, HALF, HALF_PAD,
        REST_PAD, NORM, WHOLE, ONE, COPIES,
    )  # fmt: skip
    if COPIES:
        head, at = tl.arange(0, KEYS_PAD)[:, None], tl.arange(0, SIZE_PAD)[None, :]
        inside = (head < KEYS) & (at < SIZE)
        place = (QUERIES + KEYS + head) * SIZE + at
        tl.store(Out + place, tl.load(X + place, mask=inside), mask=inside)


@triton.jit
def _turn_heads_back(
    low, high, rest, X, Out, Weight, Cos, Sin, eps, HEADS: tl.constexpr, HEADS_PAD: tl.constexpr,
    SIZE: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr, REST_PAD: tl.constexpr,
    NORM: tl.constexpr, WHOLE: tl.constexpr, ONE: tl.constexpr,
):  # fmt: skip
    # Writes the gradient of one token's heads; returns what the token adds to the gradient of the norm's weight.
    kind: tl.constexpr = Out.dtype.element_ty
    head, at = tl.arange(0, HEADS_PAD)[:, None], tl.arange(0, HALF_PAD)[None, :]
    last = 2 * HALF + tl.arange(0, REST_PAD)[None, :]
    inside, inside_last = (head < HEADS) & (at < HALF), (head < HEADS) & (last < SIZE)
    place, place_last = head * SIZE + at, head * SIZE + last
    cos_low, sin_low = _load(Cos, at, at < HALF), _load(Sin, at, at < HALF)
    cos_high, sin_high = _load(Cos, at + HALF, at < HALF), _load(Sin, at + HALF, at < HALF)
    low, high = low * cos_low + high * sin_high, high * cos_high + low * sin_low
    low_sum, high_sum, rest_sum = low, high, rest
    if NORM:
        x_low, x_high = _load(X, place, inside), _load(X, place + HALF, inside)
        x_rest = _load(X, place_last, inside_last)
        inverse = _inverse(x_low, x_high, x_rest, eps, HEADS, SIZE, WHOLE)
        low_sum, high_sum = low * x_low * inverse, high * x_high * inverse
        rest_sum = rest * x_rest * inverse
        low_weight = _weight(Weight, head, at, HEADS, SIZE, HALF, ONE, WHOLE)
        high_weight = _weight(Weight + HALF, head, at, HEADS, SIZE, HALF, ONE, WHOLE)
        rest_weight = _weight(Weight, head, last, HEADS, SIZE, SIZE, ONE, WHOLE)
        mean = tl.sum(low_sum * low_weight, 1) + tl.sum(high_sum * high_weight, 1)
        mean += tl.sum(rest_sum * rest_weight, 1)
        if WHOLE:
            mean = tl.zeros_like(mean) + tl.sum(mean, 0) / HEADS
        mean = mean[:, None] / SIZE
        low = (low * low_weight - x_low * inverse * mean) * inverse
        high = (high * high_weight - x_high * inverse * mean) * inverse
        rest = (rest * rest_weight - x_rest * inverse * mean) * inverse
    tl.store(Out + place, low.to(kind), mask=inside)
    tl.store(Out + place + HALF, high.to(kind), mask=inside)
    tl.store(Out + place_last, rest.to(kind), mask=inside_last)
    return low_sum, high_sum, rest_sum


@triton.jit
def _store_sums(
    Target, low, high, rest, HEADS: tl.constexpr, HEADS_PAD: tl.constexpr, SIZE: tl.constexpr,
    HALF: tl.constexpr, HALF_PAD: tl.constexpr, REST_PAD: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    head, at = tl.arange(0, HEADS_PAD)[:, None], tl.arange(0, HALF_PAD)
    last = 2 * HALF + tl.arange(0, REST_PAD)
    if WHOLE:
        inside = (head < HEADS) & (at < HALF)[None, :]
        place = head * SIZE + at[None, :]
        tl.store(Target + place, low, mask=inside)
        tl.store(Target + place + HALF, high, mask=inside)
        inside_last = (head < HEADS) & (last < SIZE)[None, :]
        tl.store(Target + head * SIZE + last[None, :], rest, mask=inside_last)
    else:
        tl.store(Target + at, tl.sum(low, 0), mask=at < HALF)
        tl.store(Target + at + HALF, tl.sum(high, 0), mask=at < HALF)
        tl.store(Target + last, tl.sum(rest, 0), mask=last < SIZE)


@triton.jit(do_not_specialize=["rows", "programs"])
def _turn_back(
    Query, Key, Value, X, Out, QueryWeight, KeyWeight, Cos, Sin, Order, Bounds, QuerySums, KeySums,
    eps, rows, programs, query_row, key_row, value_row, x_row, QUERIES: tl.constexpr,
    QUERIES_PAD: tl.constexpr, KEYS: tl.constexpr, KEYS_PAD: tl.constexpr, SIZE: tl.constexpr,
    HALF: tl.constexpr, HALF_PAD: tl.constexpr, REST_PAD: tl.constexpr, SIZE_PAD: tl.constexpr,
    NORM: tl.constexpr, WHOLE: tl.constexpr, ONE: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    at, last = tl.arange(0, HALF_PAD)[None, :], 2 * HALF + tl.arange(0, REST_PAD)[None, :]
    query_head, key_head = tl.arange(0, QUERIES_PAD)[:, None], tl.arange(0, KEYS_PAD)[:, None]
    query_low = tl.zeros((QUERIES_PAD, HALF_PAD), tl.float32)
    query_high, query_rest = query_low, tl.zeros((QUERIES_PAD, REST_PAD), tl.float32)
    key_low = tl.zeros((KEYS_PAD, HALF_PAD), tl.float32)
    key_high, key_rest = key_low, tl.zeros((KEYS_PAD, REST_PAD), tl.float32)
    row = program.to(tl.int64)
    for _ in range(program, rows, programs):
        turn, x, out = row * 2 * HALF, X + row * x_row, Out + row * (QUERIES + 2 * KEYS) * SIZE
        inside, inside_last = (
            (query_head < QUERIES) & (at < HALF),
            (query_head < QUERIES) & (last < SIZE),
        )
        source = Query + row * query_row + query_head * SIZE
        low, high, rest = _turn_heads_back(
            _load(source, at, inside), _load(source, at + HALF, inside), _load(source, last, inside_last),
            x, out, QueryWeight, Cos + turn, Sin + turn, eps, QUERIES, QUERIES_PAD, SIZE, HALF,
            HALF_PAD, REST_PAD, NORM, WHOLE, ONE,
        )  # fmt: skip
        query_low += low
        query_high += high
        query_rest += rest

        inside, inside_last = (key_head < KEYS) & (at < HALF), (key_head < KEYS) & (last < SIZE)
        wide = tl.arange(0, SIZE_PAD)[None, :]
        inside_wide = (key_head < KEYS) & (wide < SIZE)
        low = tl.zeros((KEYS_PAD, HALF_PAD), tl.float32)
        high, rest = low, tl.zeros((KEYS_PAD, REST_PAD), tl.float32)
        value = tl.zeros((KEYS_PAD, SIZE_PAD), tl.float32)
        first, end = row.to(tl.int32), row.to(tl.int32) + 1
        if SHARED:
            first, end = tl.load(Bounds + row), tl.load(Bounds + row + 1)
        for place in range(first, end):
            copy = row
            if SHARED:
                copy = tl.load(Order + place)
            key = Key + copy * key_row + key_head * SIZE
            low += _load(key, at, inside)
            high += _load(key, at + HALF, inside)
            rest += _load(key, last, inside_last)
            value += _load(Value + copy * value_row + key_head * SIZE, wide, inside_wide)
        out += QUERIES * SIZE
        low, high, rest = _turn_heads_back(
            low, high, rest, x + QUERIES * SIZE, out, KeyWeight, Cos + turn, Sin + turn, eps, KEYS,
            KEYS_PAD, SIZE, HALF, HALF_PAD, REST_PAD, NORM, WHOLE, ONE,
        )  # fmt: skip
        key_low += low
        key_high += high
        key_rest += rest
        out += KEYS * SIZE + key_head * SIZE
        tl.store(out + wide, value.to(Out.dtype.element_ty), mask=inside_wide)
        row += programs
    if NORM:
        width: tl.constexpr = (QUERIES if WHOLE else 1) * SIZE
        _store_sums(
            QuerySums + program * width, query_low, query_high, query_rest, QUERIES, QUERIES_PAD,
            SIZE, HALF, HALF_PAD, REST_PAD, WHOLE,
        )  # fmt: skip
        key_width: tl.constexpr = (KEYS if WHOLE else 1) * SIZE
        _store_sums(
            KeySums + program * key_width, key_low, key_high, key_rest, KEYS, KEYS_PAD, SIZE, HALF,
            HALF_PAD, REST_PAD, WHOLE,
        )  # fmt: skip


def split(family: Family, joint_TC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Views of queries, keys and values, each [rows, heads, size]."""
    joint_THD = joint_TC.unflatten(1, (-1, family.head_size))
    query, key, value = joint_THD.split((family.heads, family.kv_heads, family.kv_heads), 1)
    return query, key, value


def turn(
    joint_TC: Tensor,
    family: Family,
    table: Table,
    weights: tuple[Tensor, Tensor] | None,
    *,
    in_place: bool,
) -> Tensor:
    """The joint product with normed and rotated queries and keys."""
    output_TC = joint_TC if in_place else torch.empty_like(joint_TC)
    kernel: Any = _turn
    kernel[(len(joint_TC),)](
        joint_TC, output_TC, *(weights or (joint_TC, joint_TC)), *(table or (joint_TC, joint_TC)),
        family.epsilon, joint_TC.stride(0), COPIES=not in_place, **_constants(family, table),
    )  # fmt: skip
    return output_TC


def turn_back(
    grads: tuple[Tensor, Tensor, Tensor],
    joint_TC: Tensor,
    family: Family,
    table: Table,
    weights: tuple[Tensor, Tensor] | None,
    copies: Copies | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """The gradient of the joint product, and those of the norms' weights in float32.

    `grads` are those of queries, keys and values, [rows, heads, size], of the keys and values with copies if they
    were copied; `joint_TC` is what `turn` was given.
    """
    size = family.head_size
    query_THD, key_KHD, value_KHD = (
        grad if grad.stride()[1:] == (size, 1) else grad.contiguous() for grad in grads
    )
    rows = len(joint_TC)
    programs = rows if weights is None else min(_PROGRAMS, rows)  # without sums, one for each row
    columns = (family.heads + 2 * family.kv_heads) * size
    output_TC = torch.empty(rows, columns, dtype=query_THD.dtype, device=query_THD.device)
    order, bounds = (query_THD,) * 2 if copies is None else (copies.order_K, copies.bounds_T1)
    sums = [
        torch.empty(programs, weight.numel(), dtype=torch.float32, device=weight.device)
        for weight in weights or ()
    ]
    kernel: Any = _turn_back
    kernel[(programs,)](
        query_THD, key_KHD, value_KHD, joint_TC, output_TC, *(weights or (joint_TC, joint_TC)),
        *(table or (joint_TC, joint_TC)), order, bounds, *(sums or (output_TC, output_TC)),
        family.epsilon, rows, programs, query_THD.stride(0), key_KHD.stride(0),
        value_KHD.stride(0), joint_TC.stride(0), SHARED=copies is not None,
        **_constants(family, table, sums=weights is not None),
    )  # fmt: skip
    return output_TC, [partial.sum(0) for partial in sums]


def _constants(family: Family, table: Table, *, sums: bool = False) -> dict[str, Any]:
    """What the kernels are compiled for; a table holds contiguous cosines and signed sines.

    With sums, a program holds those of all heads beside the heads themselves: more warps have the registers.
    """
    turned = 0 if table is None else table[0].shape[-1]
    half, rest, size = turned // 2, family.head_size - turned, family.head_size
    return {
        "QUERIES": family.heads, "QUERIES_PAD": next_power_of_2(family.heads),
        "KEYS": family.kv_heads, "KEYS_PAD": next_power_of_2(family.kv_heads),
        "SIZE": size, "SIZE_PAD": next_power_of_2(size), "HALF": half,
        "HALF_PAD": next_power_of_2(max(half, 1)),
        "REST_PAD": next_power_of_2(max(rest, 1)), "NORM": family.head_norms != "none",
        "WHOLE": family.head_norms == "whole", "ONE": int(family.norm_adds_one),
        "num_warps": (2 if family.heads * size <= (1024 if sums else 2048) else 4) * (1 + sums),
    }  # fmt: skip
