"""Device memory that is lent out: tensors wait in standing host memory and come back bit for bit.

Works on storages, so names, optimizers and views notice nothing; tensors that share one move once, a
shard (DTensor) by what this rank holds. Host memory is pinned, made once and used again. Who takes
turns with whom is the launcher's business.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from penstock.errors import RunError

CHUNK_BYTES = 256 * 2**20  # a power of two: pinned memory is handed out in such sizes
_ALIGN = 64


@dataclass(slots=True, frozen=True)
class _Place:
    storage: torch.UntypedStorage
    host: torch.Tensor  # bytes


class Parking:
    """The tensors that `tensors` names at the time, as far as they are on one of `devices`."""

    def __init__(
        self,
        tensors: Callable[[], Iterable[torch.Tensor]],
        *,
        devices: tuple[str, ...] = ("cuda",),
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        """On a CPU nothing is gained by moving, so by default nothing does."""
        self._tensors, self._devices, self._chunk_bytes = tensors, devices, chunk_bytes
        self._chunks: list[torch.Tensor] = []
        self._places: dict[int, _Place] = {}  # by storage; empty: nothing is parked

    @property
    def parked(self) -> bool:
        return bool(self._places)

    @property
    def host_bytes(self) -> int:
        """Host memory that stands ready."""
        return sum(len(chunk) for chunk in self._chunks)

    def park(self) -> None:
        """Move what is not parked yet, and give back what the allocator keeps for later."""
        storages = self._storages()
        rooms = self._rooms([storage.nbytes() for storage in storages]) if storages else []
        for storage, room in zip(storages, rooms, strict=True):
            room.copy_(_bytes_of(storage), non_blocking=True)
        _finish_copies(storages)
        for storage, room in zip(storages, rooms, strict=True):
            self._places[storage._cdata] = _Place(storage, room)
            storage.resize_(0)
        if torch.cuda.is_initialized():
            gc.collect()
            torch.cuda.empty_cache()

    def unpark(self) -> None:
        """Bring everything back, or nothing where memory runs out on the way."""
        back: list[torch.UntypedStorage] = []
        try:
            for place in self._places.values():
                place.storage.resize_(len(place.host))
                back.append(place.storage)
                _bytes_of(place.storage).copy_(place.host, non_blocking=True)
            _finish_copies(back)
        except torch.OutOfMemoryError:
            _finish_copies(back)
            for storage in back:
                storage.resize_(0)
            raise
        self._places.clear()

    def held(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor to read or write: its copy on the host while it is parked, else itself."""
        place = self._places.get(_storage_of(tensor)._cdata)
        if place is None:
            return tensor
        local = _local(tensor)
        first = place.host.storage_offset() // local.element_size() + local.storage_offset()
        view = torch.empty(0, dtype=local.dtype)
        return view.set_(place.host.untyped_storage(), first, local.size(), local.stride())

    def _storages(self) -> list[torch.UntypedStorage]:
        found: dict[int, torch.UntypedStorage] = {}
        for tensor in self._tensors():
            storage = _storage_of(tensor)
            ours = storage.resizable()  # not where another process or numpy looks on
            if ours and storage.device.type in self._devices and storage.nbytes():
                found.setdefault(storage._cdata, storage)
        return list(found.values())

    def _rooms(self, sizes: list[int]) -> list[torch.Tensor]:
        """So many bytes each, none across two chunks; what is parked already keeps its own."""
        if self._places:
            raise AssertionError("park: got new tensors while others are parked, unpark first")
        rooms, number, offset = [], 0, 0
        for size in sizes:
            while number < len(self._chunks) and offset + size > len(self._chunks[number]):
                number, offset = number + 1, 0
            if number == len(self._chunks):
                self._chunks.append(_host_memory(max(size, self._chunk_bytes)))
            rooms.append(self._chunks[number][offset : offset + size])
            offset += -(-size // _ALIGN) * _ALIGN
        return rooms


@contextlib.contextmanager
def short_of_memory(who: str, advice: str) -> Iterator[None]:
    """Device memory that runs out inside is one line to the user, with what to change."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise RunError(f"{who}: {first_sentences(error)}; {advice}") from error


def first_sentences(error: torch.OutOfMemoryError) -> str:
    """How much was asked for and how much was free, without the allocator's own advice."""
    return ". ".join(str(error).strip().splitlines()[0].split(". ")[:3]).rstrip(".")


def _host_memory(size: int) -> torch.Tensor:
    pinned = torch.cuda.is_initialized()
    try:
        return torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
    except RuntimeError as error:
        line = str(error).strip().splitlines()[0]
        raise RunError(
            f"launch.colocate: got no {size / 2**20:.0f} MiB of pinned host memory to park in ({line}), "
            "allowed: more memory on the host, or launch.colocate=false"
        ) from error


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
