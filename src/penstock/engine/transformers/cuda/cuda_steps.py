"""The passes of the CUDA runner: a decode step, which graphs capture, packed prompts, and a part of a long prompt.

All store keys and values in the regions of `KVPool`.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch

from penstock.engine.transformers.cuda.regions import KVPool
from penstock.model.attention import (
    AttentionCall,
    Step,
    can_use_flash,
    causal_attention,
    flash_attention,
    plain_attention,
)
from penstock.model.kernels.decode_kernels import decode_attention, store_rows
from penstock.model.packed_attention import flash_aligns_ends
from penstock.model.transfer import to_device


class DecodeStep(Step):
    """One token per row: stored at the end of its region, attending to the region."""

    def __init__(
        self,
        pool: KVPool,
        start_B: torch.Tensor,
        target_B: torch.Tensor,
        length_B: torch.Tensor,
    ) -> None:
        self._pool, self._start_B = pool, start_B
        self._target_B, self._length_B = target_B, length_B

    def cache(self, layer: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The keys and values of a layer's pool, and the token of each row there."""
        return self._pool.keys[layer], self._pool.values[layer], self._target_B

    def store(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        store_rows(key, value, *self.cache(layer))

    def attend(self, layer: int, call: AttentionCall) -> torch.Tensor:
        return decode_attention(
            call.query[0].transpose(0, 1),
            self._pool.keys[layer],
            self._pool.values[layer],
            self._start_B,
            self._length_B,
            call.scale,
            call.window,
            call.softcap,
            call.sinks,
        )[None]


class PrefillStep(Step):
    """Packed prompts; each row of keys and values is stored in one region or several."""

    def __init__(
        self, pool: KVPool, lengths: np.ndarray, source: np.ndarray, target: np.ndarray
    ) -> None:
        self._pool, self._lengths = pool, lengths
        self._longest = int(self._lengths.max())
        self._source = to_device(source, pool.keys.device)
        self._target = to_device(target, pool.keys.device)

    def store(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        keys, values = self._pool.keys[layer], self._pool.values[layer]
        store_rows(key, value, keys, values, self._target, self._source)

    def attend(self, layer: int, call: AttentionCall) -> torch.Tensor:
        """Attend among the rows of each prompt, by the flash kernel where it can."""
        query, key, value = (x[0].transpose(0, 1) for x in (call.query, call.key, call.value))
        if not call.needs_plain and can_use_flash(query, value):
            bounds = (self._bounds, self._longest)
            mixed, *_ = flash_attention(
                query, key, value, bounds, bounds, scale=call.scale, window=call.window
            )
            return mixed[None]
        # One right-padded batch: under a causal mask, padding never reaches a real row.
        query, key, value = self._pad(query), self._pad(key), self._pad(value)
        padded = AttentionCall(query, key, value, call.scale, call.window, call.softcap, call.sinks)
        mixed = causal_attention(padded, slice(None)).transpose(1, 2)
        return mixed.reshape(-1, *mixed.shape[2:])[self._padded_rows][None]

    @cached_property
    def _bounds(self) -> torch.Tensor:
        bounds = np.concatenate([[0], np.cumsum(self._lengths)]).astype(np.int32)
        return to_device(bounds, self._pool.keys.device)

    @cached_property
    def _padded_rows(self) -> torch.Tensor:
        starts = np.arange(len(self._lengths)) * self._longest
        return to_device(joined_ranges(starts, self._lengths), self._pool.keys.device)

    def _pad(self, rows: torch.Tensor) -> torch.Tensor:
        """[rows, heads, size] as [sequences, heads, longest, size]."""
        if len(self._lengths) * self._longest > len(rows):
            padded = rows.new_zeros(len(self._lengths) * self._longest, *rows.shape[1:])
            padded[self._padded_rows] = rows
            rows = padded
        return rows.reshape(-1, self._longest, *rows.shape[1:]).transpose(1, 2)


class ChunkStep(Step):
    """Some rows of one prompt, whose rows before them are stored in its region."""

    def __init__(self, pool: KVPool, start: int, first: int, count: int) -> None:
        self._pool, self._start, self._first, self._count = pool, start, first, count
        self._bounds = [
            (to_device(np.array([0, rows], np.int32), pool.keys.device), rows)
            for rows in (count, first + count)
        ]

    def store(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        for pool_TGD, new in ((self._pool.keys[layer], key), (self._pool.values[layer], value)):
            begin = self._start + self._first
            pool_TGD[begin : begin + self._count] = new[0].transpose(0, 1)

    def attend(self, layer: int, call: AttentionCall) -> torch.Tensor:
        seen = slice(self._start, self._start + self._first + self._count)
        query = call.query[0].transpose(0, 1)
        key, value = self._pool.keys[layer][seen], self._pool.values[layer][seen]
        if not call.needs_plain and can_use_flash(query, value) and flash_aligns_ends(query.device):
            mixed, *_ = flash_attention(
                query, key, value, *self._bounds, scale=call.scale, window=call.window
            )
            return mixed[None]
        key_T = torch.arange(len(key), device=query.device)
        query_Q1 = key_T[self._first :, None]
        seen_QT = (key_T <= query_Q1) & (key_T > query_Q1 - (call.window or len(key)))
        key, value = (rows.transpose(0, 1)[None] for rows in (key, value))
        mixed = plain_attention(
            call.query,
            key,
            value,
            seen_QT,
            scale=call.scale,
            softcap=call.softcap,
            sink_H=call.sinks,
        )
        return mixed.transpose(1, 2)


def joined_ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Start, start + 1, ... of each length, one after another."""
    ends = np.cumsum(lengths)
    return np.arange(ends[-1]) + np.repeat(starts - (ends - lengths), lengths)
