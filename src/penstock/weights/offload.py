"""Host offload: tensors move from device memory to host memory and come back bit for bit.

Works on storages, so names, optimizers and views are not affected; tensors that share a storage move once,
and of a DTensor the shard of this rank moves. The host memory is pinned, allocated once and reused; torch's own pinned
memory comes in powers of two, nearly twice of what a large matrix needs. Who uses the device when is decided by the launcher.
"""

from __future__ import annotations

import contextlib
import gc
import mmap
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch

from penstock.errors import RunError

CHUNK_BYTES = 256 * 2**20
_PORTABLE, _MAPPED = 1, 2  # for every device, and at the same address there
_ALIGN = 64


class HostOffload:
    """Offloads the tensors that `tensors` yields at that time, as far as they are on `devices`."""

    def __init__(
        self,
        tensors: Callable[[], Iterable[torch.Tensor]],
        *,
        devices: tuple[str, ...] = ("cuda",),
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        """The default skips CPU tensors, since moving them gains nothing."""
        self._tensors, self._devices, self._chunk_bytes = tensors, devices, chunk_bytes
        self._chunks: list[torch.Tensor] = []
        # each storage and the copy of its bytes on the host; empty: nothing is offloaded
        self._offloaded: dict[int, tuple[torch.UntypedStorage, torch.Tensor]] = {}

    @property
    def is_offloaded(self) -> bool:
        return bool(self._offloaded)

    @property
    def host_bytes(self) -> int:
        """The size of the host memory that is kept for reuse."""
        return sum(len(chunk) for chunk in self._chunks)

    def offload(self) -> None:
        """Move the tensors to the host, and return the allocator's cached memory to the device."""
        found: dict[int, torch.UntypedStorage] = {}
        for tensor in self._tensors():
            storage = _storage_of(tensor)
            ours = storage.resizable()  # not if another process or numpy uses the memory
            if ours and storage.device.type in self._devices and storage.nbytes():
                found.setdefault(storage._cdata, storage)
        storages = list(found.values())
        targets = self._host_views([storage.nbytes() for storage in storages]) if storages else []
        for storage, host in zip(storages, targets, strict=True):
            host.copy_(_bytes_of(storage), non_blocking=True)
        _finish_copies(storages)
        for storage, host in zip(storages, targets, strict=True):
            self._offloaded[storage._cdata] = (storage, host)
            storage.resize_(0)
        if torch.cuda.is_initialized():
            gc.collect()
            torch.cuda.empty_cache()

    def reload(self) -> None:
        """Move everything back to the device, or nothing if its memory does not suffice."""
        back: list[torch.UntypedStorage] = []
        try:
            for storage, host in self._offloaded.values():
                storage.resize_(len(host))
                back.append(storage)
                _bytes_of(storage).copy_(host, non_blocking=True)
            _finish_copies(back)
        except torch.OutOfMemoryError:
            _finish_copies(back)
            for storage in back:
                storage.resize_(0)
            raise
        self._offloaded.clear()

    def current(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor to read or write: the copy on the host while it is offloaded, else itself."""
        offloaded = self._offloaded.get(_storage_of(tensor)._cdata)
        if offloaded is None:
            return tensor
        local, (_, host) = _local(tensor), offloaded
        first = host.storage_offset() // local.element_size() + local.storage_offset()
        view = torch.empty(0, dtype=local.dtype)
        return view.set_(host.untyped_storage(), first, local.size(), local.stride())

    def _host_views(self, sizes: list[int]) -> list[torch.Tensor]:
        """Host memory of these sizes; no view spans two chunks."""
        views, number, offset = [], 0, 0
        for size in sizes:
            while number < len(self._chunks) and offset + size > len(self._chunks[number]):
                number, offset = number + 1, 0
            if number == len(self._chunks):
                self._chunks.append(host_memory(max(size, self._chunk_bytes)))
            views.append(self._chunks[number][offset : offset + size])
            offset += -(-size // _ALIGN) * _ALIGN
        return views


@contextlib.contextmanager
def explain_out_of_memory(who: str, advice: str) -> Iterator[None]:
    """Turn an out-of-memory error of the block into one line that says what to change."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise RunError(f"{who}: {first_sentences(error)}; {advice}") from error


def first_sentences(error: torch.OutOfMemoryError) -> str:
    """How much was asked for and how much was free, without the allocator's own advice."""
    return ". ".join(str(error).strip().splitlines()[0].split(". ")[:3]).rstrip(".")


def host_memory(size: int, setting: str = "launch.colocate") -> torch.Tensor:
    """Bytes of zero in main memory; pinned, and at an address that a kernel can use, if this process uses a GPU."""
    try:
        pages = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        pages.madvise(mmap.MADV_HUGEPAGE)  # pinned many times as fast as small ones
        array = np.frombuffer(pages, np.uint8, size)
        if torch.cuda.is_initialized():
            cuda, address = torch.cuda.cudart(), array.ctypes.data  # pinned as long as it lives
            torch.cuda.check_error(
                int(cuda.cudaHostRegister(address, array.nbytes, _PORTABLE | _MAPPED))
            )
            weakref.finalize(array, cuda.cudaHostUnregister, address).atexit = False
    except (OSError, RuntimeError) as error:
        line = str(error).strip().splitlines()[0]
        raise RunError(
            f"{setting}: got no {size / 2**20:.0f} MiB of pinned host memory ({line}), "
            f"allowed: more memory on the host, or {setting}=false"
        ) from error
    return torch.from_numpy(array)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    shard: Any = tensor.detach()
    return shard.to_local() if hasattr(shard, "to_local") else shard


def _storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    return _local(tensor).untyped_storage()


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _finish_copies(storages: Iterable[torch.UntypedStorage]) -> None:
    for device in {storage.device for storage in storages if storage.device.type == "cuda"}:
        torch.cuda.synchronize(device)
