# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Triton kernels of a decode step: looking up its rows, storing keys and values, attention over regions, and sampling.

Tests compare attention and sampling with plain torch. Imported only if the model is on a GPU. Attention reads each
key and value once for all query heads of a group; sampling reads the logits once, plus the block of the sampled token.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from penstock.model.kernels.row_kernels import overlapped, wait_for_last
from penstock.model.kernels.row_tiles import (
    MOST_SPLITS,
    PROGRAMS,
    Norm,
    cdiv,
    count_splits,
    next_power_of_2,
)

_ATTEND = {"num_warps": 2, "num_stages": 2}
_BLOCK_BYTES = 16384  # of keys and values that a program reads at once
_FEW_STORED = 1024  # rows, each by a program of its own
_STORED = 2048  # numbers per program if there are more
_TURNED = 2048  # numbers of heads per program that turns them
_COLUMNS = 4096  # logits per program of the first sampling pass


@triton.jit(do_not_specialize=["splits"])
def _attend(
    Query, Keys, Values, Output, Peak, Total, Sink, Start, Length, scale, window, softcap,
    query_row, query_head, splits, HEADS: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr,
    KEY: tl.constexpr, KEY_PAD: tl.constexpr, VALUE: tl.constexpr, VALUE_PAD: tl.constexpr,
    BLOCK: tl.constexpr, WHOLE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_last(PDL)
    row, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    start = tl.load(Start + row).to(tl.int64)
    length = tl.load(Length + row).to(tl.int32)
    member, key_at, value_at = (
        tl.arange(0, GROUP_PAD),
        tl.arange(0, KEY_PAD),
        tl.arange(0, VALUE_PAD),
    )
    query_head_at = (head * GROUP + member).to(tl.int64)
    query = tl.load(
        Query + row * query_row + query_head_at[:, None] * query_head + key_at[None, :],
        mask=(member < GROUP)[:, None] & (key_at < KEY)[None, :],
        other=0.0,
    )
    best = tl.full((GROUP_PAD,), -float("inf"), tl.float32)
    total = tl.zeros((GROUP_PAD,), tl.float32)
    mixed = tl.zeros((GROUP_PAD, VALUE_PAD), tl.float32)
    first = tl.maximum(0, length - window)
    begin = (first // BLOCK) * BLOCK
    share = tl.cdiv(tl.cdiv(length - begin, BLOCK), splits) * BLOCK
    begin += split * share
    for block in range(begin, tl.minimum(begin + share, length), BLOCK):
        column = block + tl.arange(0, BLOCK)
        visible = (column < length) & (column >= first)
        token = (start + column) * KV_HEADS + head
        key = tl.load(
            Keys + token[:, None] * KEY + key_at[None, :],
            mask=visible[:, None] & (key_at < KEY)[None, :],
            other=0.0,
        )
        value = tl.load(
            Values + token[:, None] * VALUE + value_at[None, :],
            mask=visible[:, None] & (value_at < VALUE)[None, :],
            other=0.0,
        )
        score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        if CAPPED:
            score = (2.0 * tl.sigmoid(2.0 * score / softcap) - 1.0) * softcap  # tanh
        score = tl.where(visible[None, :], score, -float("inf"))
        peak = tl.maximum(best, tl.max(score, 1))
        shrink = tl.exp(best - peak)
        weight = tl.exp(score - peak[:, None])
        total = total * shrink + tl.sum(weight, 1)
        mixed = mixed * shrink[:, None] + tl.dot(
            weight.to(value.dtype), value, input_precision="ieee"
        )
        best = peak
    at = (row * HEADS + query_head_at) * splits + split
    inside = (member < GROUP)[:, None] & (value_at < VALUE)[None, :]
    if WHOLE:
        if SINKS:
            sink = tl.load(Sink + query_head_at, mask=member < GROUP, other=0.0).to(tl.float32)
            total += tl.exp(sink - best)
        mixed = mixed / total[:, None]
    else:
        tl.store(Peak + at, best, mask=member < GROUP)
        tl.store(Total + at, total, mask=member < GROUP)
        inside = inside & (begin < length)  # the last parts of a short context are empty
    tl.store(
        Output + at[:, None] * VALUE + value_at[None, :],
        mixed.to(Output.dtype.element_ty),
        mask=inside,
    )


@triton.jit(do_not_specialize=["splits"])
def _join(
    Part, Peak, Total, Sink, Output, splits, HEADS: tl.constexpr, SINKS: tl.constexpr,
    VALUE: tl.constexpr, VALUE_PAD: tl.constexpr, MOST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_last(PDL)
    at = tl.program_id(0).to(tl.int64)  # row and head
    split, value_at = tl.arange(0, MOST), tl.arange(0, VALUE_PAD)
    peak = tl.load(Peak + at * splits + split, mask=split < splits, other=-float("inf"))
    best = tl.max(peak, 0)
    weight = tl.exp(peak - best)  # an empty split has -inf, so weight 0
    total = tl.load(Total + at * splits + split, mask=split < splits, other=0.0)
    total = tl.sum(total * weight, 0)
    if SINKS:
        total += tl.exp(tl.load(Sink + at % HEADS).to(tl.float32) - best)
    part = tl.load(
        Part + (at * splits + split)[:, None] * VALUE + value_at[None, :],
        mask=(weight > 0.0)[:, None] & (value_at < VALUE)[None, :],
        other=0.0,
    )
    mixed = tl.sum(part * weight[:, None], 0) / total
    tl.store(
        Output + at * VALUE + value_at, mixed.to(Output.dtype.element_ty), mask=value_at < VALUE
    )


def decode_attention(
    query_BHD: torch.Tensor,
    keys_TGD: torch.Tensor,
    values_TGD: torch.Tensor,
    start_B: torch.Tensor,
    length_B: torch.Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sink_H: torch.Tensor | None = None,
    programs: int = PROGRAMS,
) -> torch.Tensor:
    """Attend from each row to the `length` tokens of its region at `start`; return [B, H, D].

    A small batch cannot fill the device with one program per row and kv head: its contexts are split
    among several programs, until there are `programs`, and a second kernel joins their results.
    """
    rows, heads, key_size = query_BHD.shape
    kv_heads, value_size = keys_TGD.shape[1], values_TGD.shape[2]
    assert query_BHD.stride(2) == 1
    assert keys_TGD.is_contiguous()
    assert values_TGD.is_contiguous()
    key_pad, value_pad = (max(16, next_power_of_2(n)) for n in (key_size, value_size))
    splits = count_splits(rows * kv_heads, programs)
    per_token = (key_pad + value_pad) * keys_TGD.element_size()
    fit = 1 << (max(1, _BLOCK_BYTES // per_token).bit_length() - 1)  # a power of two
    block = max(16, min(64, fit))
    if window is not None:  # no part is shorter than a block
        splits = min(splits, next_power_of_2(cdiv(window, block)))
    output = query_BHD.new_empty(rows, heads, value_size)
    part, peak, total = output, output, output
    if splits > 1:
        part = query_BHD.new_empty((rows, heads, splits, value_size), dtype=torch.float32)
        peak, total = query_BHD.new_empty((2, rows, heads, splits), dtype=torch.float32)
    group, sinks = heads // kv_heads, output if sink_H is None else sink_H
    how = overlapped(query_BHD.device)
    attend: Any = _attend
    attend[(rows, kv_heads, splits)](
        query_BHD, keys_TGD, values_TGD, part, peak, total, sinks, start_B, length_B,
        scale, window if window is not None else 1 << 30, softcap or 1.0,
        query_BHD.stride(0), query_BHD.stride(1), splits, HEADS=heads,
        CAPPED=softcap is not None, SINKS=sink_H is not None,
        KV_HEADS=kv_heads, GROUP=group, GROUP_PAD=max(16, next_power_of_2(group)),
        KEY=key_size, KEY_PAD=key_pad, VALUE=value_size, VALUE_PAD=value_pad, BLOCK=block,
        WHOLE=splits == 1, **_ATTEND, **how,
    )  # fmt: skip
    if splits > 1:
        join: Any = _join
        join[(rows * heads,)](
            part, peak, total, sinks, output, splits, HEADS=heads, SINKS=sink_H is not None,
            VALUE=value_size, VALUE_PAD=value_pad, MOST=MOST_SPLITS,
            num_warps=max(1, value_pad // 64), **how,
        )  # fmt: skip
    return output


@triton.jit
def _copy_rows(
    From, To, source, target, inside, from_row, from_head,
    HEADS: tl.constexpr, SIZE: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, PAD)
    place = (at // SIZE) * from_head + at % SIZE
    there = inside[:, None] & (at < HEADS * SIZE)[None, :]
    values = tl.load(From + source[:, None] * from_row + place[None, :], mask=there, other=0.0)
    tl.store(To + target[:, None] * (HEADS * SIZE) + at[None, :], values, mask=there)


@triton.jit(do_not_specialize=["rows"])
def _store(
    Key, Value, Keys, Values, Source, Target, rows, key_row, key_head, value_row, value_head,
    HEADS: tl.constexpr, KEY: tl.constexpr, KEY_PAD: tl.constexpr,
    VALUE: tl.constexpr, VALUE_PAD: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    target = tl.load(Target + row, mask=inside, other=0).to(tl.int64)
    source = row if Source is None else tl.load(Source + row, mask=inside, other=0).to(tl.int64)
    _copy_rows(Key, Keys, source, target, inside, key_row, key_head, HEADS, KEY, KEY_PAD)
    _copy_rows(
        Value, Values, source, target, inside, value_row, value_head, HEADS, VALUE, VALUE_PAD
    )


def store_rows(
    key: torch.Tensor,
    value: torch.Tensor,
    keys_TGD: torch.Tensor,
    values_TGD: torch.Tensor,
    target_S: torch.Tensor,
    source_S: torch.Tensor | None = None,
) -> None:
    """Store row `source_S[i]` of the new keys and values, [1, kv heads, rows, size], at token `target_S[i]`.

    Without `source_S` it is row i.
    """
    heads, key_size, value_size = key.shape[1], key.shape[3], value.shape[3]
    assert key.stride(3) == value.stride(3) == 1
    count, pads = len(target_S), [next_power_of_2(heads * n) for n in (key_size, value_size)]
    rows = max(1, _STORED // max(pads)) if count > _FEW_STORED else 1
    kernel: Any = _store
    kernel[(cdiv(count, rows),)](
        key, value, keys_TGD, values_TGD, source_S, target_S, count,
        key.stride(2), key.stride(1), value.stride(2), value.stride(1), HEADS=heads,
        KEY=key_size, KEY_PAD=pads[0], VALUE=value_size, VALUE_PAD=pads[1], ROWS=rows, num_warps=4,
    )  # fmt: skip


@triton.jit
def _turn_heads(
    Product, Query, Keys, Values, Target, Cos, Sin, QueryNorm, KeyNorm, eps, turn_row,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr, HALF: tl.constexpr,
    HALF_PAD: tl.constexpr, REST_PAD: tl.constexpr, AT_ONCE: tl.constexpr, TURNS: tl.constexpr,
    NORMED: tl.constexpr, OFFSET: tl.constexpr, STORES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # A program norms and turns some heads of a row. Value heads, the last ones, stay as they are.
    wait_for_last(PDL)
    row = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE))[:, None]
    at, rest_at = tl.arange(0, HALF_PAD)[None, :], 2 * HALF + tl.arange(0, REST_PAD)[None, :]
    turns, stored = head < HEADS + KV_HEADS, head < HEADS + 2 * KV_HEADS
    inside, inside_rest = stored & (at < HALF), stored & (rest_at < SIZE)
    kind = Product.dtype.element_ty
    source = Product + (row * (HEADS + 2 * KV_HEADS) + head) * SIZE
    low = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(source + HALF + at, mask=inside, other=0.0).to(tl.float32)
    rest = low
    if 2 * HALF < SIZE:
        rest = tl.load(source + rest_at, mask=inside_rest, other=0.0).to(tl.float32)
    if NORMED:
        square = tl.sum(low * low, 1) + tl.sum(high * high, 1)
        if 2 * HALF < SIZE:
            square += tl.sum(rest * rest, 1)
        inverse = tl.rsqrt(square / SIZE + eps)[:, None]
        low = _head_norm(low, inverse, QueryNorm, KeyNorm, at, at < HALF, head, HEADS, KV_HEADS, OFFSET, kind)  # fmt: skip
        high = _head_norm(high, inverse, QueryNorm, KeyNorm, HALF + at, at < HALF, head, HEADS, KV_HEADS, OFFSET, kind)  # fmt: skip
        if 2 * HALF < SIZE:
            rest = _head_norm(rest, inverse, QueryNorm, KeyNorm, rest_at, rest_at < SIZE, head, HEADS, KV_HEADS, OFFSET, kind)  # fmt: skip
    if TURNS:
        cos = tl.load(Cos + row * turn_row + at, mask=at < HALF, other=0.0).to(tl.float32)
        sin = tl.load(Sin + row * turn_row + HALF + at, mask=at < HALF, other=0.0).to(tl.float32)
        turned = tl.where(turns, low * cos - high * sin, low)
        high = tl.where(turns, high * cos + low * sin, high)
        low = turned
    if STORES:
        place = tl.load(Target + row).to(tl.int64) * KV_HEADS
        _store_head(Query + (row * HEADS + head) * SIZE, low, high, rest, at, rest_at, inside & (head < HEADS), inside_rest & (head < HEADS), SIZE, HALF, kind)  # fmt: skip
        is_key = turns & (head >= HEADS)
        _store_head(Keys + (place + head - HEADS) * SIZE, low, high, rest, at, rest_at, inside & is_key, inside_rest & is_key, SIZE, HALF, kind)  # fmt: skip
        is_value = head >= HEADS + KV_HEADS
        _store_head(Values + (place + head - HEADS - KV_HEADS) * SIZE, low, high, rest, at, rest_at, inside & is_value, inside_rest & is_value, SIZE, HALF, kind)  # fmt: skip
    else:
        _store_head(source, low, high, rest, at, rest_at, inside & turns, inside_rest & turns, SIZE, HALF, kind)  # fmt: skip


@triton.jit
def _head_norm(
    x, inverse, QueryNorm, KeyNorm, at, inside, head, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    OFFSET: tl.constexpr, kind: tl.constexpr,
):  # fmt: skip
    query = tl.load(QueryNorm + at, mask=inside, other=0.0).to(tl.float32)
    key = tl.load(KeyNorm + at, mask=inside, other=0.0).to(tl.float32)
    normed = (x * inverse * (tl.where(head < HEADS, query, key) + OFFSET)).to(kind).to(tl.float32)
    return tl.where(head < HEADS + KV_HEADS, normed, x)


@triton.jit
def _store_head(
    target, low, high, rest, at, rest_at, inside, inside_rest, SIZE: tl.constexpr,
    HALF: tl.constexpr, kind: tl.constexpr,
):  # fmt: skip
    tl.store(target + at, low.to(kind), mask=inside)
    tl.store(target + HALF + at, high.to(kind), mask=inside)
    if 2 * HALF < SIZE:
        tl.store(target + rest_at, rest.to(kind), mask=inside_rest)


def turn_heads(
    product_BN: torch.Tensor,
    sizes: tuple[int, int, int],
    turn: tuple[torch.Tensor, torch.Tensor] | None,
    norms: tuple[Norm, Norm] | None,
    cache: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:
    """Norm and turn the query and key heads of a product of q, k and v; `sizes` are heads, kv heads, head size.

    With a cache (keys and values [T, G, D], and the token of each row there), store keys and values and return
    the queries [B, H, D]; else turn in place and return the product. `turn` holds cosines and signed sines [rows, 1, turned size]: the first numbers of a head
    turn in halves; None: none turn.
    """
    (heads, kv_heads, size), rows = sizes, len(product_BN)
    turned = size if turn is None else turn[0].shape[-1]
    assert product_BN.is_contiguous()
    query = product_BN if cache is None else product_BN.new_empty(rows, heads, size)
    keys, values, target = (query, query, query) if cache is None else cache
    assert keys.is_contiguous()
    assert values.is_contiguous()
    cos, sin = (query, query) if turn is None else turn
    query_norm, key_norm = (Norm(query, 0.0),) * 2 if norms is None else norms
    at_once = max(1, _TURNED // next_power_of_2(size))
    kernel: Any = _turn_heads
    kernel[(rows, cdiv(heads + 2 * kv_heads, at_once))](
        product_BN, query, keys, values, target, cos, sin, query_norm.weight, key_norm.weight,
        query_norm.epsilon, cos.stride(0), HEADS=heads, KV_HEADS=kv_heads, SIZE=size,
        HALF=turned // 2, HALF_PAD=next_power_of_2(turned // 2),
        REST_PAD=next_power_of_2(max(1, size - turned)), AT_ONCE=at_once,
        TURNS=turn is not None, NORMED=norms is not None, OFFSET=query_norm.offset,
        STORES=cache is not None, num_warps=4, **overlapped(product_BN.device),
    )  # fmt: skip
    return query


@triton.jit
def _open_rows(
    Slot, Token, Position, Start, Embedding, Table, X, Turn, StartOut, Target, Length, scale,
    POSITIONS, WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr, SIZE: tl.constexpr,
    SIZE_PAD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(Slot + row)
    token, position = tl.load(Token + slot), tl.load(Position + slot)
    start = tl.load(Start + slot)
    tl.store(StartOut + row, start)
    tl.store(Target + row, start + position)
    tl.store(Length + row, position + 1)
    at = tl.arange(0, WIDTH_PAD)
    x = tl.load(Embedding + token * WIDTH + at, mask=at < WIDTH, other=0.0).to(tl.float32) * scale
    tl.store(X + row * WIDTH + at, x.to(X.dtype.element_ty), mask=at < WIDTH)
    at = tl.arange(0, SIZE_PAD)
    turn = tl.load(Table + tl.minimum(position, POSITIONS - 1) * SIZE + at, mask=at < SIZE)
    tl.store(Turn + row * SIZE + at, turn, mask=at < SIZE)


class OpenRows(NamedTuple):
    """What a decode step needs of its rows."""

    x_BD: torch.Tensor  # embeddings
    turn_BW: torch.Tensor  # rows of the table of rotations
    start_B: torch.Tensor  # of the region
    target_B: torch.Tensor  # token of the pool
    length_B: torch.Tensor  # tokens to see


def open_rows(
    slot_B: torch.Tensor,
    state: Any,
    embedding_VD: torch.Tensor,
    scale: float,
    turn_PW: torch.Tensor,
) -> OpenRows:
    """Look up the slots' tokens and positions, scaled embeddings and rotations."""
    rows, width, size = len(slot_B), embedding_VD.shape[1], turn_PW.shape[1]
    assert embedding_VD.is_contiguous()
    x_BD, turn_BW = embedding_VD.new_empty(rows, width), turn_PW.new_empty(rows, size)
    places = slot_B.new_empty(3, rows).unbind()
    kernel: Any = _open_rows
    kernel[(rows,)](
        slot_B, state.token, state.position, state.start, embedding_VD, turn_PW, x_BD, turn_BW,
        *places, scale, len(turn_PW), WIDTH=width, WIDTH_PAD=next_power_of_2(width),
        SIZE=size, SIZE_PAD=next_power_of_2(size), num_warps=4,
    )  # fmt: skip
    return OpenRows(x_BD, turn_BW, *places)


@triton.jit(do_not_specialize=["by"])
def _next_rows(
    Logits, Slot, Index, Position, MinIndex, Stops, Key, Temperature, KeyOut, IndexOut,
    TemperatureOut, row_stride, by, padding, STOPS: tl.constexpr, STOPS_PAD: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    wait_for_last(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(Slot + row)
    index = tl.load(Index + slot) + by
    position = tl.load(Position + slot) + by
    if index < tl.load(MinIndex + slot):
        at = tl.arange(0, STOPS_PAD)
        stop = tl.load(Stops + slot * STOPS + at, mask=at < STOPS, other=-1)
        tl.store(Logits + row * row_stride + stop, -float("inf"), mask=stop >= 0)
    tl.store(KeyOut + row, tl.load(Key + slot))
    tl.store(IndexOut + row, index)
    tl.store(TemperatureOut + row, tl.load(Temperature + slot))
    if slot < padding:  # several rows may be padding
        tl.store(Index + slot, index)
        tl.store(Position + slot, position)


def next_rows(
    logits_BV: torch.Tensor, slot_B: torch.Tensor, state: Any, by: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Advance the slots by `by` tokens; return the key, index and temperature of each row.

    The logits of a row's stop tokens become -inf while its response is shorter than `min_index`. The
    last slot is padding and does not advance.
    """
    rows, stops = len(slot_B), state.stops.shape[1]
    key_B, index_B = torch.empty_like(slot_B), torch.empty_like(slot_B)
    temperature_B = torch.empty(rows, dtype=torch.float32, device=slot_B.device)
    kernel: Any = _next_rows
    kernel[(rows,)](
        logits_BV, slot_B, state.index, state.position, state.min_index, state.stops, state.key,
        state.temperature, key_B, index_B, temperature_B, logits_BV.stride(0), by,
        len(state.index) - 1, STOPS=stops, STOPS_PAD=next_power_of_2(stops), num_warps=1,
        **overlapped(slot_B.device),
    )  # fmt: skip
    return key_B, index_B, temperature_B


@triton.jit
def _block_sums(
    Logits, Temperature, Peak, Sum, Best, row_stride, VOCABULARY, BLOCKS, COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    wait_for_last(PDL)
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(Temperature + row)
    greedy = temperature == 0.0
    temperature = tl.where(greedy, 1.0, temperature)
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    logit = tl.load(
        Logits + row * row_stride + column, mask=column < VOCABULARY, other=-float("inf")
    )
    scaled = logit.to(tl.float32) / temperature
    peak = tl.max(scaled, 0)
    mass = tl.sum(tl.exp(scaled - peak), 0)
    tl.store(Peak + row * BLOCKS + block, peak)
    tl.store(Sum + row * BLOCKS + block, tl.where(peak == -float("inf"), 0.0, mass))
    if greedy:  # half of the work of a block
        tl.store(Best + row * BLOCKS + block, block * COLUMNS + tl.argmax(scaled, 0))


@triton.jit
def _uniform(key, index):
    # splitmix64's finaliser, as in sampling.py
    golden = tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
    mix_1 = tl.full((), 0xBF58476D1CE4E5B9, tl.uint64)
    mix_2 = tl.full((), 0x94D049BB133111EB, tl.uint64)
    x = key.to(tl.uint64, bitcast=True) + (index + 1).to(tl.uint64) * golden
    x = (x ^ (x >> 30)) * mix_1
    x = (x ^ (x >> 27)) * mix_2
    x = x ^ (x >> 31)
    return (x >> 41).to(tl.int32).to(tl.float32) * (1.0 / 8388608.0)


@triton.jit
def _first_past(target, mass, COUNT: tl.constexpr):
    # The first cell whose prefix sum passes the target, else the last cell; never one without mass.
    # A parallel prefix sum of floats is not monotone, so cells are tested one by one, not counted.
    at = tl.arange(0, COUNT)
    first = tl.min(tl.where((mass > 0.0) & (tl.cumsum(mass, 0) > target), at, COUNT), 0)
    return tl.where(first < COUNT, first, tl.max(tl.where(mass > 0.0, at, 0), 0))


@triton.jit
def _pick(
    Logits, Key, Index, Temperature, Peak, Sum, Best, Known, Token, Logprob, row_stride,
    VOCABULARY, BLOCKS, BLOCKS_PAD: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_last(PDL)
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(Temperature + row)
    greedy = temperature == 0.0
    temperature = tl.where(greedy, 1.0, temperature)
    at = tl.arange(0, BLOCKS_PAD)
    peak = tl.load(Peak + row * BLOCKS + at, mask=at < BLOCKS, other=-float("inf"))
    top = tl.max(peak, 0)
    mass = tl.load(Sum + row * BLOCKS + at, mask=at < BLOCKS, other=0.0)
    mass = tl.where(peak == -float("inf"), 0.0, mass * tl.exp(peak - top))
    total = tl.sum(mass, 0)
    # A row without a distribution (a NaN or +inf logit, or no finite one) gets token 0 and log-prob NaN.
    valid = (total > 0.0) & (total < float("inf"))
    if Known is not None:
        known = tl.load(Known + row)
        chosen = tl.load(Logits + row * row_stride + known).to(tl.float32) / temperature
        tl.store(Logprob + row, tl.where(valid, chosen - top - tl.log(total), float("nan")))
        return
    target = _uniform(tl.load(Key + row), tl.load(Index + row)) * total
    block = _first_past(target, mass, BLOCKS_PAD)
    before = tl.sum(tl.where(at < block, mass, 0.0), 0)
    column = tl.arange(0, COLUMNS)
    logit = tl.load(
        Logits + row * row_stride + block * COLUMNS + column,
        mask=block * COLUMNS + column < VOCABULARY,
        other=-float("inf"),
    )
    weight = tl.exp(logit.to(tl.float32) / temperature - top)
    token = block * COLUMNS + _first_past(target - before, weight, COLUMNS)
    likeliest = tl.load(Best + row * BLOCKS + tl.argmax(peak, 0), mask=greedy, other=0)
    token = tl.where(valid, tl.where(greedy, likeliest, token), 0)
    chosen = tl.load(Logits + row * row_stride + token).to(tl.float32) / temperature
    tl.store(Token + row, token.to(tl.int64))
    tl.store(Logprob + row, tl.where(valid, chosen - top - tl.log(total), float("nan")))


def sample_rows(
    logits_BV: torch.Tensor,
    key_B: torch.Tensor,
    index_B: torch.Tensor,
    temperature_B: torch.Tensor,
    known_B: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token and log-prob of each row; temperature 0: the likeliest token, log-prob at 1.

    Known tokens are not sampled again: their log-probs have the bits that they had when they were sampled.
    A row whose logits are no distribution (NaN, +inf, or none finite) gets log-prob NaN.
    """
    rows, vocabulary = logits_BV.shape
    blocks = cdiv(vocabulary, _COLUMNS)
    peak, mass = logits_BV.new_empty((2, rows, blocks), dtype=torch.float32)
    best = torch.empty(rows, blocks, dtype=torch.int32, device=logits_BV.device)
    token = torch.empty(rows, dtype=torch.int64, device=logits_BV.device)
    logprob = torch.empty(rows, dtype=torch.float32, device=logits_BV.device)
    sums: Any = _block_sums
    how = overlapped(logits_BV.device)
    sums[(rows, blocks)](
        logits_BV, temperature_B, peak, mass, best, logits_BV.stride(0), vocabulary, blocks,
        COLUMNS=_COLUMNS, num_warps=4, **how,
    )  # fmt: skip
    pick: Any = _pick
    pick[(rows,)](
        logits_BV, key_B, index_B, temperature_B, peak, mass, best, known_B, token, logprob,
        logits_BV.stride(0), vocabulary, blocks,
        BLOCKS_PAD=next_power_of_2(blocks), COLUMNS=_COLUMNS, num_warps=8, **how,
    )  # fmt: skip
    return token if known_B is None else known_B, logprob
