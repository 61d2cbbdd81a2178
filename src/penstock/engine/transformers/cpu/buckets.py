"""Key-value storage for CPU decoding: sequences of like length sit together.

One dense array per capacity (64, 128, 256, ... tokens). A sequence moves to the next array when it
outgrows its own, and the last row fills the hole that a finished one leaves, so each decode step
attends over plain views: no gather, and long sequences never pad short ones by more than a factor of two.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from penstock.engine.transformers.kv_attention import AttentionCall
from penstock.models.attention import plain_attention

SMALLEST = 64
QUANTUM = 16  # attention lengths are multiples of it: the vector tail never changes a row's bits


def round_up(value: int, quantum: int) -> int:
    return -(-value // quantum) * quantum


@dataclass(slots=True, frozen=True, kw_only=True)
class KVShape:
    """What a model's layers store for one token."""

    layers: int
    heads: int
    key_size: int
    value_size: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        return self.layers * self.heads * (self.key_size + self.value_size) * self.dtype.itemsize


@dataclass(slots=True)
class Bucket:
    """Rows of one capacity; row i belongs to `slots[i]`."""

    capacity: int
    keys: torch.Tensor  # [layers, rows, capacity, kv heads, key size]
    values: torch.Tensor
    slots: list[int] = field(default_factory=list)

    def grow(self) -> None:
        rows = max(4, 2 * self.keys.shape[1])
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = old.new_zeros(old.shape[0], rows, *old.shape[2:])
            new[:, : old.shape[1]] = old
            setattr(self, name, new)


class BucketedKV:
    """All buckets; `place` says in which bucket and row a slot lives."""

    def __init__(self, shape: KVShape) -> None:
        self.shape = shape
        self._buckets: dict[int, Bucket] = {}
        self._place: dict[int, tuple[int, int]] = {}

    def add(self, slot: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store a prefilled sequence, [layers, length, kv heads, size]."""
        length = keys.shape[1]
        bucket, row = self._new_row(slot, length + 1)
        bucket.keys[:, row, :length] = keys
        bucket.values[:, row, :length] = values

    def remove(self, slot: int) -> None:
        """Free a row; the bucket's last row takes its place."""
        capacity, row = self._place.pop(slot)
        bucket = self._buckets[capacity]
        last = len(bucket.slots) - 1
        if row != last:
            bucket.keys[:, row] = bucket.keys[:, last]
            bucket.values[:, row] = bucket.values[:, last]
            moved = bucket.slots[last]
            bucket.slots[row] = moved
            self._place[moved] = (capacity, row)
        bucket.slots.pop()

    def make_room(self, length: np.ndarray) -> None:
        """Move every sequence that has no place for its next token; `length` is indexed by slot."""
        full = [
            slot
            for bucket in self._buckets.values()
            for slot in bucket.slots
            if length[slot] >= bucket.capacity
        ]
        for slot in full:
            capacity, row = self._place[slot]
            old, stored = self._buckets[capacity], int(length[slot])
            keys = old.keys[:, row, :stored].clone()
            values = old.values[:, row, :stored].clone()
            self.remove(slot)
            self.add(slot, keys, values)

    def clear(self) -> None:
        """Give all memory back."""
        self._buckets.clear()
        self._place.clear()

    @property
    def in_use(self) -> list[Bucket]:
        return [b for _, b in sorted(self._buckets.items()) if b.slots]

    def _new_row(self, slot: int, length: int) -> tuple[Bucket, int]:
        capacity = SMALLEST
        while capacity < length:
            capacity *= 2
        bucket = self._buckets.get(capacity)
        if bucket is None:
            bucket = self._buckets[capacity] = self._empty_bucket(capacity)
        if len(bucket.slots) == bucket.keys.shape[1]:
            bucket.grow()
        bucket.slots.append(slot)
        row = len(bucket.slots) - 1
        self._place[slot] = (capacity, row)
        return bucket, row

    def _empty_bucket(self, capacity: int) -> Bucket:
        shape = self.shape
        return Bucket(
            capacity,
            torch.zeros(shape.layers, 0, capacity, shape.heads, shape.key_size, dtype=shape.dtype),
            torch.zeros(
                shape.layers, 0, capacity, shape.heads, shape.value_size, dtype=shape.dtype
            ),
        )


class _Stretch:
    """The rows of one bucket within a decode step."""

    def __init__(self, bucket: Bucket, first: int, position: np.ndarray) -> None:
        rows = len(bucket.slots)
        self.bucket, self.first, self.end, self.position = bucket, first, first + rows, position
        self.length = min(round_up(int(position.max()) + 1, QUANTUM), bucket.capacity)
        self.target = torch.from_numpy(np.arange(rows) * bucket.capacity + position)
        self._masks: dict[int | None, torch.Tensor] = {}

    def mask(self, window: int | None) -> torch.Tensor:
        """Additive mask [rows, 1, 1, length]; made once a step, shared by the layers."""
        if window not in self._masks:
            key_L = np.arange(self.length)
            hidden = key_L[None, :] > self.position[:, None]
            if window is not None:
                hidden |= key_L[None, :] <= self.position[:, None] - window
            mask = np.where(hidden, np.float32(-np.inf), np.float32(0))
            self._masks[window] = torch.from_numpy(mask)[:, None, None, :].to(
                self.bucket.keys.dtype
            )
        return self._masks[window]


class DecodeStep:
    """One token for every stored sequence: rows in the order of the buckets, then padding."""

    def __init__(self, kv: BucketedKV, length: np.ndarray) -> None:
        self._stretches: list[_Stretch] = []
        slots: list[int] = []
        for bucket in kv.in_use:
            position = length[bucket.slots]
            self._stretches.append(_Stretch(bucket, len(slots), position))
            slots += bucket.slots
        self.slots_N = np.array(slots, np.int64)

    def store(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        key_RHD, value_RHD = key[0].transpose(0, 1), value[0].transpose(0, 1)
        for part in self._stretches:
            rows = slice(part.first, part.end)
            for stored, new in ((part.bucket.keys, key_RHD), (part.bucket.values, value_RHD)):
                stored[layer].flatten(0, 1).index_copy_(0, part.target, new[rows])

    def attend(self, layer: int, call: AttentionCall, output: torch.Tensor) -> None:
        """Fill the decoded rows of `output` [1, rows, heads, value size]."""
        query_RHD = call.query[0].transpose(0, 1)
        for part in self._stretches:
            rows, bucket = slice(part.first, part.end), part.bucket
            count = part.end - part.first
            key = bucket.keys[layer, :count, : part.length].transpose(1, 2)
            value = bucket.values[layer, :count, : part.length].transpose(1, 2)
            output[0, rows] = attend_rows(query_RHD[rows], key, value, part, call)


def attend_rows(
    query_NHD: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    part: _Stretch | ReplayMask,
    call: AttentionCall,
) -> torch.Tensor:
    """One query row per sequence over [rows, kv heads, length, size]; heads of a group go together."""
    rows, heads, size = query_NHD.shape
    mask = part.mask(call.window)
    if call.is_plain:
        return plain_attention(
            query_NHD[:, :, None],
            key,
            value,
            mask == 0,
            scale=call.scale,
            softcap=call.softcap,
            sink_H=call.sinks,
        )[:, :, 0]
    grouped = query_NHD.reshape(rows, key.shape[1], heads // key.shape[1], size)
    output = torch.nn.functional.scaled_dot_product_attention(
        grouped, key, value, attn_mask=mask, scale=call.scale
    )
    return output.reshape(rows, heads, value.shape[3])


class ReplayMask:
    """Masks for the rows `first`..`length` of one sequence, each attending as its own decode step."""

    def __init__(self, first: int, length: int, dtype: torch.dtype) -> None:
        self.padded = round_up(length, QUANTUM)
        self._position = torch.arange(first, length)
        self._dtype = dtype

    def mask(self, window: int | None) -> torch.Tensor:
        key_L = torch.arange(self.padded)
        hidden = key_L[None, :] > self._position[:, None]
        if window is not None:
            hidden |= key_L[None, :] <= self._position[:, None] - window
        zeros = torch.zeros(hidden.shape, dtype=self._dtype)
        return zeros.masked_fill_(hidden, -torch.inf)[:, None, None, :]
