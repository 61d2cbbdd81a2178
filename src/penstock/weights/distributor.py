"""A distributor: sends published weights to other machines, one copy over the network per machine.

Each node has one distributor, a process of its own. The distributor of a node that holds a
publication sends it to another one (`broadcast.py`, a group of two), which receives it into weight
buffers of its own node (`buffer.py`) and passes it on; its engines read the buffers as they would
on the trainer's node, and decode meanwhile. Who sends to whom is decided by `workers/pool/node_copies.py`.
Buckets travel over two connections in turn, because one core carries less than most links do. With
NCCL there is one, and each bucket passes through a GPU of the distributor's node.

With `sync.kind = delta` only the difference to the weights that the receiver holds already is sent
(`delta.py`), bucket by bucket; a bucket of which much changed is sent whole. A receiver keeps the
delta to pass it on. Engines check the digest of what came out.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from penstock.errors import RunError, UserError
from penstock.files import ScratchFolder, weight_folder
from penstock.types import WeightHandle
from penstock.weights import delta
from penstock.weights.broadcast import BUCKET_BYTES, WeightGroup, connect_store, open_store
from penstock.weights.shared_memory import SharedMemorySync, location_of

T = TypeVar("T")
THREADS = min(16, os.cpu_count() or 1)  # that make deltas
Meeting = tuple[str, int]  # address and port at which the members of a group meet
Identity = tuple[int, str]  # version and digest of weights
_WHOLE = -1  # in the place of a delta's size: the whole bucket follows
_CONNECTIONS = 2  # of two nodes, with gloo


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
        self._links: dict[str, tuple[str, Link]] = {}  # pair -> key and link of it
        self._opening = threading.Lock()  # buffers are opened one at a time
        self._one_at_a_time = threading.Lock() if backend == "nccl" else nullcontext()
        self._keeps_base = keeps_base
        self._held: tuple[Identity, torch.Tensor] | None = None  # the newest weights of this node
        self._delta: Delta | None = None  # what leads to them

    async def folder(self) -> str:
        return str(self._folder.path)

    async def meeting(self) -> Meeting:
        """Return where the group of this sender meets."""
        if self._store is None:
            self._store = open_store(self._address, self._timeout_s)
        return self._address, self._store.port

    async def send(
        self, handle: WeightHandle, key: str, meeting: Meeting, base: Identity | None = None
    ) -> int:
        """Send this node's copy, each bucket as soon as it is written; with `base`, what differs from it.

        Return the number of bytes that were sent.
        """
        return await asyncio.to_thread(self._send, handle, key, meeting, base)

    def _send(self, handle: WeightHandle, key: str, meeting: Meeting, base: Identity | None) -> int:
        with self._opening:
            reader = self._sync.open_buffer(handle)
        octets = reader.tensor(0, (handle.location["size"],), torch.uint8)
        buckets = self._whole(octets, reader.wait_until_written)
        if base is not None:
            buckets = self._parts(handle, octets, base, reader.wait_until_written)
        with self._joined(key, meeting, 0) as link:
            sent = sum(link.each(partial(_send_parts, parts) for parts in buckets))
        self._keep(handle, octets)
        return sent

    async def receive(
        self, handle: WeightHandle, key: str, meeting: Meeting, base: Identity | None = None
    ) -> WeightHandle:
        """Receive the weights of `handle`; return the handle of this node's copy."""
        return await asyncio.to_thread(self._receive, handle, key, meeting, base)

    def _receive(
        self, handle: WeightHandle, key: str, meeting: Meeting, base: Identity | None
    ) -> WeightHandle:
        size = handle.location["size"]
        held = None if base is None else self._base(base, size)
        with self._opening:
            writer = self._sync.begin_buffer(size)
        made = Delta(base, _identity(handle), [])
        try:
            calls = (
                partial(
                    _receive_bucket,
                    writer.bytes[start : start + BUCKET_BYTES],
                    None if held is None else held[start : start + BUCKET_BYTES],
                )
                for start in range(0, size, BUCKET_BYTES)
            )
            with self._joined(key, meeting, 1) as link:
                made.frames.extend(link.each(calls))
            writer.mark_written(size)
        finally:
            writer.abandon()
        self._keep(handle, writer.bytes, made if base is not None else None)
        location = location_of(writer, handle.location["tensors"], size, self._node)
        return replace(handle, location=location)

    def _base(self, wanted: Identity, size: int) -> torch.Tensor:
        """Return the weights that a delta builds on; raise a RunError if this node does not hold them."""
        if self._held is None or self._held[0] != wanted or len(self._held[1]) != size:
            raise RunError(f"weights of version {wanted[0]}, which a delta builds on, are not here")
        return self._held[1]

    def _keep(self, handle: WeightHandle, octets: torch.Tensor, made: Delta | None = None) -> None:
        """Hold the newest weights, and the delta to them; a buffer that is held is not written again."""
        held = self._held
        if self._keeps_base and (held is None or held[0][0] <= handle.version):
            self._held = (_identity(handle), octets)
            self._delta = made or self._delta

    async def remove(self) -> None:
        """Free this node's weights at the end of the run."""
        self._held = self._delta = None
        self._sync.close()
        self._folder.remove()

    @contextmanager
    def _joined(self, key: str, meeting: Meeting, rank: int) -> Iterator[Link]:
        """Yield the link of two; a member that sees the other one die leaves it and raises a RunError."""
        pair, fault = key.rsplit("-", 1)[0], ""
        try:
            with self._one_at_a_time:
                yield self._join(pair, key, meeting, rank)
        except RunError:
            self._leave(pair)
            raise
        except RuntimeError as error:  # torch raises this
            fault = str(error).splitlines()[0]
        if fault:
            self._leave(pair)
            raise RunError(f"sending {key} ended: {fault}")

    def _join(self, pair: str, key: str, meeting: Meeting, rank: int) -> Link:
        """Return the link `key`; it takes the place of an earlier link of the same two."""
        known = self._links.get(pair)
        if known is not None and known[0] == key:
            return known[1]
        self._leave(pair)
        store = connect_store(*meeting, self._timeout_s) if rank else self._store
        how = {"backend": self._backend, "address": self._address}
        link = Link(
            WeightGroup(rank, 2, store, self._timeout_s, name=f"{key}.{number}", **how)
            for number in range(1 if self._backend == "nccl" else _CONNECTIONS)
        )
        self._links[pair] = (key, link)
        return link

    def _leave(self, pair: str) -> None:
        if (known := self._links.pop(pair, None)) is not None:
            known[1].leave()

    def _whole(
        self, octets: torch.Tensor, wait_until_written: Callable[[int], None]
    ) -> Iterator[list[torch.Tensor]]:
        for start in range(0, len(octets), BUCKET_BYTES):
            bucket = octets[start : start + BUCKET_BYTES]
            wait_until_written(start + len(bucket))
            yield [bucket]

    def _parts(
        self,
        handle: WeightHandle,
        octets: torch.Tensor,
        base: Identity,
        wait_until_written: Callable[[int], None],
    ) -> Iterator[list[torch.Tensor]]:
        """Yield what is sent of each bucket: the size of its delta, then the delta or the whole bucket."""
        known, frames = self._delta, []
        if known is not None and (known.base, known.to) == (base, _identity(handle)):
            made: Iterator[bytes | None] = iter(known.frames)
        else:
            made = _encoded(octets, self._base(base, len(octets)), wait_until_written)
        for start, found in zip(range(0, len(octets), BUCKET_BYTES), made, strict=True):
            frames.append(found)
            size = torch.tensor([_WHOLE if found is None else len(found)]).view(torch.uint8)
            if found is None:
                yield [size, octets[start : start + BUCKET_BYTES]]
            else:
                yield [size, torch.frombuffer(bytearray(found), dtype=torch.uint8)]
        self._delta = Delta(base, _identity(handle), frames)


class Link:
    """The connections of two distributors, each with a thread; buckets take them in turn."""

    def __init__(self, groups: Iterable[WeightGroup]) -> None:
        self._groups = list(groups)

    def each(self, calls: Iterable[Callable[[WeightGroup], T]]) -> Iterator[T]:
        """Call a function for each bucket, with its connection; yield the results in order.

        An error ends the iteration when the buckets that are under way have ended.
        """
        threads = [ThreadPoolExecutor(1) for _ in self._groups]
        under_way: deque[Future[T]] = deque()
        try:
            for number, call in enumerate(calls):
                place = number % len(threads)
                under_way.append(threads[place].submit(call, self._groups[place]))
                if len(under_way) > len(threads):
                    yield under_way.popleft().result()
            while under_way:
                yield under_way.popleft().result()
        finally:
            for thread in threads:
                thread.shutdown(cancel_futures=True)

    def leave(self) -> None:
        for group in self._groups:
            group.leave()


@dataclass(slots=True, frozen=True)
class Delta:
    """The way from one version to the next."""

    base: Identity | None
    to: Identity
    frames: list[bytes | None]  # of each bucket; None: the whole bucket changed


def _encoded(
    octets: torch.Tensor, base: torch.Tensor, wait_until_written: Callable[[int], None]
) -> Iterator[bytes | None]:
    """Yield the delta of each bucket; threads make those of the next ones meanwhile."""
    ahead: deque[Future[bytes | None]] = deque()
    with ThreadPoolExecutor(THREADS) as pool:
        for start in range(0, len(octets), BUCKET_BYTES):
            bucket, old = (all_[start : start + BUCKET_BYTES] for all_ in (octets, base))
            wait_until_written(start + len(bucket))
            ahead.append(pool.submit(delta.encode, old.numpy(), bucket.numpy()))
            if len(ahead) > THREADS:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()


def _send_parts(parts: list[torch.Tensor], group: WeightGroup) -> int:
    """Send what belongs to one bucket; return its bytes."""
    for octets in parts:
        group.broadcast_bucket(octets)
    return sum(map(len, parts))


def _receive_bucket(
    bucket: torch.Tensor, base: torch.Tensor | None, group: WeightGroup
) -> bytes | None:
    """Receive one bucket, with `base` by what differs from it; return its delta, or None if the whole bucket came."""
    if base is None:
        group.broadcast_bucket(bucket)
        return None
    size = torch.zeros(1, dtype=torch.int64)
    group.broadcast_bucket(size.view(torch.uint8))
    if (count := int(size)) == _WHOLE:
        group.broadcast_bucket(bucket)
        return None
    found = torch.empty(count, dtype=torch.uint8)
    group.broadcast_bucket(found)
    bucket.copy_(base)
    made = found.numpy().tobytes()
    delta.apply(made, bucket.numpy().view(np.uint16))
    return made


def _identity(handle: WeightHandle) -> Identity:
    return handle.version, handle.digest


def _prepare_nccl(node: str) -> None:
    """Set what NCCL reads from the environment; for a process that does nothing else with NCCL."""
    if not torch.cuda.is_available():
        raise UserError("sync.backend: got nccl on a node without a visible GPU, allowed: gloo")
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"  # a wait that times out raises
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"  # and does not end the process
    os.environ.setdefault("NCCL_HOSTID", node)  # distributors of one machine count as two nodes
