"""The difference between two versions of weights, without loss: where bits changed, and by how much.

Between two updates few 16-bit weights change their bits, and most of those by one unit in the last
place. A delta of a piece of memory holds, for every 16-bit word that changed, the gap to the one before
(Huffman-coded bytes), the sign of the change (a bit) and its size (mostly one: compressed away). Knows
no tensors: padding and float32 are words like others; a piece of which much changed is better sent
whole (`encode` returns None).
"""

from __future__ import annotations

import struct
import zlib

import numpy as np

_HEADER = struct.Struct("<III")  # bytes of the gaps, of the signs, of the sizes
_RUN = 255  # a byte that stands for so many units and is continued
_MOST_SHARE = 0.3  # of the words: above it a delta is hardly smaller, and slow to make


def encode(base: np.ndarray, new: np.ndarray) -> bytes | None:
    """The delta from one array of bytes to another of its size; None if the whole is smaller."""
    changed, change = _changes(base, new)
    if len(changed) > _MOST_SHARE * len(new) / 2:
        return None
    gaps = _compressed(_bytes_of(np.diff(changed, prepend=-1) - 1), zlib.Z_HUFFMAN_ONLY)
    signs = np.packbits(change > 0).tobytes()
    sizes = _compressed(_bytes_of(np.abs(change) - 1), zlib.Z_DEFAULT_STRATEGY)
    delta = _HEADER.pack(len(gaps), len(signs), len(sizes)) + gaps + signs + sizes
    return delta if len(delta) < len(new) else None


def _changes(base: np.ndarray, new: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The 16-bit words that differ, and by how much; four words at a time are compared first."""
    rest = len(new) // 8 * 8
    old_fours, new_fours = base[:rest].view(np.uint64), new[:rest].view(np.uint64)
    fours = np.flatnonzero(old_fours != new_fours)
    old_words, new_words = old_fours[fours].view(np.uint16), new_fours[fours].view(np.uint16)
    differs = np.flatnonzero(old_words != new_words)
    places = fours[differs >> 2] * 4 + (differs & 3)
    old_words, new_words = old_words[differs], new_words[differs]
    if rest < len(new):
        old_rest, new_rest = base[rest:].view(np.uint16), new[rest:].view(np.uint16)
        differs = np.flatnonzero(old_rest != new_rest)
        places = np.append(places, rest // 2 + differs)
        old_words = np.append(old_words, old_rest[differs])
        new_words = np.append(new_words, new_rest[differs])
    return places, (new_words - old_words).view(np.int16).astype(np.int32)


def apply(delta: bytes, words: np.ndarray) -> None:
    """Change an array of 16-bit words, a copy of the base, into the new words."""
    num_gaps, num_signs, num_sizes = _HEADER.unpack_from(delta)
    start, rest = _HEADER.size, _HEADER.size + num_gaps
    gaps = _numbers_of(zlib.decompress(delta[start:rest]))
    signs = np.frombuffer(delta, np.uint8, num_signs, rest)
    rest += num_signs
    sizes = _numbers_of(zlib.decompress(delta[rest : rest + num_sizes])) + 1
    places = np.cumsum(gaps + 1) - 1
    change = np.where(np.unpackbits(signs, count=len(places)), sizes, -sizes)
    words[places] += change.astype(np.int16).view(np.uint16)


def _compressed(octets: np.ndarray, strategy: int) -> bytes:
    compressor = zlib.compressobj(level=1, strategy=strategy)
    return compressor.compress(octets.data) + compressor.flush()


def _bytes_of(numbers: np.ndarray) -> np.ndarray:
    """Numbers as bytes: a 255 for each 255 in the number, then what is left."""
    large = np.flatnonzero(numbers >= _RUN)
    if not len(large):
        return numbers.astype(np.uint8)
    runs, lasts = np.zeros(len(numbers), np.int64), numbers.astype(np.uint8)
    runs[large], lasts[large] = numbers[large] // _RUN, numbers[large] % _RUN
    octets = np.full(int(runs.sum()) + len(numbers), _RUN, np.uint8)
    octets[np.cumsum(runs + 1) - 1] = lasts
    return octets


def _numbers_of(data: bytes) -> np.ndarray:
    octets = np.frombuffer(data, np.uint8)
    lasts = np.flatnonzero(octets != _RUN)
    runs = np.diff(lasts, prepend=-1) - 1
    return octets[lasts] + _RUN * runs
