"""A distributor: sends published weights to other machines, one copy over the network per machine.

Each node has one distributor, a process of its own. The distributor of a node that holds a publication
broadcasts it (`broadcast.py`); the others receive it into weight buffers of their own node
(`buffer.py`), which its engines read as they would on the trainer's node. Engines decode meanwhile and
are not in the group: only a distributor that joins or leaves makes a new one. With NCCL each bucket
passes through a GPU of the distributor's node.

With `sync.kind = delta` only the difference to the weights that all members hold already is sent
(`delta.py`), bucket by bucket; a bucket of which much changed is sent whole. Engines check the digest
of what came out.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from penstock.errors import RunError, UserError
from penstock.scratch import ScratchFolder, weight_folder
from penstock.types import WeightHandle
from penstock.weights import delta
from penstock.weights.broadcast import BUCKET_BYTES, WeightGroup, connect_store, open_store
from penstock.weights.digest import THREADS
from penstock.weights.shared_memory import SharedMemorySync, location_of

Meeting = tuple[str, int]  # address and port at which the members of a group meet
Identity = tuple[int, str]  # version and digest of weights
_WHOLE = -1  # in the place of a delta's size: the whole bucket follows


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
        keeps_base: bool = False,
    ) -> None:
        """`folder`: that of a dead predecessor, whose weights are kept. `timeout_s`: of one bucket.

        `keeps_base`: hold the newest weights for the difference to the next.
        """
        if backend == "nccl":
            _prepare_nccl(node)
        self._backend, self._node = backend, node
        self._folder = ScratchFolder(Path(folder)) if folder else weight_folder()
        self._sync = SharedMemorySync(self._folder.path, node=node)
        self._address, self._timeout_s = address, timeout_s
        self._store: Any = None
        self._key = ""
        self._group: WeightGroup | None = None  # kept while its members stay the same
        self._keeps_base = keeps_base
        self._held: tuple[Identity, torch.Tensor] | None = None  # the newest weights of this node
        self._sent = (0, 0)  # bytes of the newest sending, and of its weights

    async def folder(self) -> str:
        return str(self._folder.path)

    async def meeting(self) -> Meeting:
        """Return where the group of this sender meets."""
        if self._store is None:
            self._store = open_store(self._address, self._timeout_s)
        return self._address, self._store.port

    def send(
        self,
        handle: WeightHandle,
        key: str,
        meeting: Meeting,
        world: int,
        base: Identity | None = None,
    ) -> None:
        """Send this node's copy, each bucket as soon as it is written; with `base`, what differs from it."""
        reader = self._sync.open_buffer(handle)
        octets = reader.tensor(0, (handle.location["size"],), torch.uint8)
        held = self._base(base, len(octets))
        self._sent = (0, len(octets))
        self._broadcast(octets, key, meeting, 0, world, held, reader.wait_until_written)
        self._keep(handle, octets)

    def receive(
        self,
        handle: WeightHandle,
        key: str,
        meeting: Meeting,
        rank: int,
        world: int,
        base: Identity | None = None,
    ) -> WeightHandle:
        """Receive the weights of `handle`; return the handle of this node's copy."""
        size = handle.location["size"]
        held = self._base(base, size)
        writer = self._sync.begin_buffer(size)
        try:
            self._broadcast(writer.bytes, key, meeting, rank, world, held, lambda end: None)
            writer.mark_written(size)
        finally:
            writer.abandon()
        self._keep(handle, writer.bytes)
        location = location_of(writer, handle.location["tensors"], size, self._node)
        return replace(handle, location=location)

    async def sent(self) -> tuple[int, int]:
        """Return the bytes that the newest sending took, and those of its weights."""
        return self._sent

    def _base(self, wanted: Identity | None, size: int) -> torch.Tensor | None:
        """Return the weights that a delta builds on; raise a RunError if this node does not hold them."""
        if wanted is None:
            return None
        if self._held is None or self._held[0] != wanted or len(self._held[1]) != size:
            raise RunError(f"weights of version {wanted[0]}, which a delta builds on, are not here")
        return self._held[1]

    def _keep(self, handle: WeightHandle, octets: torch.Tensor) -> None:
        """Hold the newest weights; a buffer with the newest whole copy is not written again."""
        if self._keeps_base:
            self._held = ((handle.version, handle.digest), octets)

    async def remove(self) -> None:
        """Free this node's weights at the end of the run."""
        self._held = None
        self._sync.close()
        self._folder.remove()

    def _broadcast(
        self,
        octets: torch.Tensor,
        key: str,
        meeting: Meeting,
        rank: int,
        world: int,
        base: torch.Tensor | None,
        wait_until_written: Callable[[int], None],
    ) -> None:
        """Broadcast all buckets. A member that sees another one die leaves, so that all fail."""
        fault = ""
        try:
            self._join(key, meeting, rank, world)
            assert self._group is not None
            if base is not None and rank == 0:
                self._send_deltas(octets, base, wait_until_written)
            else:
                for start in range(0, len(octets), BUCKET_BYTES):
                    bucket = octets[start : start + BUCKET_BYTES]
                    wait_until_written(start + len(bucket))
                    if base is None:
                        self._pass_on(bucket, rank)
                    else:
                        self._receive_delta(base[start : start + BUCKET_BYTES], bucket)
        except RunError:
            self._leave()
            raise
        except RuntimeError as error:  # torch raises this
            fault = str(error).splitlines()[0]
        if fault:
            self._leave()
            raise RunError(f"broadcast {key} ended: {fault}")

    def _pass_on(self, octets: torch.Tensor, rank: int) -> None:
        assert self._group is not None
        self._group.broadcast_bucket(octets)
        if rank == 0:
            self._sent = (self._sent[0] + len(octets), self._sent[1])

    def _send_deltas(
        self, octets: torch.Tensor, base: torch.Tensor, wait_until_written: Callable[[int], None]
    ) -> None:
        """Send the delta of each bucket; threads make those of the next ones meanwhile."""
        ahead: deque[tuple[torch.Tensor, Future[bytes | None]]] = deque()
        with ThreadPoolExecutor(THREADS) as pool:
            for start in range(0, len(octets), BUCKET_BYTES):
                bucket, old = (all_[start : start + BUCKET_BYTES] for all_ in (octets, base))
                wait_until_written(start + len(bucket))
                ahead.append((bucket, pool.submit(delta.encode, old.numpy(), bucket.numpy())))
                if len(ahead) > THREADS:
                    self._send_delta(*ahead.popleft())
            while ahead:
                self._send_delta(*ahead.popleft())

    def _send_delta(self, bucket: torch.Tensor, making: Future[bytes | None]) -> None:
        found = making.result()
        size = torch.tensor([_WHOLE if found is None else len(found)])
        self._pass_on(size.view(torch.uint8), 0)
        sent = bucket if found is None else torch.frombuffer(bytearray(found), dtype=torch.uint8)
        self._pass_on(sent, 0)

    def _receive_delta(self, base: torch.Tensor, bucket: torch.Tensor) -> None:
        size = torch.zeros(1, dtype=torch.int64)
        self._pass_on(size.view(torch.uint8), 1)
        if (count := int(size)) == _WHOLE:
            self._pass_on(bucket, 1)
            return
        found = torch.empty(count, dtype=torch.uint8)
        self._pass_on(found, 1)
        bucket.copy_(base)
        delta.apply(found.numpy().tobytes(), bucket.numpy().view(np.uint16))

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
