"""One copy of the published weights on every node that has engines.

The trainer writes the copy of its own node. Every other node gets one distributor; all of them receive
the weights in one broadcast, and engines then read the copy of their node. A distributor that dies or
does not answer is restarted a bounded number of times, in a new group; engines keep decoding with the
weights that they have meanwhile. On one machine no distributor is started.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from penstock.config import LaunchConfig
from penstock.errors import PartFailed, PenstockError, RunError, WeightsGone, WorkerDied
from penstock.supervise.supervised import Supervised, SupervisionCallbacks, call_worker
from penstock.supervise.worker import Worker
from penstock.types import WeightHandle
from penstock.watch.clock import loop_time

Spawn = Callable[[str, str, str], Awaitable[Worker]]  # name, node, folder of its predecessor
Identity = tuple[int, str]  # version and digest of weights
COLLECTIVE = "collective"  # the kind of a handle with copies on several nodes
_TIMES_SENT = 3
_REMOVE_TIMEOUT_S = 30.0


class NodeCopies:
    """Consumes the trainer's handles, produces handles that engines of every node can read."""

    def __init__(
        self,
        spawn: Spawn,
        settings: LaunchConfig,
        callbacks: SupervisionCallbacks,
        *,
        others_timeout_s: float = 30.0,
        sends_deltas: bool = False,
    ) -> None:
        """others_timeout_s: how long after one member failed the others may still be silent.

        sends_deltas: where all members hold the same earlier weights, only the difference is sent.
        """
        self._sends_deltas, self._bases = sends_deltas, dict[str, Identity]()  # node -> it holds
        self._told = False  # the user, of the first delta
        self._others_timeout_s = others_timeout_s
        self._spawn, self._settings, self._callbacks = spawn, settings, callbacks
        self._workers: dict[str, Worker] = {}  # distributors, by node
        self._folders: dict[str, str] = {}
        self._names: dict[str, str] = {}
        self._ends: defaultdict[str, deque[float]] = defaultdict(deque)  # node -> times
        self._nodes: dict[int, str] = {}  # engine -> its node
        self._copies: dict[str, WeightHandle] = {}  # node -> its copy of the newest weights
        self._numbers = itertools.count(1)
        self._group: tuple[list[Worker], str] = ([], "")
        self._sending = asyncio.Lock()

    def place_engine(self, engine: int, node: str) -> None:
        """Note that an engine was started on a node."""
        self._nodes[engine] = node

    def copy_for(self, engine: int, handle: WeightHandle) -> WeightHandle:
        """Return the handle that this engine can read; raise WeightsGone if its node has no copy."""
        if handle.kind != COLLECTIVE:
            return handle
        node = self._nodes[engine]
        if node not in handle.location:
            raise WeightsGone(f"weights of version {handle.version} have not reached node {node}")
        return replace(handle, kind="shared_memory", location=handle.location[node])

    async def copy_to_nodes(
        self, handle: WeightHandle, engines: Callable[[], list[int]]
    ) -> WeightHandle:
        """Copy weights to the nodes of these engines; return a handle with all copies.

        A node that cannot be reached gets no copy: `copy_for` raises for its engines.
        """
        async with self._sending:
            newest = next(iter(self._copies.values()), None)
            if newest is None or _identity(newest) != _identity(handle):
                self._copies = {}
            self._copies[handle.location["node"]] = handle
            for _ in range(_TIMES_SENT):
                needed = {self._nodes[engine] for engine in engines()}
                lacking = [
                    n
                    for n in sorted(needed - self._copies.keys())
                    if await self._has_distributor(n)
                ]
                if not lacking:
                    break
                await self._send(await self._sender(), lacking)
            copies = {node: copy.location for node, copy in self._copies.items()}
            return replace(handle, kind=COLLECTIVE, location=copies)

    async def _has_distributor(self, node: str) -> bool:
        """Start a distributor on a node that has none; return whether one runs."""
        if node in self._workers:
            return True
        name = self._names.setdefault(node, f"distributor-{len(self._names) + 1}")
        ends = self._ends[node]
        if len(ends) > self._settings.max_restarts:
            self._callbacks.note(f"{name}: it ended {len(ends)} times and is given up")
            return False
        try:
            worker = await self._spawn(name, node, self._folders.get(node, ""))
            self._folders[node] = await call_worker(worker, self._callbacks.waits, "folder")
        except (PenstockError, OSError) as error:
            self._count_end(node)
            self._callbacks.note(f"{name}: it cannot be started: {error}")
            return False
        self._workers[node] = worker
        self._bases.pop(node, None)  # it holds no weights yet
        self._callbacks.note(f"{name}: passes weights on, {worker.place}")
        return True

    async def _sender(self) -> str:
        """Return a node that holds the weights and can send them."""
        for node in list(self._copies):
            if await self._has_distributor(node):
                return node
            del self._copies[node]
        raise WeightsGone("no node is left that holds the newest weights")

    async def _send(self, sender: str, lacking: list[str]) -> None:
        """Broadcast the weights once; a member that fails gets no copy, and its distributor is ended."""
        members = [sender, *lacking]
        workers = [self._workers[node] for node in members]
        if self._group[0] != workers:
            self._group = (workers, f"group-{next(self._numbers)}")
        source, key, world = self._copies[sender], self._group[1], len(members)
        try:
            meeting = await self._ask(sender, "meeting")
        except WorkerDied as died:
            await self._fault(sender, died)
            return
        base = self._base(members)
        calls = [self._ask(sender, "send", source, key, meeting, world, base)] + [
            self._ask(node, "receive", source, key, meeting, rank, world, base)
            for rank, node in enumerate(lacking, 1)
        ]
        answers = await self._answers(calls)
        for node, answer in zip(members, answers, strict=True):
            if isinstance(answer, WeightHandle):
                self._copies[node] = answer
            elif answer is not None:
                self._bases.clear()  # send the whole weights next
                await self._fault(node, answer)
        if not any(isinstance(answer, BaseException) for answer in answers):
            self._bases.update(dict.fromkeys(members, _identity(source)))
            await self._tell_of_delta(sender, base)

    def _base(self, members: list[str]) -> Identity | None:
        """Return the weights that all members hold, for a delta; None: send the whole weights."""
        held = {self._bases.get(node) for node in members}
        return held.pop() if self._sends_deltas and len(held) == 1 else None

    async def _tell_of_delta(self, sender: str, base: Identity | None) -> None:
        if base is None or self._told:
            return
        with contextlib.suppress(
            WorkerDied
        ):  # the weights are there; the next sending finds it dead
            sent, whole = await self._ask(sender, "sent")
            self._told = True
            self._callbacks.note(
                f"weights: the first delta was {sent / 1e6:.3g} MB of {whole / 1e6:.3g} MB"
            )

    async def _answers(self, calls: Sequence[Awaitable[Any]]) -> list[Any]:
        """Return every result or error; TimeoutError for members that are silent after one failed."""
        tasks = [asyncio.ensure_future(call) for call in calls]
        try:
            _, waiting = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            if waiting:
                await asyncio.wait(waiting, timeout=self._others_timeout_s)
            return [
                (task.exception() or task.result()) if task.done() else TimeoutError()
                for task in tasks
            ]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask(self, node: str, method: str, *args: Any) -> Any:
        return await call_worker(self._workers[node], self._callbacks.waits, method, *args)

    async def _fault(self, node: str, fault: BaseException) -> None:
        """End a member that died or was silent; raise if the weights are gone; ignore a lost peer."""
        self._group = ([], "")
        if isinstance(fault, WorkerDied | TimeoutError):
            await self._lost(node, str(fault) or f"{self._names[node]}: it did not answer")
        elif isinstance(fault, WeightsGone | PartFailed) or not isinstance(fault, RunError):
            raise fault

    async def _lost(self, node: str, reason: str) -> None:
        times = self._count_end(node)
        limit = self._settings.max_restarts
        self._callbacks.note(
            f"{reason}; starting it again to send the weights ({times} of {limit})"
        )
        await self._workers.pop(node).close()

    def _count_end(self, node: str) -> int:
        now, ends = loop_time(), self._ends[node]
        ends.append(now)
        while ends[0] < now - self._settings.restart_window_s:
            ends.popleft()
        return len(ends)

    async def close(self, trainer: Supervised) -> None:
        """Remove the copies and end the distributors; the next start removes what is left."""
        workers, self._workers = list(self._workers.values()), {}
        removing = [trainer.call("remove_weights"), *(one.call("remove") for one in workers)]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_REMOVE_TIMEOUT_S):
                await asyncio.gather(*removing, return_exceptions=True)
        await asyncio.gather(*(one.close() for one in workers))


def _identity(handle: WeightHandle) -> Identity:
    return handle.version, handle.digest
