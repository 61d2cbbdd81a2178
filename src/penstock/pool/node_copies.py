"""One copy of published weights on every node that has engines, before they are told of it.

The trainer has written its own node's copy. For each other node a distributor is started, once; they
receive the weights together, and engines read the copy of their node. A distributor that dies or does
not answer is started again (a bounded number of times) and the group meets anew; engines decode
on with the weights before all the while. On one machine there is nothing to do and nobody is started.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from penstock.config import LaunchConfig
from penstock.errors import PartFailed, PenstockError, RunError, WeightsGone, WorkerDied
from penstock.supervise.supervised import Supervised, SupervisionCallbacks, call_worker
from penstock.supervise.worker import Worker
from penstock.types import WeightHandle

Spawn = Callable[[str, str, str], Awaitable[Worker]]  # name, node, folder of the one before
COLLECTIVE = "collective"  # the kind of a handle with a copy on several nodes
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
    ) -> None:
        """`others_timeout_s`: within it, members learn of one that failed, or count as gone too."""
        self._others_timeout_s = others_timeout_s
        self._spawn, self._settings, self._callbacks = spawn, settings, callbacks
        self._workers: dict[str, Worker] = {}  # distributors, by node
        self._folders: dict[str, str] = {}
        self._names: dict[str, str] = {}
        self._ends: defaultdict[str, deque[float]] = defaultdict(deque)
        self._engines: dict[int, str] = {}  # the node of each
        self._copies: dict[str, WeightHandle] = {}  # of the newest weights, by node
        self._numbers = itertools.count(1)
        self._group: tuple[list[Worker], str] = ([], "")
        self._sending = asyncio.Lock()

    def place_engine(self, engine: int, node: str) -> None:
        """An engine was started there."""
        self._engines[engine] = node

    def copy_for(self, engine: int, handle: WeightHandle) -> WeightHandle:
        """The handle that this engine can read."""
        if handle.kind != COLLECTIVE:
            return handle
        node = self._engines[engine]
        if node not in handle.location:
            raise WeightsGone(f"weights of version {handle.version} have not reached node {node}")
        return replace(handle, kind="shared_memory", location=handle.location[node])

    async def copy_to_nodes(
        self, handle: WeightHandle, engines: Callable[[], list[int]]
    ) -> WeightHandle:
        """Waits until the nodes of these engines have a copy; one that cannot be reached stays out.

        Engines there find no copy of theirs, and whether they are alive is asked then.
        """
        async with self._sending:
            newest = next(iter(self._copies.values()), None)
            if newest is None or _identity(newest) != _identity(handle):
                self._copies = {}
            self._copies[handle.location["node"]] = handle
            for _ in range(_TIMES_SENT):
                needed = {self._engines[engine] for engine in engines()}
                lacking = [n for n in sorted(needed - self._copies.keys()) if await self._starts(n)]
                if not lacking:
                    break
                await self._send(await self._sender(), lacking)
            copies = {node: copy.location for node, copy in self._copies.items()}
            return replace(handle, kind=COLLECTIVE, location=copies)

    async def _starts(self, node: str) -> bool:
        """Whether a distributor runs there, from now on if not before."""
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
        self._callbacks.note(f"{name}: passes weights on, {worker.place}")
        return True

    async def _sender(self) -> str:
        """A node that holds the weights and can send them: the trainer's, or any other."""
        for node in list(self._copies):
            if await self._starts(node):
                return node
            del self._copies[node]
        raise WeightsGone("no node is left that holds the newest weights")

    async def _send(self, sender: str, lacking: list[str]) -> None:
        """One broadcast. Who received it has a copy; who failed is asked again by the caller."""
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
        calls = [self._ask(sender, "send", source, key, meeting, world)] + [
            self._ask(node, "receive", source, key, meeting, rank, world)
            for rank, node in enumerate(lacking, 1)
        ]
        for node, answer in zip(members, await self._answers(calls), strict=True):
            if isinstance(answer, WeightHandle):
                self._copies[node] = answer
            elif answer is not None:
                await self._fault(node, answer)

    async def _answers(self, calls: Sequence[Awaitable[Any]]) -> list[Any]:
        """Every result or error. Members that still wait long after one failed count as gone."""
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

    async def _ask(self, node: str, method: str, *args: Any) -> Any:
        return await call_worker(self._workers[node], self._callbacks.waits, method, *args)

    async def _fault(self, node: str, fault: BaseException) -> None:
        """What a failed member means: it is gone, the weights are, or another member is."""
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
        now, ends = time.monotonic(), self._ends[node]
        ends.append(now)
        while ends[0] < now - self._settings.restart_window_s:
            ends.popleft()
        return len(ends)

    async def close(self, trainer: Supervised) -> None:
        """Memory of the nodes is given back; who does not answer leaves it to the next start."""
        workers, self._workers = list(self._workers.values()), {}
        removing = [trainer.call("remove_weights"), *(one.call("remove") for one in workers)]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_REMOVE_TIMEOUT_S):
                await asyncio.gather(*removing, return_exceptions=True)
        await asyncio.gather(*(one.close() for one in workers))


def _identity(handle: WeightHandle) -> tuple[int, str]:
    return handle.version, handle.digest
