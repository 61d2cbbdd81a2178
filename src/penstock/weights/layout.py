"""Where the tensors of a model lie in one piece of memory, and the tensors as views of it.

The same layout serves a file in the host's memory and memory of a GPU. An entry is made of plain strings,
numbers and lists, so that any message can carry it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

_ALIGN = 256
Entry = Sequence[Any]  # name, dtype, shape, offset


def layout_of(weights: Iterable[tuple[str, torch.Tensor]]) -> tuple[list[Entry], int]:
    """The entry of each tensor, and the size of the whole in bytes."""
    entries: list[Entry] = []
    size = 0
    for name, tensor in weights:
        entries.append((name, dtype_name(tensor), tuple(tensor.shape), size))
        size += -(-tensor.numel() * tensor.element_size() // _ALIGN) * _ALIGN
    return entries, max(size, _ALIGN)


def dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def end_of(entry: Entry) -> int:
    """The first byte after a tensor."""
    _, dtype, shape, offset = entry
    return int(offset + math.prod(shape) * getattr(torch, dtype).itemsize)


def views(octets: torch.Tensor, entries: Iterable[Entry]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that lie in `octets`, with no copy."""
    for entry in entries:
        name, dtype, shape, offset = entry
        yield name, octets[offset : end_of(entry)].view(getattr(torch, dtype)).view(tuple(shape))
