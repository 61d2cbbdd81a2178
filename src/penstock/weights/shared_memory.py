"""Weights handed over between processes of one machine, through memory they share.

It is the host's (memory-mapped files) or, on a GPU, the device's (CUDA IPC). Publishing fills a side (`buffer.py`) that nobody reads; two of them alternate, and a reader that is slow
costs a third. Fetching yields tensors that are views of the side, with no copy. `announce` gives the
handle out before the bytes are there, so that engines read the first while the last are written.
The folder is locked by those who use it; folders that nobody uses are swept at the next start.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from penstock.types import WeightHandle
from penstock.weights.buffer import CAN_WAIT_FOR_BYTES, ReadSide, Standing, WrittenSide

NOTE_BYTES = 8 * 2**20  # readers are woken after so many further bytes
DEVICE_NOTE_BYTES = 256 * 2**20  # the same on a GPU, which is waited for each time
_PREFIX = "penstock-weights-"
_ALIGN = 64
Entry = tuple[str, str, tuple[int, ...], int]  # name, dtype, shape, offset
Layout = tuple[list[Entry], int]


class Folder:
    """A folder for weights, in memory where the system has /dev/shm; in use while this lives."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = _locked(path)

    @classmethod
    def new(cls) -> Folder:
        """Of this run alone; those that nobody uses any more are removed."""
        root = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())
        sweep_stale(root)
        return cls(root / f"{_PREFIX}{uuid.uuid4().hex[:12]}")

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _locked(path: Path) -> int:
    """The folder, made where there is none; again where it is swept before it is locked."""
    while True:
        path.mkdir(mode=0o700, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            folder = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            fcntl.flock(folder, fcntl.LOCK_SH)
            if path.exists():
                return folder
            os.close(folder)


def sweep_stale(root: Path) -> None:
    """Remove weight folders that nobody has locked: a killed process cannot clean up."""
    for path in root.glob(f"{_PREFIX}*"):
        try:
            folder = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            continue  # another's, or removed meanwhile
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        except BlockingIOError:
            pass  # in use
        finally:
            os.close(folder)


class SharedMemorySync:
    """One side, consumer's or engine's. Only the consumer's writes into the folder."""

    def __init__(self, folder: str | Path = "", *, node: str = "", on_device: bool = False) -> None:
        """`node` says where the folder is, for who passes the weights on to other machines.

        `on_device`: publish in the memory of the GPU on which the weights are.
        """
        self._folder, self._node, self._on_device = Path(folder), node, on_device
        self._device = torch.device("cpu")  # where it publishes
        self._sides: list[WrittenSide] = []
        self._layout: Layout | None = None
        self._announced: tuple[WeightHandle, WrittenSide] | None = None
        self._standing = Standing()

    # ---- the consumer's side

    def announce(self, version: int, digest: str) -> WeightHandle | None:
        """The handle of what `publish` writes next; None: its layout is not known yet."""
        if self._layout is None or not CAN_WAIT_FOR_BYTES:
            return None
        self._give_up_announced()
        entries, size = self._layout
        side = self.take_side(size)
        handle = self._handle(version, digest, side, entries, size)
        self._announced = (handle, side)
        return handle

    def publish(
        self, version: int, digest: str, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> WeightHandle:
        if self._announced is not None:
            handle, side = self._announced
            if (handle.version, handle.digest) == (version, digest):
                try:
                    self._write(side, handle.location["tensors"], weights)
                finally:
                    self._give_up_announced()
                return handle
            self._give_up_announced()
        tensors = [(name, tensor.detach()) for name, tensor in weights]
        entries, size = self._layout = layout_of(tensors)
        if self._on_device and tensors:
            self._device = tensors[0][1].device
        side = self.take_side(size)
        try:
            self._write(side, entries, tensors)
        finally:
            side.give_up()
        return self._handle(version, digest, side, entries, size)

    def _write(
        self,
        side: WrittenSide,
        entries: list[Entry],
        weights: Iterable[tuple[str, torch.Tensor]],
    ) -> None:
        noted = end = 0
        step = DEVICE_NOTE_BYTES if side.bytes.is_cuda else NOTE_BYTES
        for (name, dtype, shape, offset), (given, tensor) in zip(entries, weights, strict=True):
            said = (given, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
            assert said == (name, dtype, shape), f"got {said}, announced was {(name, dtype, shape)}"
            end = offset + tensor.numel() * tensor.element_size()
            if end > offset:
                side.bytes[offset:end].view(tensor.dtype).view(shape).copy_(tensor.detach())
            if end - noted >= step:
                side.note(noted := end)
        side.note(len(side.bytes))

    def take_side(self, size: int) -> WrittenSide:
        """One that nobody reads and that is not the newest whole one; further ones are removed."""
        if not self._sides:
            self._sides = [WrittenSide(path) for path in sorted(self._folder.glob("side-*"))]
        number = max((side.number for side in self._sides), default=0) + 1
        newest = max((side.number for side in self._sides if side.is_whole), default=0)
        older = [side for side in self._sides if side.number != newest]
        taken = next((side for side in older if side.begin(number, size, self._device)), None)
        self._sides = [
            side for side in self._sides if side not in older or side is taken or not side.remove()
        ]
        if taken is None:
            names = (self._folder / f"side-{n}" for n in itertools.count())
            taken = WrittenSide(next(name for name in names if not name.exists()))
            began = taken.begin(number, size, self._device)
            assert began, "a new file has no reader"
            self._sides.append(taken)
        return taken

    def _handle(
        self, version: int, digest: str, side: WrittenSide, entries: list[Entry], size: int
    ) -> WeightHandle:
        location = location_of(side, entries, size, self._node)
        return WeightHandle(version=version, digest=digest, kind="shared_memory", location=location)

    def _give_up_announced(self) -> None:
        if self._announced is not None:
            self._announced[1].give_up()
            self._announced = None

    # ---- an engine's side

    def fetch(self, handle: WeightHandle) -> Iterator[tuple[str, torch.Tensor]]:
        where = handle.location
        side = self.read_side(handle)
        for name, dtype_name, shape, offset in where["tensors"]:
            dtype = getattr(torch, dtype_name)
            tensor = side.tensor(offset, shape, dtype)
            side.wait_for(offset + tensor.numel() * tensor.element_size())
            yield name, tensor

    def read_side(self, handle: WeightHandle) -> ReadSide:
        where = handle.location
        return ReadSide(
            Path(where["path"]), where["number"], where["size"], self._standing, where["device"]
        )

    def close(self) -> None:
        self._give_up_announced()
        for side in self._sides:
            side.close()
        self._sides.clear()
        self._standing.clear()  # views that are still alive keep their own reference


def location_of(side: WrittenSide, entries: list[Entry], size: int, node: str) -> dict:
    return {
        "node": node,
        "path": str(side.path),
        "number": side.number,
        "size": size,
        "device": side.place,
        "tensors": entries,
    }


def layout_of(tensors: list[tuple[str, torch.Tensor]]) -> Layout:
    """Where each tensor goes, and the size of the whole."""
    entries: list[Entry] = []
    size = 0
    for name, tensor in tensors:
        dtype = str(tensor.dtype).removeprefix("torch.")
        entries.append((name, dtype, tuple(tensor.shape), size))
        size += -(-tensor.numel() * tensor.element_size() // _ALIGN) * _ALIGN
    return entries, max(size, _ALIGN)
