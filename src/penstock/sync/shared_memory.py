"""Weights handed over between processes of one machine, through two memory-mapped files. Layer 4.

Publishing writes one of two files (memory-backed where the system has /dev/shm) while the other
stays readable; fetching maps the file and yields tensors that are views of it, with no copy. The
folder belongs to the driver, which removes it; folders of drivers that died are swept at start.
"""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from penstock.errors import RunError
from penstock.types import WeightHandle

_PREFIX = "penstock-weights-"
_ALIGN = 64


def make_folder() -> Path:
    """A new folder for one run's weights, named after this process; sweeps those of dead ones."""
    root = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())
    sweep_stale(root)
    folder = root / f"{_PREFIX}{os.getpid()}-{uuid.uuid4().hex[:8]}"
    folder.mkdir(mode=0o700)
    return folder


def sweep_stale(root: Path) -> None:
    """Remove weight folders whose owner is no longer alive (a killed driver cannot clean up)."""
    for folder in root.glob(f"{_PREFIX}*"):
        owner = folder.name.removeprefix(_PREFIX).split("-")[0]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists() and Path("/proc").exists():
            shutil.rmtree(folder, ignore_errors=True)


class SharedMemorySync:
    """One side, consumer's or engine's; both are given the same folder."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._maps: dict[str, mmap.mmap] = {}

    def publish(
        self, version: int, digest: str, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> WeightHandle:
        tensors = [(name, tensor.detach()) for name, tensor in weights]
        entries, size = [], 0
        for name, tensor in tensors:
            nbytes = tensor.numel() * tensor.element_size()
            entries.append(
                (name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), size)
            )
            size += -(-nbytes // _ALIGN) * _ALIGN
        path = self._folder / f"side-{version % 2}"
        mapping = self._map(path, max(size, _ALIGN), create=True)
        for (_, _, shape, offset), (_, tensor) in zip(entries, tensors, strict=True):
            _view(mapping, offset, shape, tensor.dtype).copy_(tensor)
        location = {"path": str(path), "size": max(size, _ALIGN), "tensors": entries}
        return WeightHandle(version=version, digest=digest, kind="shared_memory", location=location)

    def fetch(self, handle: WeightHandle) -> Iterator[tuple[str, torch.Tensor]]:
        path = Path(handle.location["path"])
        if not path.exists():
            raise RunError(f"weights of version {handle.version} are gone: no file {path.name}")
        mapping = self._map(path, handle.location["size"], create=False)
        for name, dtype, shape, offset in handle.location["tensors"]:
            yield name, _view(mapping, offset, shape, getattr(torch, dtype))

    def _map(self, path: Path, size: int, *, create: bool) -> mmap.mmap:
        """The standing mapping of a file; pages are touched once, not at every publication."""
        standing = self._maps.get(path.name)
        if standing is not None and len(standing) == size:
            return standing
        flags = os.O_RDWR | (os.O_CREAT if create else 0)
        descriptor = os.open(path, flags, 0o600)
        try:
            if create:
                os.ftruncate(descriptor, size)
            self._maps[path.name] = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        return self._maps[path.name]

    def close(self) -> None:
        self._maps.clear()  # views that are still alive keep their own reference to the mapping


def _view(
    mapping: mmap.mmap, offset: int, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    count = 1
    for extent in shape:
        count *= extent
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(mapping, dtype=dtype, count=count, offset=offset).view(shape)
