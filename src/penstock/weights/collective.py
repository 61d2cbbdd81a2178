"""Weights passed from machine to machine: one copy over the network for each, in buckets.

Each node has one distributor, a process of its own. That of a node which holds a publication sends it,
those of nodes which lack it receive it into shared memory of their own (`buffer.py`), from which the
engines of that node read as they do on the trainer's. Engines decode meanwhile, and are no part of
the group: only a distributor that joins or leaves makes a new one. torch.distributed with gloo, or
with NCCL, which sends from GPU to GPU: then each bucket passes through a distributor's GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from penstock.errors import RunError, UserError
from penstock.types import WeightHandle
from penstock.weights.shared_memory import Folder, SharedMemorySync, location_of

BUCKET_BYTES = 32 * 2**20
Meeting = tuple[str, int]  # address and port at which the members of a group find each other


class Carrier(Protocol):
    """What takes a bucket from the first member of a group to all others."""

    def group(self, store: Any, rank: int, world: int, timeout: timedelta) -> Any:
        """A member of a new group; waits for the others."""

    def broadcast(self, group: Any, bucket: torch.Tensor, *, sends: bool) -> None:
        """Returns when the bucket is sent, or is there; raises RuntimeError where one is gone."""

    def leave(self, group: Any) -> None:
        """Others that wait in it are not waited for."""


class Gloo:
    """From memory to memory, over TCP."""

    def __init__(self, address: str) -> None:
        self._address = address

    def group(self, store: Any, rank: int, world: int, timeout: timedelta) -> Any:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._address)]
        options._timeout = timeout
        return dist.ProcessGroupGloo(store, rank, world, options)

    def broadcast(self, group: Any, bucket: torch.Tensor, *, sends: bool) -> None:
        group.broadcast([bucket], _from_the_first()).wait()

    def leave(self, group: Any) -> None:
        """Its connections close with it."""


class Nccl:
    """From GPU to GPU, by whatever links them; a bucket is on this node's GPU for a moment."""

    def __init__(self, node: str) -> None:
        if not torch.cuda.is_available():
            raise UserError("sync.backend: got nccl on a node without a visible GPU, allowed: gloo")
        os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"  # a wait ends with its time-out
        os.environ.setdefault("NCCL_HOSTID", node)  # one member a node, whatever it is called
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"  # and the process lives on
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._passing = torch.empty(BUCKET_BYTES, dtype=torch.uint8, device=self._device)

    def group(self, store: Any, rank: int, world: int, timeout: timedelta) -> Any:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, world, options)

    def broadcast(self, group: Any, bucket: torch.Tensor, *, sends: bool) -> None:
        passing = self._passing[: len(bucket)]
        if sends:
            passing.copy_(bucket)
        group.broadcast([passing], _from_the_first()).wait()
        torch.cuda.current_stream(self._device).synchronize()
        if not sends:
            bucket.copy_(passing)

    def leave(self, group: Any) -> None:
        group.abort()


def _from_the_first() -> Any:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    return options


class Distributor:
    """Consumes a publication of another node, produces one of this node."""

    def __init__(
        self,
        folder: str = "",
        *,
        node: str = "",
        address: str = "127.0.0.1",
        backend: str = "gloo",
        timeout_s: float = 10,
    ) -> None:
        """`folder`: of the one before it, whose weights are kept. `timeout_s`: for one bucket."""
        self._carrier: Carrier = Nccl(node) if backend == "nccl" else Gloo(address)
        self._folder = Folder(Path(folder)) if folder else Folder.new()
        self._sync = SharedMemorySync(self._folder.path, node=node)
        self._node, self._address, self._timeout_s = node, address, timeout_s
        self._store: Any = None
        self._key = ""
        self._group: Any = None  # the standing group; another one replaces it

    async def folder(self) -> str:
        return str(self._folder.path)

    async def meeting(self) -> Meeting:
        """Where a group that this one sends to meets."""
        if self._store is None:
            self._store = dist.TCPStore(self._address, 0, is_master=True, wait_for_workers=False)
        return self._address, self._store.port

    def send(self, handle: WeightHandle, key: str, meeting: Meeting, world: int) -> None:
        """Send what is in this node's memory, each bucket as soon as it is written there."""
        side = self._sync.read_side(handle)
        buffer = side.tensor(0, (handle.location["size"],), torch.uint8)
        self._broadcast(buffer, key, meeting, 0, world, side.wait_for)

    def receive(
        self, handle: WeightHandle, key: str, meeting: Meeting, rank: int, world: int
    ) -> WeightHandle:
        """The same weights in memory of this node, under a handle of their own."""
        size = handle.location["size"]
        side = self._sync.take_side(size)
        try:
            self._broadcast(side.bytes, key, meeting, rank, world, lambda end: None)
            side.note(size)
        finally:
            side.give_up()
        location = location_of(side, handle.location["tensors"], size, self._node)
        return replace(handle, location=location)

    async def remove(self) -> None:
        """At the end of the run: give the memory back."""
        self._sync.close()
        self._folder.remove()

    def _broadcast(
        self,
        buffer: torch.Tensor,
        key: str,
        meeting: Meeting,
        rank: int,
        world: int,
        wait_for: Callable[[int], None],
    ) -> None:
        """A member that dies closes its connections; who sees it leaves the group, and so on.

        One bucket at a time: others that are under way would keep the group open until they time out.
        """
        fault = ""
        try:
            self._meet(key, meeting, rank, world)
            for start in range(0, len(buffer), BUCKET_BYTES):
                bucket = buffer[start : start + BUCKET_BYTES]
                wait_for(start + len(bucket))
                self._carrier.broadcast(self._group, bucket, sends=rank == 0)
        except RunError:
            self._leave()
            raise
        except RuntimeError as error:  # what torch raises
            fault = str(error).splitlines()[0]
        if fault:
            self._leave()
            raise RunError(f"broadcast {key} ended: {fault}")

    def _leave(self) -> None:
        if self._group is not None:
            self._carrier.leave(self._group)
        self._key, self._group = "", None

    def _meet(self, key: str, meeting: Meeting, rank: int, world: int) -> None:
        """The standing group where it has the same members still, else a new one."""
        if self._key == key:
            return
        self._leave()
        store = self._store
        if rank:
            timeout = timedelta(seconds=self._timeout_s)
            store = dist.TCPStore(*meeting, is_master=False, timeout=timeout)
        timeout = timedelta(seconds=self._timeout_s)
        self._group = self._carrier.group(dist.PrefixStore(key, store), rank, world, timeout)
        self._key = key
