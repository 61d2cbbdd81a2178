"""The forward passes of the CUDA runner: a decode step, which graphs capture, and a packed prefill.

Both store keys and values in the regions of `KVPool`. Without Triton, plain torch replaces the kernels.
"""

from __future__ import annotations

import numpy as np
import torch

from penstock.engine.transformers.cuda.regions import KVPool
from penstock.engine.transformers.cuda.row_tiles import Tiles
from penstock.engine.transformers.kv_attention import AttentionCall, causal_attention
from penstock.engine.transformers.sequences import Span

try:
    from penstock.engine.transformers.cuda.decode_kernels import (
        decode_attention,
        next_rows,
        rotate_store,
        sample_rows,
        store_rows,
    )
    from penstock.engine.transformers.cuda.row_kernels import project_and_store

    HAS_KERNELS = True
except ImportError:  # CUDA without Triton
    HAS_KERNELS = False
    from penstock.engine.transformers.cuda.decode_reference import (
        decode_attention,
        next_rows,
        rotate_store,
        sample_rows,
        store_rows,
    )
    from penstock.engine.transformers.cuda.row_reference import project_and_store

__all__ = ["HAS_KERNELS", "DecodeStep", "PrefillStep", "next_rows", "sample_rows"]


class DecodeStep:
    """One token per row: stored at the end of its region, attending to the region."""

    def __init__(
        self, pool: KVPool, start_B: torch.Tensor, target_B: torch.Tensor, length_B: torch.Tensor
    ) -> None:
        self._pool, self._start_B = pool, start_B
        self._target_B, self._length_B = target_B, length_B

    @classmethod
    def at(cls, pool: KVPool, start_B: torch.Tensor, position_B: torch.Tensor) -> DecodeStep:
        """Return the step that stores at these positions of the regions."""
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
        device = pool.keys.device
        self._pool, self._spans = pool, spans
        self._source = torch.from_numpy(source).to(device)
        self._target = torch.from_numpy(target).to(device)
        longest = max(span.length for span in spans)
        self._even = all(span.length == longest for span in spans)
        self._longest = longest
        rows = np.concatenate([i * longest + np.arange(s.length) for i, s in enumerate(spans)])
        self._padded_rows = torch.from_numpy(rows).to(device)

    def store(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        for pool, new in ((self._pool.keys, key), (self._pool.values, value)):
            pool[layer].index_copy_(0, self._target, new[0].transpose(0, 1)[self._source])

    def attend(self, layer: int, call: AttentionCall) -> torch.Tensor:
        """Attend as one right-padded batch: under a causal mask, padding never reaches a real row."""
        used = self._spans[-1].end
        query, key, value = (self._pad(x, used) for x in (call.query, call.key, call.value))
        padded = AttentionCall(query, key, value, call.scale, call.window, call.softcap, call.sinks)
        mixed = causal_attention(padded, slice(None)).transpose(1, 2)
        rows = mixed.reshape(-1, *mixed.shape[2:])[self._padded_rows]
        output = rows.new_zeros(1, call.query.shape[2], *rows.shape[1:])
        output[0, :used] = rows
        return output

    def _pad(self, x: torch.Tensor, used: int) -> torch.Tensor:
        """Return [1, heads, rows, size] as [sequences, heads, longest, size]."""
        rows = x[0, :, :used].transpose(0, 1)
        if not self._even:
            padded = rows.new_zeros(len(self._spans) * self._longest, *rows.shape[1:])
            padded[self._padded_rows] = rows
            rows = padded
        return rows.reshape(len(self._spans), self._longest, *rows.shape[1:]).transpose(1, 2)
