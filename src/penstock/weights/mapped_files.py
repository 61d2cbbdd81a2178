"""Weights as files that other processes of this machine can map.

A tensor that is a view of a shared mapping (as weights in shared memory are) is passed on by the name of
its file, with no copy; any other tensor is written to a file first. A folder of safetensors is read as it
is. Knows nothing of engines; the caller removes the files.
"""

from __future__ import annotations

import bisect
import mmap
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

FOLDER = "folder"  # the kind of a WeightHandle whose location is a folder of safetensors files
FileEntry = tuple[str, str, list[int], str, int]  # name, dtype, shape, file, offset
_ALIGN = 64


def share_weights(weights: dict[str, torch.Tensor], file: Path, *, copy: bool) -> list[FileEntry]:
    """Return where other processes can map each weight; write what they cannot map to `file`.

    `copy` writes all weights, for readers that see only the folder of `file`.
    """
    regions = [] if copy else shared_regions()
    entries: list[FileEntry] = []
    unmapped: list[tuple[torch.Tensor, int]] = []
    size = 0
    for name, tensor in weights.items():
        dtype, shape = str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
        found = _find(regions, tensor)
        if found is None:
            unmapped.append((tensor, size))
            found = (str(file), size)
            size += -(-tensor.numel() * tensor.element_size() // _ALIGN) * _ALIGN
        entries.append((name, dtype, shape, *found))
    if unmapped:
        _write(file, max(size, _ALIGN), unmapped)
    return entries


def read_shared(entries: Iterable[FileEntry]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights as views of private mappings: no copy, and a write does not reach the file."""
    maps: dict[str, mmap.mmap] = {}
    for name, dtype, shape, file, offset in entries:
        if file not in maps:
            with open(file, "rb") as opened:
                maps[file] = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
        yield name, _view(maps[file], offset, shape, getattr(torch, dtype))


def read_folder(folder: str | Path) -> dict[str, torch.Tensor]:
    """Return all weights of a safetensors folder, mapped."""
    from safetensors.torch import load_file

    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"no *.safetensors in {folder}")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


@dataclass(slots=True, frozen=True, order=True)
class SharedRegion:
    """An address range of this process that is mapped from a file and shared."""

    start: int
    end: int
    offset: int
    file: str


def shared_regions() -> list[SharedRegion]:
    """Return the files that this process has mapped as shared, by address; none without /proc."""
    try:
        lines = Path("/proc/self/maps").read_text("utf-8").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        addresses, rights, offset, _, inode, *name = line.split(maxsplit=5)
        if rights[3] != "s" or not name or not name[0].startswith("/"):
            continue
        if not _is_file(name[0], int(inode)):  # removed, or another file has its name now
            continue
        start, end = (int(address, 16) for address in addresses.split("-"))
        found.append(SharedRegion(start, end, int(offset, 16), name[0]))
    return sorted(found)


def _is_file(name: str, inode: int) -> bool:
    try:
        return os.stat(name).st_ino == inode
    except OSError:
        return False


def _find(regions: list[SharedRegion], tensor: torch.Tensor) -> tuple[str, int] | None:
    if not tensor.is_cpu or not tensor.is_contiguous() or not tensor.numel():
        return None
    first = tensor.data_ptr()
    at = bisect.bisect_right(regions, first, key=lambda region: region.start) - 1
    if at < 0 or first + tensor.numel() * tensor.element_size() > regions[at].end:
        return None
    return regions[at].file, first - regions[at].start + regions[at].offset


def _write(file: Path, size: int, unmapped: list[tuple[torch.Tensor, int]]) -> None:
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.ftruncate(descriptor, size)
        mapping = mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)
    for tensor, offset in unmapped:
        _view(mapping, offset, list(tensor.shape), tensor.dtype).copy_(tensor)


def _view(mapping: mmap.mmap, offset: int, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    count = 1
    for extent in shape:
        count *= extent
    if not count:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(mapping, dtype=dtype, count=count, offset=offset).view(shape)
