"""One uniform number per (seed, token index), the same on every device and in every batch.

A counter-based stream: splitmix64's finaliser over seed and index. The index is that of the token in
the whole response, so a rollout that goes on from its partial tokens keeps its stream.
"""

from __future__ import annotations

import numpy as np
import torch

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_BITS = 23  # so that u * total < total in float32


def stream_key(seed: int) -> int:
    """The 64-bit key of a request's stream, from any Python integer."""
    return _finalise_int(seed & 0xFFFFFFFFFFFFFFFF)


def uniforms(keys_N: np.ndarray, indices_N: np.ndarray) -> np.ndarray:
    """float32 in [0, 1), one per row; `keys_N` is uint64."""
    with np.errstate(over="ignore"):
        x = keys_N + (indices_N.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(_MIX_1)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(_MIX_2)
        x = x ^ (x >> np.uint64(31))
    return (x >> np.uint64(64 - _BITS)).astype(np.float32) * np.float32(2.0**-_BITS)


def uniforms_torch(keys_N: torch.Tensor, indices_N: torch.Tensor) -> torch.Tensor:
    """The same numbers from int64 tensors (their bits are those of the uint64 keys)."""
    x = keys_N + (indices_N.to(torch.int64) + 1) * _signed(_GOLDEN)
    x = (x ^ _shift_right(x, 30)) * _signed(_MIX_1)
    x = (x ^ _shift_right(x, 27)) * _signed(_MIX_2)
    x = x ^ _shift_right(x, 31)
    return _shift_right(x, 64 - _BITS).to(torch.float32) * 2.0**-_BITS


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _finalise_int(x: int) -> int:
    mask = 0xFFFFFFFFFFFFFFFF
    x = (x + _GOLDEN) & mask
    x = ((x ^ (x >> 30)) * _MIX_1) & mask
    x = ((x ^ (x >> 27)) * _MIX_2) & mask
    return x ^ (x >> 31)
