"""One copy of the published weights on every node that has engines.

The trainer writes the copy of its own node. Every other node gets its copy from a node that has
one, through the distributors of both, and passes it on: a tree that forms by itself, as each copy
goes to the next node that lacks one. A node depends on nobody but its sender: a node that is slow,
dies or does not answer delays only itself, and one whose sender died asks another. A distributor is
restarted a bounded number of times; engines keep decoding with the weights that they have
meanwhile. On one machine none is started.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from penstock.config import LaunchConfig
from penstock.errors import PartFailed, PenstockError, RunError, WeightsGone, WorkerDied
from penstock.types import WeightHandle
from penstock.waits import loop_time
from penstock.workers.supervise.supervised import (
    RESTART_WINDOW_S,
    Supervised,
    SupervisionCallbacks,
    call_worker,
)
from penstock.workers.supervise.worker import Worker

Spawn = Callable[[str, str, str], Awaitable[Worker]]  # name, node, folder of its predecessor
Identity = tuple[int, str]  # version and digest of weights
_TIMES_SENT = 5
_FAN_OUT = 2  # nodes that one node sends to at the same time
_PATIENCE = 2.0  # a sending that takes so many times as long as the fastest holds up no other
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
        self._sends_deltas, self._told = sends_deltas, False  # the user, of the first delta
        self._others_timeout_s = others_timeout_s
        self._spawn, self._settings, self._callbacks = spawn, settings, callbacks
        self._workers: dict[str, Worker] = {}  # distributors, by node
        self._folders: dict[str, str] = {}
        self._names: dict[str, str] = {}
        self._ends: defaultdict[str, deque[float]] = defaultdict(deque)  # node -> times
        self._nodes: dict[int, str] = {}  # engine -> its node
        self._starts: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # of a distributor
        self._receives: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._groups: dict[tuple[str, str], tuple[Worker, Worker, str]] = {}  # sender, receiver
        self._numbers = itertools.count(1)
        self._newest: Identity | None = None
        self._copies: dict[str, WeightHandle] = {}  # node -> its copy of the newest weights
        self._mute: set[str] = set()  # nodes with a copy that cannot send it
        self._bases: dict[str, Identity] = {}  # node -> weights that its distributor holds
        self._deltas: dict[str, Identity] = {}  # node -> weights to which it has the newest delta
        self._sends: Counter[str] = Counter()  # sender -> nodes that it sends to
        self._waiting: list[str] = []  # nodes that wait for a sender
        self._took_s: dict[str, float] = {}  # node -> seconds of its last copy
        self._changed = asyncio.Event()  # a sender is free, or a node has a copy
        self._closed = False

    def place_engine(self, engine: int, node: str) -> None:
        """Note that an engine was started on a node."""
        self._nodes[engine] = node

    async def copy_for(self, engine: int, handle: WeightHandle) -> WeightHandle:
        """Return the copy that this engine can read; wait until its node has one.

        Raise WeightsGone if the node cannot be reached, or newer weights came meanwhile.
        """
        node = self._nodes[engine]
        self._note_published(handle)
        async with self._receives[node]:
            for _ in range(_TIMES_SENT):
                self._check_newest(handle)
                if node in self._copies:
                    return self._copies[node]
                if not await self._has_distributor(node):
                    break
                async with self._sender(node, handle) as sender:
                    await self._send(sender, node)
            self._check_newest(handle)
            if node in self._copies:
                return self._copies[node]
        raise WeightsGone(f"weights of version {handle.version} have not reached node {node}")

    def _note_published(self, handle: WeightHandle) -> None:
        """Begin to spread a new publication; forget the copies of the one before."""
        if self._newest is not None and self._newest[0] > handle.version:
            return
        if self._newest != _identity(handle):
            self._newest, self._copies = _identity(handle), {}
            self._mute.clear()
            self._deltas.clear()
        self._copies[handle.location["node"]] = handle

    def _check_newest(self, handle: WeightHandle) -> None:
        if self._newest != _identity(handle):
            raise WeightsGone(f"weights of version {handle.version} were replaced by newer ones")

    @contextlib.asynccontextmanager
    async def _sender(self, node: str, handle: WeightHandle) -> AsyncIterator[str]:
        """Reserve a node that holds the weights; a slow receiver does not keep its sender from others.

        Waits for: a node that sends to few others. Woken by: copies that arrive, sendings that end.
        """
        self._waiting.append(node)
        try:
            while not (sender := await self._free_sender(node)):
                self._changed.clear()
                await self._changed.wait()
                self._check_newest(handle)
        finally:
            self._waiting.remove(node)
            self._changed.set()
        reserved = contextlib.ExitStack()
        reserved.callback(self._release, sender)
        self._sends[sender] += 1
        fastest_s = min(self._took_s.values(), default=None)
        began = loop_time()
        slow = fastest_s and asyncio.get_running_loop().call_later(
            _PATIENCE * fastest_s, reserved.close
        )
        try:
            yield sender
        finally:
            if slow:
                slow.cancel()
            reserved.close()
        if node in self._copies:
            self._took_s[node] = loop_time() - began

    def _release(self, sender: str) -> None:
        self._sends[sender] -= 1
        self._changed.set()

    async def _free_sender(self, node: str) -> str:
        """Return a node that can send now; empty if none can, or if a faster node waits too."""
        if node != min(self._waiting, key=lambda one: self._took_s.get(one, 0.0)):
            return ""
        able = [one for one in self._copies if one not in self._mute]
        for sender in sorted(
            able, key=lambda one: ((one, node) not in self._groups, self._sends[one])
        ):
            if self._sends[sender] < _FAN_OUT:
                if await self._has_distributor(sender):
                    return sender if self._sends[sender] < _FAN_OUT else ""
                self._mute.add(sender)
        if self._mute.issuperset(self._copies):
            raise WeightsGone("no node is left that holds the newest weights")
        return ""

    async def _has_distributor(self, node: str) -> bool:
        """Start a distributor on a node that has none; return whether one runs."""
        async with self._starts[node]:
            return node in self._workers or (not self._closed and await self._start(node))

    async def _start(self, node: str) -> bool:
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
        self._forget_held(node)
        self._callbacks.note(f"{name}: passes weights on, {worker.place}")
        return True

    def _forget_held(self, node: str) -> None:
        """Note that a distributor holds no weights for a delta."""
        self._bases.pop(node, None)
        self._deltas.pop(node, None)

    async def _send(self, sender: str, node: str) -> None:
        """Send the weights once; a member that fails is ended, and the node gets no copy."""
        members = [(one, self._workers.get(one)) for one in (sender, node)]
        if any(worker is None for _, worker in members):  # lost while another sending ended
            return
        source, key, base = (
            self._copies[sender],
            self._group(sender, node),
            self._base(sender, node),
        )
        sending, receiving = (partial(self._ask, worker) for _, worker in members if worker)
        try:
            meeting = await sending("meeting")
        except WorkerDied as died:
            await self._fault(*members[0], died)
            return
        how = (source, key, meeting, base)
        answers = await self._answers([sending("send", *how), receiving("receive", *how)])
        faults = [
            (*member, answer)
            for member, answer in zip(members, answers, strict=True)
            if isinstance(answer, BaseException)
        ]
        if not faults:
            self._has_copy(sender, node, answers[1], base)
            if base is not None and not self._told:
                self._tell_of_delta(answers[0], source.location["size"])
        if faults:
            self._groups.pop((sender, node), None)
            self._forget_held(sender)
            self._forget_held(node)
        for member, worker, fault in faults:
            await self._fault(member, worker, fault)

    def _has_copy(self, sender: str, node: str, copy: WeightHandle, base: Identity | None) -> None:
        """Note a copy that has arrived; only what is newer than the held weights is held."""
        identity = _identity(copy)
        for member in (sender, node):
            if self._bases.get(member, identity)[0] <= identity[0]:
                self._bases[member] = identity
                if identity == self._newest and base is not None:
                    self._deltas[member] = base
        if identity == self._newest:
            self._copies[node] = copy

    def _group(self, sender: str, node: str) -> str:
        """Return the name of the group of two nodes; a new one after a restart or a fault."""
        pair = (self._workers[sender], self._workers[node])
        known = self._groups.get((sender, node))
        if known is None or known[:2] != pair:
            known = (*pair, f"{sender}-{node}-{next(self._numbers)}")
            self._groups[sender, node] = known
        return known[2]

    def _base(self, sender: str, node: str) -> Identity | None:
        """Return the weights that a delta builds on; None: send the whole weights."""
        held = self._bases.get(node)
        known = (self._bases.get(sender), self._deltas.get(sender))
        return held if self._sends_deltas and held != self._newest and held in known else None

    def _tell_of_delta(self, sent: int, whole: int) -> None:
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

    async def _ask(self, worker: Worker, method: str, *args: Any) -> Any:
        return await call_worker(worker, self._callbacks.waits, method, *args)

    async def _fault(self, node: str, worker: Worker | None, fault: BaseException) -> None:
        """End a member that died or was silent; raise if the weights are gone; ignore a lost peer."""
        if isinstance(fault, WorkerDied | TimeoutError):
            if self._workers.get(node) is worker:  # else another sending ended it already
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
        while ends[0] < now - RESTART_WINDOW_S:
            ends.popleft()
        return len(ends)

    async def close(self, trainer: Supervised) -> None:
        """Remove the copies and end the distributors; the next start removes what is left.

        A late engine may still ask for a copy: none is sent any more.
        """
        self._closed = True
        workers, self._workers = list(self._workers.values()), {}
        removing = [trainer.call("remove_weights"), *(one.call("remove") for one in workers)]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_REMOVE_TIMEOUT_S):
                await asyncio.gather(*removing, return_exceptions=True)
        await asyncio.gather(*(one.close() for one in workers))


def _identity(handle: WeightHandle) -> Identity:
    return handle.version, handle.digest
