"""The KV cache of CPU decoding: sequences of similar length share one dense array, a bucket.

There is one bucket per capacity (64, 128, 256, ... tokens). A sequence that outgrows its bucket moves to
the next one, and the last row fills the hole of a finished sequence. A decode step thus attends over plain
views without a gather, and long sequences pad short ones by at most a factor of two.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch

from penstock.engine.transformers.kv_attention import KVShape
from penstock.engine.transformers.prefix_tree import StoredKV

SMALLEST = 64  # tokens
_PARTS = ("keys", "values", "experts")


@dataclass(slots=True)
class Bucket:
    """The rows of one capacity; row i belongs to `slots[i]`."""

    capacity: int
    keys: torch.Tensor  # [layers, rows, capacity, kv heads, key size]
    values: torch.Tensor
    experts: torch.Tensor  # int16 [layers, rows, capacity, experts of a token], see `StoredKV`
    slots: list[int] = field(default_factory=list)

    def grow(self) -> None:
        rows = max(4, 2 * self.keys.shape[1])
        for name in _PARTS:
            old = getattr(self, name)
            new = old.new_zeros(old.shape[0], rows, *old.shape[2:])
            new[:, : old.shape[1]] = old
            setattr(self, name, new)


class BucketedKV:
    """All buckets; `_place` maps a slot to its capacity and row."""

    def __init__(self, shape: KVShape) -> None:
        self.shape = shape
        self._buckets: dict[int, Bucket] = {}
        self._place: dict[int, tuple[int, int]] = {}

    def add(self, slot: int, length: int, parts: Iterable[tuple[StoredKV, int]]) -> None:
        """Store a sequence of `length` tokens; of each part, so many tokens."""
        bucket, row = self._new_row(slot, length + 1)
        first = 0
        for stored, count in parts:
            end = first + count
            for name in _PARTS:
                getattr(bucket, name)[:, row, first:end] = getattr(stored, name)[:, :count]
            first = end
        assert first == length

    def read(self, slot: int) -> StoredKV:
        """A view of the slot's row, valid until the next change of the cache."""
        capacity, row = self._place[slot]
        bucket = self._buckets[capacity]
        return StoredKV(*(getattr(bucket, name)[:, row] for name in _PARTS))

    def remove(self, slot: int) -> None:
        """Free the slot's row and move the bucket's last row into it."""
        capacity, row = self._place.pop(slot)
        bucket = self._buckets[capacity]
        last = len(bucket.slots) - 1
        if row != last:
            for name in _PARTS:
                getattr(bucket, name)[:, row] = getattr(bucket, name)[:, last]
            moved = bucket.slots[last]
            bucket.slots[row] = moved
            self._place[moved] = (capacity, row)
        bucket.slots.pop()

    def make_room(self, length: np.ndarray) -> None:
        """Move every sequence whose next token does not fit; `length` is indexed by slot."""
        full = [
            slot
            for bucket in self._buckets.values()
            for slot in bucket.slots
            if length[slot] >= bucket.capacity
        ]
        for slot in full:
            stored = self.read(slot)[: int(length[slot])]
            self.remove(slot)
            self.add(slot, int(length[slot]), [(stored, int(length[slot]))])

    def clear(self) -> None:
        """Release all memory."""
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

        def empty(*sizes: int, dtype: torch.dtype = shape.dtype) -> torch.Tensor:
            return torch.zeros(shape.layers, 0, capacity, *sizes, dtype=dtype)

        return Bucket(
            capacity,
            empty(shape.heads, shape.key_size),
            empty(shape.heads, shape.value_size),
            empty(shape.experts, dtype=torch.int16),
        )
