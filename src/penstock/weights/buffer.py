"""One memory-mapped file that holds one publication of weights, and its locks.

Written only while nobody reads it: tensors that were read from a side hold a shared lock for as long
as any of them lives, and the kernel gives it back when their process dies. Bytes that are still to
be written are locked too, so a reader may begin early: it sleeps in the kernel until they are there,
and wakes with an error when the writer dies. Nothing polls, nothing is read torn. The bytes may lie
in a GPU's memory instead (`device_memory.py`); the file then has only the header and the locks.
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
from penstock.weights.device_memory import DeviceMemory, DevicePlace, OpenedMemories

HEADER_BYTES = 4096  # a page, so that tensors keep their alignment
_HEADER = struct.Struct("=QQQ")  # publication, bytes of weights, bytes written so far
_WRITTEN = struct.Struct("=Q")
_WRITTEN_AT = 16
CAN_WAIT_FOR_BYTES = hasattr(fcntl, "F_OFD_SETLKW")  # Linux
_HOST = torch.device("cpu")


class WrittenSide:
    """A side as its only writer sees it. `begin`, fill `bytes` and `note` how far, `end`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        header = os.pread(self._file, _HEADER.size, 0)
        self.number, size, written = (
            _HEADER.unpack(header) if len(header) == _HEADER.size else (0, 0, 0)
        )
        here = os.fstat(self._file).st_size == HEADER_BYTES + size  # not on a dead writer's GPU
        self.is_whole = self.number > 0 and size == written and here
        self._size, self._device = 0, _HOST
        self._map: mmap.mmap | None = None
        self.bytes = torch.empty(0, dtype=torch.uint8)
        self.place: DevicePlace | None = None  # of the bytes, where they are on a GPU

    def begin(self, number: int, size: int, device: torch.device = _HOST) -> bool:
        """Take it for publication `number`; False: somebody still reads what it holds."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        if self._map is None or (self._size, self._device) != (size, device):
            self.bytes, self._map = torch.empty(0, dtype=torch.uint8), None
            self._make_room(size, device)
        assert self._map is not None
        self._lock_bytes(fcntl.F_WRLCK, 0, size)
        self.number, self.is_whole = number, False
        _HEADER.pack_into(self._map, 0, number, size, 0)
        fcntl.flock(self._file, fcntl.LOCK_UN)  # from here on it is this publication's
        return True

    def _make_room(self, size: int, device: torch.device) -> None:
        self._size = self.number = 0
        self._device, self.place = device, None
        os.pwrite(self._file, bytes(_HEADER.size), 0)  # a death from here on leaves nothing
        in_file = HEADER_BYTES + (size if device == _HOST else 0)
        try:
            self._reserve(in_file)
            self._map = mmap.mmap(self._file, in_file)
            if device == _HOST:
                self.bytes = torch.frombuffer(self._map, dtype=torch.uint8, offset=HEADER_BYTES)
            else:
                memory = DeviceMemory(size, device)
                self.bytes, self.place = memory.tensor(), memory.place()
        except RunError:
            self._map = None
            fcntl.flock(self._file, fcntl.LOCK_UN)
            raise
        self._size = size

    def _reserve(self, size: int) -> None:
        """Memory that is not there is found out here; at a write it would be the writer's death."""
        try:
            os.ftruncate(self._file, size)
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._file, 0, size)
        except OSError as error:
            os.ftruncate(self._file, 0)
            raise RunError(
                f"weights: no room for {size / 1e9:.2f} GB in {self.path.parent}: {error.strerror}"
            ) from error

    def note(self, written: int) -> None:
        """Bytes up to here are final: wake who waits for them."""
        assert self._map is not None
        if self.bytes.is_cuda:
            torch.cuda.current_stream(self.bytes.device).synchronize()
        _WRITTEN.pack_into(self._map, _WRITTEN_AT, written)
        self.is_whole = written == self._size
        self._lock_bytes(fcntl.F_UNLCK, 0, written)

    def give_up(self) -> None:
        """It will not become whole: who waits is told."""
        if not self.is_whole:
            self._lock_bytes(fcntl.F_UNLCK, 0, max(self._size, 1))

    def remove(self) -> bool:
        """Give its memory back; False: somebody still reads it."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        self.path.unlink(missing_ok=True)
        self.close()
        return True

    def close(self) -> None:
        """What was written stays for its readers."""
        self.bytes, self._map = torch.empty(0, dtype=torch.uint8), None
        self.place = None
        os.close(self._file)

    def _lock_bytes(self, kind: int, start: int, length: int) -> None:
        if CAN_WAIT_FOR_BYTES and length:
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, _range(kind, start, length))


class Standing:
    """What a reader keeps from one publication to the next: pages are touched once."""

    def __init__(self) -> None:
        self.maps: dict[str, mmap.mmap] = {}
        self.memories = OpenedMemories()

    def clear(self) -> None:
        self.maps.clear()
        self.memories.clear()


class ReadSide:
    """One publication as a reader sees it; locked for as long as this or a tensor of it lives."""

    def __init__(
        self,
        path: Path,
        number: int,
        size: int,
        standing: Standing,
        place: DevicePlace | None = None,
    ) -> None:
        """`place`: of the bytes, where they are on a GPU."""
        self._name = f"weights of publication {number}"
        self._file = _open(path, self._name)
        release = weakref.finalize(self, os.close, self._file)
        fcntl.flock(self._file, fcntl.LOCK_SH)
        header = os.pread(self._file, _HEADER.size, 0)
        if len(header) < _HEADER.size or _HEADER.unpack(header)[:2] != (number, size):
            raise WeightsGone(f"{self._name} are gone: their file was written again")
        in_file = HEADER_BYTES + (0 if place else size)
        self._map = _standing_map(standing.maps, path, self._name, in_file)
        self._on_device: torch.Tensor | None = None
        if place is None:
            self._view = memoryview(self._map)  # what tensors hold; the lock lives as long
            holder: object = self._view
        else:
            self._on_device, holder = standing.memories.of(str(path), place).octets(size)
        release.detach()
        weakref.finalize(holder, os.close, self._file).atexit = False

    def wait_for(self, end: int) -> None:
        """Sleeps until the bytes up to `end` are written. Woken by the writer, or by its death."""
        if self._written() >= end:
            return
        if CAN_WAIT_FOR_BYTES:
            wait = _range(fcntl.F_RDLCK, 0, end)
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLKW, wait)
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, _range(fcntl.F_UNLCK, 0, end))
        if self._written() < end:
            raise WeightsGone(f"{self._name} are not whole: their writer ended while it wrote them")

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A view of these bytes, read-only."""
        count = 1
        for extent in shape:
            count *= extent
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        if self._on_device is not None:
            end = offset + count * dtype.itemsize
            return self._on_device[offset:end].view(dtype).view(shape)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # read-only memory, and only read
            flat = torch.frombuffer(
                self._view, dtype=dtype, count=count, offset=HEADER_BYTES + offset
            )
        return flat.view(shape)

    def _written(self) -> int:
        return int(_WRITTEN.unpack_from(self._map, _WRITTEN_AT)[0])


def _open(path: Path, name: str) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise WeightsGone(f"{name} are gone: there is no file {path}") from None


def _standing_map(standing: dict[str, mmap.mmap], path: Path, name: str, size: int) -> mmap.mmap:
    """The mapping of this very file, made anew where file or size changed.

    Opened by itself: a mapping keeps its file open, and with it a lock that came by the same opening.
    """
    file = _open(path, name)
    try:
        inode = os.fstat(file)
        key = f"{inode.st_dev}-{inode.st_ino}-{size}"
        if key not in standing:
            while len(standing) > 3:
                del standing[next(iter(standing))]
            standing[key] = mmap.mmap(file, size, access=mmap.ACCESS_READ)
        return standing[key]
    finally:
        os.close(file)


def _range(kind: int, start: int, length: int) -> bytes:
    """struct flock of Linux: type, whence, start, length, pid."""
    return struct.pack("hhqqi4x", kind, os.SEEK_SET, start, length, 0)
