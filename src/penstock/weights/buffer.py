"""A weight buffer: one memory-mapped file that holds one publication of weights, and its locks.

A buffer is written only while nobody reads it: tensors read from a buffer hold a shared lock as long as
any of them lives, and the kernel releases the lock when their process dies. Bytes not yet written are
locked too, so a reader may begin early: it sleeps in the kernel until they are written and wakes with an
error if the writer dies. Nothing polls and no reader sees a half-written tensor. The bytes may lie in
GPU memory instead (`device_memory.py`); the file then has only the header and the locks.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import warnings
import weakref
from pathlib import Path

import torch

from penstock.errors import RunError, WeightsGone
from penstock.weights.device_memory import (
    DeviceHandle,
    DeviceMemory,
    OpenedMemory,
    exported_memory,
)

HEADER_BYTES = 4096  # a page, so that tensors keep their alignment
_HEADER = struct.Struct("=QQQ")  # publication, bytes of weights, bytes written so far
_WRITTEN = 2  # its place among the numbers of the header
CAN_WAIT_FOR_BYTES = hasattr(fcntl, "F_OFD_SETLKW")  # Linux
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
            if hasattr(os, "posix_fallocate"):
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
        if CAN_WAIT_FOR_BYTES and length:
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
        if CAN_WAIT_FOR_BYTES:
            wait = _range(fcntl.F_RDLCK, 0, end)
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLKW, wait)
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
