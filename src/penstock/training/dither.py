"""Dither: start a master anywhere inside the rounding cell of its weight, not at its centre; and rounding at random.

A master that equals its bfloat16 weight must move half a grid step before the weight changes: small
updates are lost for many steps. Spread over the cell, a share (update / grid step) of the masters
crosses a border at once, so the weights follow in expectation from the first update on, while
rounding the masters still gives the checkpoint, bit for bit. The place in the cell is a hash of
seed, name and index: equal on any device, for any number of ranks, and after a resume.

The same holds for other short numbers, those of float16 or dequantised checkpoints. Some of them lie on
a border, half-way between two weights, where the smallest update carries all of them across at once.
Only long numbers are spread over their cells by themselves.

`round_at_random_` rounds a sum of many small changes, such as a moment of AdamW, so that they add up in expectation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

HALF_FORMATS = (torch.bfloat16, torch.float16)
_SIGNIFICAND_BITS = {torch.bfloat16: 8, torch.float16: 11}
_SMALLEST = 2.0**-100  # below it any update arrives, and float32 may be flushed to zero
_LONG_BITS = 0xFF  # of a float32 that needs more than 16 significant bits, at least one is set
_CHUNK = 2**24  # elements at a time, which bounds temporary memory
_ODD = -0x61C88647


@dataclass(frozen=True, slots=True)
class Place:
    """Which part of a tensor a rank has: every `row_step`-th row from `first_row`, the columns from `first_column`."""

    first_row: int = 0
    row_step: int = 1
    first_column: int = 0


WHOLE = Place()


def dither_(exact: Tensor, dtype: torch.dtype, key: int, place: Place = WHOLE) -> None:
    """Move each float32 element of at most 16 significant bits to its place inside its rounding cell.

    Longer ones keep their digits. `exact` holds the part of a tensor that `place` says.
    """
    for chunk_RC, bits_RC in _with_random_bits(exact, key, place):
        chunk_RC.copy_(_inside_cells(chunk_RC, dtype, bits_RC))


def round_at_random_(exact: Tensor, key: Tensor, place: Place = WHOLE) -> None:
    """Round float32 numbers to numbers of bfloat16: away from zero with the share of the way that they have gone there."""
    for chunk_RC, bits_RC in _with_random_bits(exact, key, place):
        number_RC = chunk_RC.view(torch.int32)
        number_RC += bits_RC & 0xFFFF
        number_RC &= ~0xFFFF


def step_keys(keys: Tensor, steps: Tensor) -> Tensor:
    """The keys of parameters in the step that each of them is at."""
    return _mix(keys + steps.to(torch.int32) * _ODD)


def _with_random_bits(
    exact: Tensor, key: int | Tensor, place: Place
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield a tensor in chunks of rows, each with 32 random bits for every element."""
    if not exact.numel():
        return
    rows_RC = exact.view(len(exact), -1) if exact.ndim else exact.view(1, 1)
    per_chunk = max(_CHUNK // rows_RC.shape[1], 1)
    for start in range(0, len(rows_RC), per_chunk):
        chunk_RC = rows_RC[start : start + per_chunk]
        row_R = torch.arange(len(chunk_RC), dtype=torch.int32, device=exact.device)
        row_R = (row_R + start) * place.row_step + place.first_row
        column_C = torch.arange(chunk_RC.shape[1], dtype=torch.int32, device=exact.device)
        yield chunk_RC, _random_bits(row_R, column_C + place.first_column, key)


def dither_key(seed: int, name: str) -> int:
    """The key of a parameter's offsets."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:4], "little", signed=True)


def _inside_cells(exact_RC: Tensor, dtype: torch.dtype, bits_RC: Tensor) -> Tensor:
    """Centre + share * (half the way to the neighbour), exact in float32.

    Half of the offsets lie on either side of the centre. At a power of two, where the cell is
    shorter towards zero, this makes the expected change right in both directions.
    """
    weight_RC = exact_RC.to(dtype)
    magnitude_RC = weight_RC.view(torch.int16) & 0x7FFF
    centre_RC = magnitude_RC.view(dtype).float()
    above_RC = (magnitude_RC + 1).view(dtype).float() - centre_RC
    below_RC = centre_RC - (magnitude_RC - 1).view(dtype).float()
    share_bits = 23 - _SIGNIFICAND_BITS[dtype]  # so that the sum needs at most 24 bits
    odd_RC = (bits_RC >> (31 - share_bits)) | 1  # never at the centre, never on a border
    half_RC = torch.where(odd_RC > 0, above_RC, below_RC) * 0.5
    moved_RC = centre_RC + odd_RC * 2.0**-share_bits * half_RC
    short_RC = ((exact_RC.view(torch.int32) & _LONG_BITS) == 0) & (centre_RC >= _SMALLEST)
    short_RC &= above_RC.isfinite()  # the largest number has no neighbour
    return torch.where(short_RC, moved_RC.copysign(exact_RC), exact_RC)


def _random_bits(row_R: Tensor, column_C: Tensor, key: int | Tensor) -> Tensor:
    """32 random bits for each element: a hash of its row, its column and the key."""
    row_key_R = _mix(row_R ^ key)
    return _mix(row_key_R[:, None] + column_C * _ODD)


def _mix(bits: Tensor) -> Tensor:
    """A one-to-one mix of int32 numbers, in place: shifts and odd factors, wrapping."""
    bits ^= (bits >> 16) & 0xFFFF
    bits *= 0x7FEB352D
    bits ^= (bits >> 15) & 0x1FFFF
    bits *= 0x846CA68B - 2**32
    bits ^= (bits >> 16) & 0xFFFF
    return bits
