"""The passes of the CUDA runner: a decode step, which graphs capture, and tokens of prompts.

All store keys and values in the regions of `KVPool`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from penstock.engine.transformers.adapters import NONE
from penstock.engine.transformers.cuda.regions import KVPool
from penstock.model.arithmetic import any_order
from penstock.model.attention import (
    AttentionCall,
    Step,
    can_use_flash,
    causal_attention,
    expert_numbers,
    flash_attention,
    plain_attention,
)
from penstock.model.kernels.decode_kernels import decode_attention, store_rows
from penstock.model.kernels.row_tiles import PROGRAMS
from penstock.model.packed_attention import flash_aligns_ends
from penstock.model.transfer import to_device


class _PoolStep(Step):
    """A step whose rows are tokens of the pool, which keeps their experts if they are recorded."""

    _pool: KVPool
    _target: torch.Tensor  # tokens of the pool
    _source: torch.Tensor | None = None  # the row of each; None: row i
    _num_rows: int

    def choose(
        self, layer: int, kept_K: torch.Tensor | None, expert_RC: torch.Tensor
    ) -> torch.Tensor:
        expert_RC = super().choose(layer, kept_K, expert_RC)
        stored = self._pool.experts[layer]
        if stored.numel():
            number_RC = expert_numbers(expert_RC, kept_K, self._num_rows)
            if self._source is not None:
                number_RC = number_RC.index_select(0, self._source)
            with any_order():  # no token comes twice, but that of padding
                stored.index_copy_(0, self._target, number_RC)
        return expert_RC


class DecodeStep(_PoolStep):
    """One token per row: stored at the end of its region, attending to the region."""

    def __init__(
        self,
        pool: KVPool,
        start_B: torch.Tensor,
        target_B: torch.Tensor,
        length_B: torch.Tensor,
        *,
        exact: bool = False,
    ) -> None:
        """exact: the bits of a row are those of any batch, and of `PrefillStep`."""
        self._pool, self._start_B = pool, start_B
        self._target, self._length_B, self._num_rows = target_B, length_B, len(target_B)
        self._programs = 0 if exact else PROGRAMS  # 0: no context is split

    def cache(self, layer: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The keys and values of a layer's pool, and the token of each row there."""
        return self._pool.keys[layer], self._pool.values[layer], self._target

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
            self._programs,
        )[None]


@dataclass(slots=True, frozen=True)
class Prompt:
    """Tokens to compute behind the first `before`, which all `regions` (their starts) hold already."""

    ids: np.ndarray
    before: int
    regions: list[int]
    adapter: int = NONE

    @property
    def rows(self) -> int:
        return len(self.ids) - self.before


class PrefillStep(_PoolStep):
    """Packed tokens of prompts; their keys and values are stored in one region or several."""

    def __init__(self, pool: KVPool, prompts: list[Prompt], *, exact: bool = False) -> None:
        self._pool, self._exact = pool, exact
        self._rows = np.array([prompt.rows for prompt in prompts])
        self._adapters = np.array([prompt.adapter for prompt in prompts], np.int32)
        self._before = np.array([prompt.before for prompt in prompts])
        self._ends, self._num_rows = self._before + self._rows, int(self._rows.sum())
        self._whole = not self._before.any()  # no token sees one that is not computed here
        self._regions = np.array([prompt.regions[0] for prompt in prompts])
        members = [len(prompt.regions) for prompt in prompts]
        targets = np.array([start + p.before for p in prompts for start in p.regions])
        stored = np.repeat(self._rows, members)
        firsts = np.cumsum(self._rows) - self._rows
        self._source = self._put(joined_ranges(np.repeat(firsts, members), stored))
        self._target = self._put(joined_ranges(targets, stored))

    def store(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        keys, values = self._pool.keys[layer], self._pool.values[layer]
        store_rows(key, value, keys, values, self._target, self._source)

    def attend(self, layer: int, call: AttentionCall) -> torch.Tensor:
        """Attend to the prompts' tokens up to each row, by the flash kernel where it can."""
        if self._exact:  # each row by itself, as in a decode step
            return self._row_by_row.attend(layer, call)
        query, key, value = (x[0].transpose(0, 1) for x in (call.query, call.key, call.value))
        if not self._whole:
            key = self._pool.keys[layer].index_select(0, self._seen)
            value = self._pool.values[layer].index_select(0, self._seen)
        flash = not call.needs_plain and can_use_flash(query, value)
        if flash and (self._whole or flash_aligns_ends(query.device)):
            bounds = self._row_bounds, self._row_bounds if self._whole else self._seen_bounds
            mixed, *_ = flash_attention(
                query, key, value, *bounds, scale=call.scale, window=call.window
            )
            return mixed[None]
        query = self._pad(query, self._rows, self._row_places)
        key, value = (self._pad(x, self._ends, self._seen_places) for x in (key, value))
        padded = AttentionCall(query, key, value, call.scale, call.window, call.softcap, call.sinks)
        # Under a causal mask, padding on the right never reaches a real row.
        mixed = causal_attention(padded) if self._whole else self._masked(padded)
        mixed = mixed.transpose(1, 2)
        return mixed.reshape(-1, *mixed.shape[2:])[self._row_places][None]

    def _masked(self, call: AttentionCall) -> torch.Tensor:
        """Attend where each prompt has tokens before its rows."""
        device = call.query.device
        key_T = torch.arange(call.key.shape[2], device=device)
        place_Q = torch.arange(call.query.shape[2], device=device)
        place_NQ1 = (self._put(self._before)[:, None] + place_Q)[:, :, None]
        seen_NQT = key_T <= place_NQ1
        if call.window is not None:
            seen_NQT &= key_T > place_NQ1 - call.window
        return plain_attention(
            call.query,
            call.key,
            call.value,
            seen_NQT[:, None],
            scale=call.scale,
            softcap=call.softcap,
            sink_H=call.sinks,
        )

    @property
    def adapter_R(self) -> torch.Tensor:
        """The number of each token's adapter."""
        return self._put(np.repeat(self._adapters, self._rows))

    @cached_property
    def _row_by_row(self) -> DecodeStep:
        starts = self._put(np.repeat(self._regions, self._rows))
        lengths = self._put(joined_ranges(self._before + 1, self._rows))
        return DecodeStep(self._pool, starts, starts, lengths, exact=True)

    @cached_property
    def _seen(self) -> torch.Tensor:
        return self._put(joined_ranges(self._regions, self._ends))

    @cached_property
    def _row_bounds(self) -> tuple[torch.Tensor, int]:
        return self._bounds(self._rows)

    @cached_property
    def _seen_bounds(self) -> tuple[torch.Tensor, int]:
        return self._bounds(self._ends)

    def _bounds(self, lengths: np.ndarray) -> tuple[torch.Tensor, int]:
        bounds = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        return self._put(bounds), int(lengths.max())

    @cached_property
    def _row_places(self) -> torch.Tensor:
        return self._places(self._rows)

    @cached_property
    def _seen_places(self) -> torch.Tensor:
        return self._places(self._ends)

    def _places(self, lengths: np.ndarray) -> torch.Tensor:
        """Where rows lie once each prompt is padded on the right to the longest."""
        return self._put(joined_ranges(np.arange(len(lengths)) * lengths.max(), lengths))

    def _pad(self, rows: torch.Tensor, lengths: np.ndarray, places: torch.Tensor) -> torch.Tensor:
        """[rows, heads, size] as [prompts, heads, longest, size]."""
        longest = int(lengths.max())
        if len(lengths) * longest > len(rows):
            padded = rows.new_zeros(len(lengths) * longest, *rows.shape[1:])
            padded[places] = rows
            rows = padded
        return rows.reshape(-1, longest, *rows.shape[1:]).transpose(1, 2)

    def _put(self, array: np.ndarray) -> torch.Tensor:
        return to_device(array, self._pool.keys.device)


def joined_ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Start, start + 1, ... of each length, one after another."""
    ends = np.cumsum(lengths)
    return np.arange(ends[-1]) + np.repeat(starts - (ends - lengths), lengths)
