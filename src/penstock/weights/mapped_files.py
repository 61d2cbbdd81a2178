"""Weights in files that processes of other programs on this machine read.

Published weights lie in a file already (`shared_memory.py`), which is named with no copy; others are written
to a file first. A folder of safetensors is read as it is. Knows nothing of engines; the caller removes what
was written.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from penstock.types import WeightHandle
from penstock.weights.buffer import HEADER_BYTES
from penstock.weights.layout import Entry, layout_of, views
from penstock.weights.shared_memory import SHARED_MEMORY

FOLDER = "folder"  # the kind of a WeightHandle whose location is a folder of safetensors files


def share_weights(
    source: WeightHandle, weights: dict[str, torch.Tensor], file: Path, *, copy: bool
) -> tuple[str, list[Entry]]:
    """The file that holds the weights of `source`, and their entries; written to `file` if none does.

    `copy` always writes `file`, for readers that see only its folder.
    """
    if source.kind == SHARED_MEMORY and source.location["device"] is None and not copy:
        published = source.location["tensors"]
        return source.location["path"], [
            (name, dtype, shape, HEADER_BYTES + offset) for name, dtype, shape, offset in published
        ]
    entries, size = layout_of(weights.items())
    with open(os.open(file, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600), "r+b") as opened:
        opened.truncate(size)
        octets = torch.frombuffer(mmap.mmap(opened.fileno(), size), dtype=torch.uint8)
    for name, view in views(octets, entries):
        view.copy_(weights[name])
    return str(file), entries


def read_shared(file: str, entries: Iterable[Entry]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights as views of a private mapping: no copy, and a write does not reach the file."""
    with open(file, "rb") as opened:
        mapping = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
    return views(torch.frombuffer(mapping, dtype=torch.uint8), entries)


def read_folder(folder: str | Path) -> dict[str, torch.Tensor]:
    """All weights of a safetensors folder, mapped."""
    from safetensors.torch import load_file

    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"no *.safetensors in {folder}")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}
