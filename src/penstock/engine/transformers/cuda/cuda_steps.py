"""The forward passes of the CUDA runner: a decode step, which graphs capture, and a packed prefill.

Both store keys and values in the regions of `KVPool`. Without Triton, plain torch replaces the kernels.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch

from penstock.engine.transformers.cuda.regions import KVPool
from penstock.engine.transformers.sequences import Span
from penstock.model.attention import AttentionCall, can_use_flash, causal_attention, flash_attention
from penstock.model.kernels.row_tiles import Tiles
from penstock.model.transfer import to_device

try:
    from penstock.model.kernels.decode_kernels import (
        decode_attention,
        next_rows,
        rotate_store,
        sample_rows,
        store_rows,
    )
    from penstock.model.kernels.row_kernels import project_and_store

    HAS_KERNELS = True
except ImportError:  # CUDA without Triton
    HAS_KERNELS = False
    from penstock.model.kernels.decode_reference import (
        decode_attention,
        next_rows,
        rotate_store,
        sample_rows,
        store_rows,
    )
    from penstock.model.kernels.row_reference import project_and_store

__all__ = ["HAS_KERNELS", "DecodeStep", "PrefillStep", "joined_ranges", "next_rows", "sample_rows"]


class DecodeStep:
    """One token per row: stored at the end of its region, attending to the region."""

    def __init__(
        self, pool: KVPool, start_B: torch.Tensor, target_B: torch.Tensor, length_B: torch.Tensor
    ) -> None:
        self._pool, self._start_B = pool, start_B
        self._target_B, self._length_B = target_B, length_B

    @classmethod
    def at(cls, pool: KVPool, start_B: torch.Tensor, position_B: torch.Tensor) -> DecodeStep:
        """The step that stores at these positions of the regions."""
        return cls(pool, start_B, start_B + position_B, position_B + 1)

    def store(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        pool = self._pool
        store_rows(key, value, pool.keys[layer], pool.values[layer], self._target_B)

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

    def turn(
        self, layer: int, product_BN: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """Turn a product of q, k and v by `turn` (cos, sin); store keys and values, return queries."""
        keys, values = self._pool.keys[layer], self._pool.values[layer]
        return rotate_store(product_BN, *turn, keys, values, self._target_B)

    def project(
        self,
        layer: int,
        x_BD: torch.Tensor,
        norm: tuple[torch.Tensor, float],
        joined: tuple[torch.Tensor, torch.Tensor | None],
        turn: tuple[torch.Tensor, torch.Tensor],
        tiles: Tiles,
    ) -> torch.Tensor:
        """Compute norm, product and `turn` in one kernel."""
        keys, values = self._pool.keys[layer], self._pool.values[layer]
        return project_and_store(x_BD, norm, *joined, turn, keys, values, self._target_B, tiles)

    def mix(
        self, layer: int, query_BHD: torch.Tensor, scale: float, window: int | None
    ) -> torch.Tensor:
        """Attend from turned queries."""
        keys, values = self._pool.keys[layer], self._pool.values[layer]
        return decode_attention(
            query_BHD, keys, values, self._start_B, self._length_B, scale, window
        )


class PrefillStep:
    """Packed prompts; each row of keys and values is stored in one region or several."""

    def __init__(
        self, pool: KVPool, spans: list[Span], source: np.ndarray, target: np.ndarray
    ) -> None:
        self._pool, self._lengths = pool, np.array([span.length for span in spans])
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

    def mix(
        self, layer: int, joint_RC: torch.Tensor, scale: float, window: int | None
    ) -> torch.Tensor:
        """Store keys and values and attend, from rows that have turned queries, turned keys and values."""
        heads, size = self._pool.keys.shape[2:]
        rows_HRD = joint_RC.view(len(joint_RC), -1, size).transpose(0, 1)
        query, key, value = rows_HRD[None].tensor_split((-2 * heads, -heads), dim=1)
        self.store(layer, key, value)
        call = AttentionCall(query, key, value, scale, window, None, None)
        return self.attend(layer, call)[0]

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


def joined_ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Start, start + 1, ... of each length, one after another."""
    ends = np.cumsum(lengths)
    return np.arange(ends[-1]) + np.repeat(starts - (ends - lengths), lengths)
