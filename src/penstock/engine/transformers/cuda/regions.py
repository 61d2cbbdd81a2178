"""The KV cache of GPU decoding: one array of tokens per layer, in which each request owns a region.

Regions are contiguous and found by first fit over a sorted list of holes; a freed region joins its
neighbours. A request reserves its longest possible size, so nothing is ever evicted, and an empty pool
always fits the largest request.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

import torch

from penstock.engine.transformers.kv_attention import KVShape


@dataclass(slots=True)
class KVPool:
    """Keys and values of all regions, [layers, tokens, kv heads, size]."""

    keys: torch.Tensor
    values: torch.Tensor

    @classmethod
    def allocate(cls, shape: KVShape, tokens: int, device: torch.device) -> KVPool:
        def zeros(size: int) -> torch.Tensor:
            return torch.zeros(
                shape.layers, tokens, shape.heads, size, dtype=shape.dtype, device=device
            )

        return cls(zeros(shape.key_size), zeros(shape.value_size))


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

    def free(self, start: int, size: int) -> None:
        i = bisect.bisect(self._holes, (start, 0))
        if i < len(self._holes) and start + size == self._holes[i][0]:
            size += self._holes.pop(i)[1]
        if i > 0 and sum(self._holes[i - 1]) == start:
            start, joined = self._holes[i - 1][0], self._holes[i - 1][1]
            self._holes[i - 1] = (start, joined + size)
        else:
            self._holes.insert(i, (start, size))
