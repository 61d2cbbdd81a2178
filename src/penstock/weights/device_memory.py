"""GPU memory that several processes of one machine share (CUDA IPC).

Allocated through the driver, beside torch's own pools, so that freeing it returns it to the device. The
exporting process gives others a handle of 64 bytes; a process that opens the handle sees the same bytes on
the same GPU with no copy. Who may read and write when is decided in `shared_memory.py`.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from penstock.errors import EngineError, RunError, WeightsGone

_HANDLE_BYTES = 64
_ENABLE_PEER_ACCESS = 1
_OUT_OF_MEMORY = 2


@dataclass(slots=True, frozen=True)
class DeviceHandle:
    """Names exported memory: the GPU and the driver's IPC handle."""

    uuid: str
    octets: bytes


class _Handle(ctypes.Structure):
    _fields_ = (("octets", ctypes.c_char * _HANDLE_BYTES),)


class DeviceBytes:
    """Device memory in the form that torch wraps; lives as long as a tensor over it."""

    def __init__(self, pointer: int, size: int, owner: object) -> None:
        self._owner = owner
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (pointer, False),
            "version": 3,
        }


_EXPORTED: weakref.WeakValueDictionary[DeviceHandle, DeviceMemory] = weakref.WeakValueDictionary()


class _Memory:
    """Memory of a GPU, released with the last tensor over it."""

    def __init__(
        self, device: torch.device, pointer: int, release: Callable[[torch.device, int], None]
    ) -> None:
        self._device, self._pointer = device, pointer
        weakref.finalize(self, release, device, pointer).atexit = False

    def tensor(self, size: int) -> tuple[torch.Tensor, object]:
        """The first `size` bytes, and an object that lives as long as this tensor and its views."""
        octets = DeviceBytes(self._pointer, size, self)
        return torch.as_tensor(octets, device=self._device), octets


class DeviceMemory(_Memory):
    """An allocation of this process; freed with the last tensor over it."""

    def __init__(self, size: int, device: torch.device) -> None:
        pointer = ctypes.c_uint64()
        with _context(device):
            code = _driver().cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(size))
            if code == _OUT_OF_MEMORY:
                torch.cuda.empty_cache()
                code = _driver().cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(size))
            if code:
                raise RunError(
                    f"weights: no room for {size / 1e9:.2f} GB on {device} ({_driver_error(code)}); "
                    "sync.kind=shared_memory keeps them in the host's memory"
                )
        super().__init__(device, pointer.value, _free)

    def export(self) -> DeviceHandle:
        """The handle by which other processes of this machine open the memory."""
        handle = _Handle()
        with _context(self._device):
            code = _driver().cuIpcGetMemHandle(ctypes.byref(handle), ctypes.c_uint64(self._pointer))
        if code:
            raise RunError(
                f"weights: the driver cannot share memory of {self._device} between processes "
                f"({_driver_error(code)}); sync.kind=shared_memory does without"
            )
        exported = DeviceHandle(_uuid(self._device), bytes(memoryview(handle)))
        _EXPORTED[exported] = self
        return exported


class OpenedMemory(_Memory):
    """Memory of another process, open as long as this object lives."""

    def __init__(self, handle: DeviceHandle) -> None:
        device, pointer = _device_of(handle.uuid), ctypes.c_uint64()
        with _context(device):
            code = _driver().cuIpcOpenMemHandle_v2(
                ctypes.byref(pointer), _Handle.from_buffer_copy(handle.octets), _ENABLE_PEER_ACCESS
            )
        if code:
            raise WeightsGone(
                f"memory of {device} that held weights is gone: {_driver_error(code)}"
            )
        super().__init__(device, pointer.value, _close)


def exported_memory(handle: DeviceHandle) -> DeviceMemory | None:
    """The memory, if this process owns it: the driver opens memory only in other processes."""
    return _EXPORTED.get(handle)


def _uuid(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def _device_of(uuid: str) -> torch.device:
    """The GPU with this UUID under its number in this process."""
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
    """Make `device` the current one: the driver's calls act on the thread's current context."""
    with torch.cuda.device(device):
        torch.cuda.current_stream().query()  # creates the context if there is none yet
        yield


@functools.cache
def _driver() -> Any:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise RunError(f"weights: no CUDA driver to share device memory with: {error}") from error
    driver.cuIpcOpenMemHandle_v2.argtypes = [ctypes.c_void_p, _Handle, ctypes.c_uint]
    return driver


def _driver_error(code: int) -> str:
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
