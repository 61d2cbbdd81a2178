"""Weights broadcast from the trainer to the engines, in buckets, over torch.distributed (gloo). Layer 4.

The trainer copies its weights into one of two host buffers; for each publication the launcher names the
engines that are alive (`open_group`), and a group of exactly those receives the buckets while the
trainer goes on. A group is kept while its members stay the same; who joined or left makes a new one.
Needs no shared memory and no Ray. Weights on a GPU travel through the host.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from penstock.errors import RunError
from penstock.types import WeightHandle

BUCKET_BYTES = 64 * 2**20
SLOWEST_BYTES_PER_S = 50e6  # a broadcast that is slower has lost a member
_ALIGN = 64
Entry = tuple[str, str, tuple[int, ...], int]  # name, dtype, shape, offset


class CollectiveSync:
    """One side: the trainer's (index None) or that of engine `index`."""

    def __init__(
        self, index: int | None = None, *, address: str = "127.0.0.1", timeout_s: float = 10.0
    ) -> None:
        self._index, self._address = index, address
        self._meeting_timeout_s = timeout_s
        self._sides: list[torch.Tensor] = [torch.empty(0, dtype=torch.uint8) for _ in range(2)]
        self._standing = np.empty(0, dtype=np.uint8)
        self._groups: dict[str, Any] = {}  # the newest group by its key
        self._store: Any = None
        self._sending: list[threading.Thread] = []

    # ---- the trainer's side

    def publish(
        self, version: int, digest: str, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> WeightHandle:
        """Copy into the buffer that is not being sent; `open_group` sends it."""
        self._wait_until_sent()
        tensors = [(name, tensor.detach()) for name, tensor in weights]
        entries, size = _layout(tensors)
        side = self._side(version % 2, size)
        for (_, _, _, offset), (_, tensor) in zip(entries, tensors, strict=True):
            nbytes = tensor.numel() * tensor.element_size()
            if nbytes:
                side[offset : offset + nbytes].view(tensor.dtype).copy_(tensor.reshape(-1))
        location = {"size": size, "tensors": entries}
        return WeightHandle(version=version, digest=digest, kind="collective", location=location)

    def open_group(self, handle: WeightHandle, key: str, members: list[int]) -> WeightHandle:
        """Send what `handle` names to these engines, in the background; the handle they need."""
        if self._store is None:
            self._store = dist.TCPStore(self._address, 0, is_master=True, wait_for_workers=False)
        buffer = self._sides[handle.version % 2][: handle.location["size"]]
        thread = threading.Thread(
            target=self._send,
            args=(buffer, key, len(members) + 1),
            name=f"broadcast {handle.version}",
            daemon=True,
        )
        self._sending.append(thread)
        thread.start()
        meeting = {"address": self._address, "port": self._store.port}
        return replace(handle, location={**handle.location, **meeting, "key": key, "to": members})

    def _send(self, buffer: torch.Tensor, key: str, world: int) -> None:
        """In a thread of its own. An engine that went away ends the group; the engines tell of it."""
        try:
            self._broadcast(buffer, self._group(key, self._store, 0, world, len(buffer)))
        except RuntimeError as error:
            self._groups.pop(key, None)
            print(f"broadcast to group {key} ended: {error}")

    def _wait_until_sent(self) -> None:
        for thread in self._sending:
            thread.join()
        self._sending.clear()

    # ---- an engine's side

    def fetch(self, handle: WeightHandle) -> Iterator[tuple[str, torch.Tensor]]:
        where = handle.location
        if self._index not in where["to"]:
            raise RunError(f"weights of version {handle.version} were not sent to this engine")
        buffer = self._receiving(where["size"])
        rank = where["to"].index(self._index) + 1
        try:
            group = self._groups.get(where["key"])
            if group is None:
                store = dist.TCPStore(where["address"], where["port"], is_master=False)
                group = self._group(where["key"], store, rank, len(where["to"]) + 1, len(buffer))
            self._broadcast(buffer, group)
        except RuntimeError as error:
            self._groups.pop(where["key"], None)
            raise RunError(f"broadcast of version {handle.version}: {error}") from error
        for name, dtype, shape, offset in where["tensors"]:
            yield name, _view(buffer, offset, shape, getattr(torch, dtype))

    def _receiving(self, size: int) -> torch.Tensor:
        """The standing buffer, unless somebody still holds a view of what it received last."""
        if len(self._standing) < size or sys.getrefcount(self._standing) > 2:
            self._standing = np.empty(size, dtype=np.uint8)
        return torch.from_numpy(self._standing)[:size]

    # ---- both

    def _group(self, key: str, store: Any, rank: int, world: int, size: int) -> Any:
        """The standing group of these members; another one than the last replaces it."""
        if key not in self._groups:
            self._groups.clear()
            timeout_s = self._meeting_timeout_s + size / SLOWEST_BYTES_PER_S
            self._groups[key] = dist.ProcessGroupGloo(
                dist.PrefixStore(key, store), rank, world, timedelta(seconds=timeout_s)
            )
        return self._groups[key]

    def _broadcast(self, buffer: torch.Tensor, group: Any) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        pending = [
            group.broadcast([buffer[start : start + BUCKET_BYTES]], options)
            for start in range(0, len(buffer), BUCKET_BYTES)
        ]
        for work in pending:
            work.wait()

    def _side(self, number: int, size: int) -> torch.Tensor:
        if len(self._sides[number]) < size:
            self._sides[number] = torch.empty(size, dtype=torch.uint8)
        return self._sides[number][:size]

    def close(self) -> None:
        self._wait_until_sent()
        self._groups.clear()


def _layout(tensors: list[tuple[str, torch.Tensor]]) -> tuple[list[Entry], int]:
    entries: list[Entry] = []
    size = 0
    for name, tensor in tensors:
        dtype = str(tensor.dtype).removeprefix("torch.")
        entries.append((name, dtype, tuple(tensor.shape), size))
        size += -(-tensor.numel() * tensor.element_size() // _ALIGN) * _ALIGN
    return entries, max(size, _ALIGN)


def _view(
    buffer: torch.Tensor, offset: int, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    count = 1
    for extent in shape:
        count *= extent
    nbytes = count * torch.empty(0, dtype=dtype).element_size()
    return buffer[offset : offset + nbytes].view(dtype).view(shape)
