"""A distributor: sends published weights to other machines, one copy over the network per machine.

Each node has one distributor, a process of its own. The distributor of a node that holds a publication
broadcasts it (`broadcast.py`); the others receive it into weight buffers of their own node
(`buffer.py`), which its engines read as they would on the trainer's node. Engines decode meanwhile and
are not in the group: only a distributor that joins or leaves makes a new one. With NCCL each bucket
passes through a GPU of the distributor's node.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from penstock.errors import RunError, UserError
from penstock.scratch import ScratchFolder, weight_folder
from penstock.types import WeightHandle
from penstock.weights.broadcast import BUCKET_BYTES, WeightGroup, connect_store, open_store
from penstock.weights.shared_memory import SharedMemorySync, location_of

Meeting = tuple[str, int]  # address and port at which the members of a group meet


class Distributor:
    """Consumes a publication of another node, produces the same publication on this node."""

    def __init__(
        self,
        folder: str = "",
        *,
        node: str = "",
        address: str = "127.0.0.1",
        backend: str = "gloo",
        timeout_s: float = 10,
    ) -> None:
        """`folder`: that of a dead predecessor, whose weights are kept. `timeout_s`: of one bucket."""
        if backend == "nccl":
            _prepare_nccl(node)
        self._backend, self._node = backend, node
        self._folder = ScratchFolder(Path(folder)) if folder else weight_folder()
        self._sync = SharedMemorySync(self._folder.path, node=node)
        self._address, self._timeout_s = address, timeout_s
        self._store: Any = None
        self._key = ""
        self._group: WeightGroup | None = None  # kept while its members stay the same

    async def folder(self) -> str:
        return str(self._folder.path)

    async def meeting(self) -> Meeting:
        """Return where the group of this sender meets."""
        if self._store is None:
            self._store = open_store(self._address, self._timeout_s)
        return self._address, self._store.port

    def send(self, handle: WeightHandle, key: str, meeting: Meeting, world: int) -> None:
        """Send this node's copy, each bucket as soon as it is written."""
        reader = self._sync.open_buffer(handle)
        octets = reader.tensor(0, (handle.location["size"],), torch.uint8)
        self._broadcast(octets, key, meeting, 0, world, reader.wait_until_written)

    def receive(
        self, handle: WeightHandle, key: str, meeting: Meeting, rank: int, world: int
    ) -> WeightHandle:
        """Receive the weights of `handle`; return the handle of this node's copy."""
        size = handle.location["size"]
        writer = self._sync.begin_buffer(size)
        try:
            self._broadcast(writer.bytes, key, meeting, rank, world, lambda end: None)
            writer.mark_written(size)
        finally:
            writer.abandon()
        location = location_of(writer, handle.location["tensors"], size, self._node)
        return replace(handle, location=location)

    async def remove(self) -> None:
        """Free this node's weights at the end of the run."""
        self._sync.close()
        self._folder.remove()

    def _broadcast(
        self,
        octets: torch.Tensor,
        key: str,
        meeting: Meeting,
        rank: int,
        world: int,
        wait_until_written: Callable[[int], None],
    ) -> None:
        """Broadcast all buckets. A member that sees another one die leaves, so that all fail."""
        fault = ""
        try:
            self._join(key, meeting, rank, world)
            assert self._group is not None
            for start in range(0, len(octets), BUCKET_BYTES):
                bucket = octets[start : start + BUCKET_BYTES]
                wait_until_written(start + len(bucket))
                self._group.broadcast_bucket(bucket)
        except RunError:
            self._leave()
            raise
        except RuntimeError as error:  # torch raises this
            fault = str(error).splitlines()[0]
        if fault:
            self._leave()
            raise RunError(f"broadcast {key} ended: {fault}")

    def _leave(self) -> None:
        if self._group is not None:
            self._group.leave()
        self._key, self._group = "", None

    def _join(self, key: str, meeting: Meeting, rank: int, world: int) -> None:
        """Join the group `key`, in place of a group of other members."""
        if self._key == key:
            return
        self._leave()
        store = connect_store(*meeting, self._timeout_s) if rank else self._store
        how = {"name": key, "backend": self._backend, "address": self._address}
        self._group = WeightGroup(rank, world, store, self._timeout_s, **how)
        self._key = key


def _prepare_nccl(node: str) -> None:
    """Set what NCCL reads from the environment; for a process that does nothing else with NCCL."""
    if not torch.cuda.is_available():
        raise UserError("sync.backend: got nccl on a node without a visible GPU, allowed: gloo")
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"  # a wait that times out raises
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"  # and does not end the process
    os.environ.setdefault("NCCL_HOSTID", node)  # distributors of one machine count as two nodes
