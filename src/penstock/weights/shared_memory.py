"""Weights that processes of one machine hand over through memory they share.

The memory is the host's (memory-mapped files) or, on a GPU, the device's (CUDA IPC). Publishing fills a
weight buffer that nobody reads; two buffers alternate, and a slow reader costs a third. Fetching yields
tensors that are views of the buffer, with no copy. `announce` gives the handle out before the bytes are
written, so that engines read the first bytes while the last are written.

A buffer is one memory-mapped file that holds one publication, and its locks. It is written only while
nobody reads it: tensors read from a buffer hold a shared lock as long as any of them lives, and the kernel
releases the lock when their process dies. Bytes not yet written are locked too: a reader sleeps in the kernel
until they are written and wakes with an error if the writer dies. Nothing polls and no reader sees a
half-written tensor. The bytes may lie in GPU memory instead (`device_memory.py`); the file then has only the
header and the locks. Where each tensor lies is a list of entries, plain values that any message can carry.
"""

from __future__ import annotations

import fcntl
import itertools
import math
import mmap
import os
import struct
import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from penstock.errors import RunError, WeightsGone
from penstock.types import WeightHandle
from penstock.weights.device_memory import (
    DeviceHandle,
    DeviceMemory,
    OpenedMemory,
    exported_memory,
)

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


HEADER_BYTES = 4096  # a page, so that tensors keep their alignment
_HEADER = struct.Struct("=QQQ")  # publication, bytes of weights, bytes written so far
_WRITTEN = 2  # its place among the numbers of the header
_HOST = torch.device("cpu")


class BufferWriter:
    """The only writer of a buffer: `begin`, fill `bytes`, `mark_written` as far as they are final."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        header = os.pread(self._file, _HEADER.size, 0)
        self.number, size, written = (
            _HEADER.unpack(header) if len(header) == _HEADER.size else (0, 0, 0)
        )
        # false if the bytes were on the GPU of a dead writer
        in_file = os.fstat(self._file).st_size == HEADER_BYTES + size
        self.is_complete = self.number > 0 and size == written and in_file
        self._size, self._device = 0, _HOST
        self._map: mmap.mmap | None = None
        self.bytes = torch.empty(0, dtype=torch.uint8)
        self.device_handle: DeviceHandle | None = None  # names the bytes if they are on a GPU

    def begin(self, number: int, size: int, device: torch.device = _HOST) -> bool:
        """Take the buffer for publication `number`; return False if somebody still reads it."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        if self._map is None or (self._size, self._device) != (size, device):
            self.bytes, self._map = torch.empty(0, dtype=torch.uint8), None
            self._allocate(size, device)
        assert self._map is not None
        self._lock_bytes(fcntl.F_WRLCK, 0, size)
        self.number, self.is_complete = number, False
        _HEADER.pack_into(self._map, 0, number, size, 0)
        fcntl.flock(self._file, fcntl.LOCK_UN)  # readers may open this publication from now on
        return True

    def _allocate(self, size: int, device: torch.device) -> None:
        self._size = self.number = 0
        self._device, self.device_handle = device, None
        # a writer that dies from here on leaves no publication
        os.pwrite(self._file, bytes(_HEADER.size), 0)
        in_file = HEADER_BYTES + (size if device == _HOST else 0)
        try:
            self._reserve(in_file)
            self._map = mmap.mmap(self._file, in_file)
            if device == _HOST:
                self.bytes = torch.frombuffer(self._map, dtype=torch.uint8, offset=HEADER_BYTES)
            else:
                memory = DeviceMemory(size, device)
                self.bytes, self.device_handle = memory.tensor(size)[0], memory.export()
        except RunError:
            self._map = None
            fcntl.flock(self._file, fcntl.LOCK_UN)
            raise
        self._size = size

    def _reserve(self, size: int) -> None:
        """Allocate the file's memory now: a later write without memory would kill the writer."""
        try:
            os.ftruncate(self._file, size)
            os.posix_fallocate(self._file, 0, size)
        except OSError as error:
            os.ftruncate(self._file, 0)
            raise RunError(
                f"weights: no room for {size / 1e9:.2f} GB in {self.path.parent}: {error.strerror}"
            ) from error

    def mark_written(self, written: int) -> None:
        """Declare the first `written` bytes final and wake the readers that wait for them."""
        assert self._map is not None
        if self.bytes.is_cuda:
            torch.cuda.current_stream(self.bytes.device).synchronize()
        _numbers(self._map)[_WRITTEN] = written
        self.is_complete = written == self._size
        self._lock_bytes(fcntl.F_UNLCK, 0, written)

    def abandon(self) -> None:
        """Wake the readers of an incomplete publication with an error."""
        if not self.is_complete:
            self._lock_bytes(fcntl.F_UNLCK, 0, max(self._size, 1))

    def remove(self) -> bool:
        """Free the memory; return False if somebody still reads it."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        self.path.unlink(missing_ok=True)
        self.close()
        return True

    def close(self) -> None:
        """Let go of the file; readers keep what was written."""
        self.bytes, self._map = torch.empty(0, dtype=torch.uint8), None
        self.device_handle = None
        os.close(self._file)

    def _lock_bytes(self, kind: int, start: int, length: int) -> None:
        if length:
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, _range(kind, start, length))


class ReaderCache:
    """What a reader keeps open from one publication to the next: opening is slow, and pages fault once."""

    def __init__(self) -> None:
        self._maps: dict[str, mmap.mmap] = {}
        self._memories: dict[Path, tuple[DeviceHandle, OpenedMemory]] = {}

    def map(self, path: Path, name: str, size: int) -> mmap.mmap:
        """The mapping of this file; map it again if the file or its size has changed.

        The mapping opens the file by itself, because it would keep a lock taken on the same descriptor.
        """
        file = _open(path, name)
        try:
            inode = os.fstat(file)
            key = f"{inode.st_dev}-{inode.st_ino}-{size}"
            if key not in self._maps:
                while len(self._maps) > 3:
                    del self._maps[next(iter(self._maps))]
                self._maps[key] = mmap.mmap(file, size, access=mmap.ACCESS_READ)
            return self._maps[key]
        finally:
            os.close(file)

    def memory(self, path: Path, handle: DeviceHandle) -> OpenedMemory | DeviceMemory:
        """The GPU memory of the buffer at `path`; a new handle there closes the previous memory."""
        if (exported := exported_memory(handle)) is not None:
            return exported
        known = self._memories.get(path)
        if known is None or known[0] != handle:
            self._memories.pop(path, None)  # freed first, unless a tensor still reads it
            known = self._memories[path] = (handle, OpenedMemory(handle))
        return known[1]

    def clear(self) -> None:
        self._maps.clear()
        self._memories.clear()


class BufferReader:
    """A reader of one publication; holds its lock as long as this or one of its tensors lives."""

    def __init__(
        self,
        path: Path,
        number: int,
        size: int,
        cache: ReaderCache,
        device_handle: DeviceHandle | None = None,
    ) -> None:
        """Open the buffer; `device_handle` is that of the bytes if they are on a GPU."""
        self._name = f"weights of publication {number}"
        self._file = _open(path, self._name)
        release = weakref.finalize(self, os.close, self._file)
        fcntl.flock(self._file, fcntl.LOCK_SH)
        header = os.pread(self._file, _HEADER.size, 0)
        if len(header) < _HEADER.size or _HEADER.unpack(header)[:2] != (number, size):
            raise WeightsGone(f"{self._name} are gone: their file was written again")
        in_file = HEADER_BYTES + (0 if device_handle else size)
        self._map = cache.map(path, self._name, in_file)
        if device_handle is None:
            holder: object = memoryview(self._map)  # tensors hold this view, and with it the lock
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # the memory is read-only
                self.bytes = torch.frombuffer(
                    holder, dtype=torch.uint8, count=size, offset=HEADER_BYTES
                )
        else:
            self.bytes, holder = cache.memory(path, device_handle).tensor(size)
        release.detach()
        weakref.finalize(holder, os.close, self._file).atexit = False

    def wait_until_written(self, end: int) -> None:
        """Wait for the bytes up to `end`; woken by the writer or by its death."""
        if self._written() >= end:
            return
        fcntl.fcntl(self._file, fcntl.F_OFD_SETLKW, _range(fcntl.F_RDLCK, 0, end))
        fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, _range(fcntl.F_UNLCK, 0, end))
        if self._written() < end:
            raise WeightsGone(f"{self._name} are not whole: their writer ended while it wrote them")

    def _written(self) -> int:
        return int(_numbers(self._map)[_WRITTEN])


def _numbers(memory: mmap.mmap) -> memoryview:
    """The header as numbers, each read and written at once.

    `struct.pack_into` writes a zero before the number, which a reader may see.
    """
    return memoryview(memory)[: _HEADER.size].cast("Q")


def _open(path: Path, name: str) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise WeightsGone(f"{name} are gone: there is no file {path}") from None


def _range(kind: int, start: int, length: int) -> bytes:
    """Pack Linux's struct flock: type, whence, start, length, pid."""
    return struct.pack("hhqqi4x", kind, os.SEEK_SET, start, length, 0)


WAKE_BYTES = 8 * 2**20  # wake waiting readers after every so many bytes
DEVICE_WAKE_BYTES = 256 * 2**20  # the same on a GPU, where each wake-up first waits for the device
SHARED_MEMORY = "shared_memory"  # the kind of the handles


class SharedMemorySync:
    """One end of the path: the consumer publishes into the folder, an engine fetches."""

    def __init__(self, folder: str | Path = "", *, node: str = "", on_device: bool = False) -> None:
        """`node` names the folder's machine, for the distributors that send weights to other machines.

        `on_device`: publish in the memory of the GPU that holds the weights.
        """
        self._folder, self._node, self._on_device = Path(folder), node, on_device
        self._device = torch.device("cpu")  # where buffers are published
        self._buffers: list[BufferWriter] = []
        self._layout: tuple[list[Entry], int] | None = None
        self._announced: tuple[WeightHandle, BufferWriter] | None = None
        self._cache = ReaderCache()

    # ---- the consumer's end

    def announce(self, version: int, digest: str) -> WeightHandle | None:
        """The handle of the next publication; None if its layout is not known yet."""
        if self._layout is None:
            return None
        self._abandon_announced()
        entries, size = self._layout
        buffer = self.begin_buffer(size)
        location = location_of(buffer, entries, size, self._node)
        handle = WeightHandle(version=version, digest=digest, kind=SHARED_MEMORY, location=location)
        self._announced = (handle, buffer)
        return handle

    def publish(
        self, version: int, digest: str, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> WeightHandle:
        announced = self._announced and self._announced[0]
        if announced is None or (announced.version, announced.digest) != (version, digest):
            self._abandon_announced()
            weights = tensors = [(name, tensor.detach()) for name, tensor in weights]
            self._layout = layout_of(tensors)
            if self._on_device and tensors:
                self._device = tensors[0][1].device
            self.announce(version, digest)
        assert self._announced is not None
        handle, buffer = self._announced
        try:
            self._write(buffer, handle.location["tensors"], weights)
        finally:
            self._abandon_announced()
        return handle

    def _write(
        self,
        buffer: BufferWriter,
        entries: list[Entry],
        weights: Iterable[tuple[str, torch.Tensor]],
    ) -> None:
        marked = 0
        wake_bytes = DEVICE_WAKE_BYTES if buffer.bytes.is_cuda else WAKE_BYTES
        targets = zip(entries, views(buffer.bytes, entries), strict=True)
        for (entry, (_, target)), (name, tensor) in zip(targets, weights, strict=True):
            got, announced = (name, dtype_name(tensor), tuple(tensor.shape)), tuple(entry[:3])
            assert got == announced, f"got {got}, announced was {announced}"
            target.copy_(tensor.detach())
            if (end := end_of(entry)) - marked >= wake_bytes:
                buffer.mark_written(marked := end)
        buffer.mark_written(len(buffer.bytes))

    def begin_buffer(self, size: int) -> BufferWriter:
        """Begin a buffer that nobody reads, never the newest complete one; remove spare buffers."""
        if not self._buffers:
            self._buffers = [BufferWriter(path) for path in sorted(self._folder.glob("buffer-*"))]
        buffers = self._buffers
        number = max((buffer.number for buffer in buffers), default=0) + 1
        newest = max((buffer.number for buffer in buffers if buffer.is_complete), default=0)
        older = [buffer for buffer in buffers if buffer.number != newest]
        begun = next((buffer for buffer in older if buffer.begin(number, size, self._device)), None)
        spare = [buffer for buffer in older if buffer is not begun]
        self._buffers = [buffer for buffer in buffers if buffer not in spare or not buffer.remove()]
        if begun is None:
            names = (self._folder / f"buffer-{n}" for n in itertools.count())
            begun = BufferWriter(next(name for name in names if not name.exists()))
            is_begun = begun.begin(number, size, self._device)
            assert is_begun, "a new file has no reader"
            self._buffers.append(begun)
        return begun

    def _abandon_announced(self) -> None:
        if self._announced is not None:
            self._announced[1].abandon()
            self._announced = None

    # ---- an engine's end

    def fetch(self, handle: WeightHandle) -> Iterator[tuple[str, torch.Tensor]]:
        buffer, entries = self.open_buffer(handle), handle.location["tensors"]
        for entry, weight in zip(entries, views(buffer.bytes, entries), strict=True):
            buffer.wait_until_written(end_of(entry))
            yield weight

    def open_buffer(self, handle: WeightHandle) -> BufferReader:
        where = handle.location
        return BufferReader(
            Path(where["path"]), where["number"], where["size"], self._cache, where["device"]
        )

    def close(self) -> None:
        self._abandon_announced()
        for buffer in self._buffers:
            buffer.close()
        self._buffers.clear()
        self._cache.clear()  # views that are still alive keep their own reference


def location_of(buffer: BufferWriter, entries: list[Entry], size: int, node: str) -> dict:
    return {
        "node": node,
        "path": str(buffer.path),
        "number": buffer.number,
        "size": size,
        "device": buffer.device_handle,
        "tensors": entries,
    }
