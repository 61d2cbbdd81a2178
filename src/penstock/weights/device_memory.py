"""Memory of a GPU that several processes of one machine share (CUDA IPC).

Allocated beside torch's own pools, through the driver, so that giving it up returns it to the device.
Who exports it gives others a handle of 64 bytes; who opens that sees the same bytes, on the same GPU,
with no copy. Who may read and write when is `buffer.py`'s business.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from penstock.errors import EngineError, RunError, WeightsGone

_HANDLE_BYTES = 64
_ENABLE_PEER_ACCESS = 1
_OUT_OF_MEMORY = 2


@dataclass(slots=True, frozen=True)
class DevicePlace:
    """Where exported memory is: which GPU, and the driver's handle of it."""

    uuid: str
    handle: bytes


class _Handle(ctypes.Structure):
    _fields_ = (("octets", ctypes.c_char * _HANDLE_BYTES),)


class DeviceBytes:
    """A stretch of device memory as torch takes it over; lives as long as a tensor of it."""

    def __init__(self, pointer: int, size: int, owner: object) -> None:
        self._owner = owner
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (pointer, False),
            "version": 3,
        }


_OWN: weakref.WeakValueDictionary[DevicePlace, DeviceMemory] = weakref.WeakValueDictionary()


class DeviceMemory:
    """An allocation of this process; freed with the last tensor of it."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._size, self._device = size, device
        pointer = ctypes.c_uint64()
        with _context(device):
            code = _driver().cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(size))
            if code == _OUT_OF_MEMORY:
                torch.cuda.empty_cache()
                code = _driver().cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(size))
            if code:
                raise RunError(
                    f"weights: no room for {size / 1e9:.2f} GB on {device} ({_words(code)}); "
                    "sync.kind=shared_memory keeps them in the host's memory"
                )
        self._pointer = pointer.value
        weakref.finalize(self, _free, device, self._pointer).atexit = False

    def tensor(self) -> torch.Tensor:
        return self.octets(self._size)[0]

    def octets(self, size: int) -> tuple[torch.Tensor, object]:
        """Its bytes, and what lives exactly as long as this tensor and its views."""
        return _octets(self._pointer, size, self._device, self)

    def place(self) -> DevicePlace:
        handle = _Handle()
        with _context(self._device):
            code = _driver().cuIpcGetMemHandle(ctypes.byref(handle), ctypes.c_uint64(self._pointer))
        if code:
            raise RunError(
                f"weights: the driver cannot share memory of {self._device} between processes "
                f"({_words(code)}); sync.kind=shared_memory does without"
            )
        place = DevicePlace(_uuid(self._device), bytes(memoryview(handle)))
        _OWN[place] = self
        return place


class OpenedMemory:
    """Another process's allocation, as long as this lives."""

    def __init__(self, place: DevicePlace) -> None:
        self._device = _device_of(place.uuid)
        pointer = ctypes.c_uint64()
        with _context(self._device):
            code = _driver().cuIpcOpenMemHandle_v2(
                ctypes.byref(pointer), _Handle.from_buffer_copy(place.handle), _ENABLE_PEER_ACCESS
            )
        if code:
            raise WeightsGone(f"memory of {self._device} that held weights is gone: {_words(code)}")
        self._pointer = pointer.value
        weakref.finalize(self, _close, self._device, self._pointer).atexit = False

    def octets(self, size: int) -> tuple[torch.Tensor, object]:
        return _octets(self._pointer, size, self._device, self)


def _octets(
    pointer: int, size: int, device: torch.device, owner: object
) -> tuple[torch.Tensor, object]:
    octets = DeviceBytes(pointer, size, owner)
    return torch.as_tensor(octets, device=device), octets


class OpenedMemories:
    """Opening takes a while and the same few places come again and again: they stay open."""

    def __init__(self) -> None:
        self._by_path: dict[str, tuple[DevicePlace, OpenedMemory]] = {}

    def of(self, path: str, place: DevicePlace) -> OpenedMemory | DeviceMemory:
        """One for each file that describes a place; a new place there closes the one before.

        The driver opens no memory in the process that it belongs to.
        """
        if (own := _OWN.get(place)) is not None:
            return own
        known = self._by_path.get(path)
        if known is None or known[0] != place:
            self._by_path.pop(path, None)  # given back first, if nobody reads it any more
            known = self._by_path[path] = (place, OpenedMemory(place))
        return known[1]

    def clear(self) -> None:
        self._by_path.clear()


def _uuid(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def _device_of(uuid: str) -> torch.device:
    """The GPU with this identity, by its number in this process."""
    devices = [torch.device("cuda", number) for number in range(torch.cuda.device_count())]
    for device in devices:
        if _uuid(device) == uuid:
            return device
    raise EngineError(
        f"weights: they are on GPU {uuid}, which this process does not see; "
        "sync.kind=shared_memory brings them through the host"
    )


@contextlib.contextmanager
def _context(device: torch.device) -> Iterator[None]:
    """The driver's calls act on the device whose context is the thread's current one."""
    with torch.cuda.device(device):
        torch.cuda.current_stream().query()  # makes the context, where there is none yet
        yield


@functools.cache
def _driver() -> Any:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise RunError(f"weights: no CUDA driver to share device memory with: {error}") from error
    driver.cuIpcOpenMemHandle_v2.argtypes = [ctypes.c_void_p, _Handle, ctypes.c_uint]
    return driver


def _words(code: int) -> str:
    text = ctypes.c_char_p()
    _driver().cuGetErrorString(code, ctypes.byref(text))
    return (text.value or b"unknown").decode()


def _free(device: torch.device, pointer: int) -> None:
    with _context(device):
        torch.cuda.synchronize()
        _driver().cuMemFree_v2(ctypes.c_uint64(pointer))


def _close(device: torch.device, pointer: int) -> None:
    with _context(device):
        torch.cuda.synchronize()
        _driver().cuIpcCloseMemHandle(ctypes.c_uint64(pointer))
