"""The KV cache of GPU decoding: one array of tokens per layer, in which each request owns a region.

Regions are contiguous and found by first fit over a sorted list of holes; a freed region joins its
neighbours. What a request leaves stays in its place and belongs to the prefix tree (`Rows`), until the
space is needed.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

import torch

from penstock.engine.transformers.kv_attention import KVShape


@dataclass(slots=True)
class KVPool:
    """Keys and values of all regions, [layers, tokens, kv heads, size], and their experts; see `StoredKV`."""

    keys: torch.Tensor
    values: torch.Tensor
    experts: torch.Tensor

    def copy(self, source: int, target: int, count: int) -> None:
        """Copy `count` tokens."""
        for stored in (self.keys, self.values, self.experts):
            stored[:, target : target + count] = stored[:, source : source + count]

    @classmethod
    def allocate(cls, shape: KVShape, tokens: int, device: torch.device) -> KVPool:
        def zeros(*sizes: int, dtype: torch.dtype = shape.dtype) -> torch.Tensor:
            return torch.zeros(shape.layers, tokens, *sizes, dtype=dtype, device=device)

        return cls(
            zeros(shape.heads, shape.key_size),
            zeros(shape.heads, shape.value_size),
            zeros(shape.experts, dtype=torch.int16),
        )


@dataclass(slots=True, frozen=True)
class Rows:
    """Tokens of the pool, as the prefix tree stores them."""

    start: int
    count: int

    def __getitem__(self, tokens: slice) -> Rows:
        first, end, _ = tokens.indices(self.count)
        return Rows(self.start + first, end - first)


class Regions:
    """Allocates ranges [start, start + size) of the pool's tokens."""

    def __init__(self, size: int) -> None:
        self._holes: list[tuple[int, int]] = [(0, size)]  # (start, size), sorted, never adjacent

    def reserve(self, size: int) -> int | None:
        """Reserve a region of `size` tokens; return its start, or None if none is free now."""
        for i, (start, room) in enumerate(self._holes):
            if room >= size:
                if room == size:
                    del self._holes[i]
                else:
                    self._holes[i] = (start + size, room - size)
                return start
        return None

    def extend(self, start: int, size: int, more: int) -> bool:
        """Reserve `more` tokens behind a region, if they are free."""
        end = start + size
        i = bisect.bisect(self._holes, (end, 0))
        if i == len(self._holes) or self._holes[i][0] != end or self._holes[i][1] < more:
            return False
        room = self._holes.pop(i)[1]
        self.free(end + more, room - more)
        return True

    def free(self, start: int, size: int) -> None:
        if not size:
            return
        i = bisect.bisect(self._holes, (start, 0))
        if i < len(self._holes) and start + size == self._holes[i][0]:
            size += self._holes.pop(i)[1]
        if i > 0 and sum(self._holes[i - 1]) == start:
            start, joined = self._holes[i - 1][0], self._holes[i - 1][1]
            self._holes[i - 1] = (start, joined + size)
        else:
            self._holes.insert(i, (start, size))
