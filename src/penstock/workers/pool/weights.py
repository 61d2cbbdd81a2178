"""The weights of a pool: the newest ones, a copy of them on every node, and how several engines load them.

`NodeCopies` brings weights to the nodes of the engines first; the trainer is asked to publish weights
again that can no longer be read. A publication waits for an engine up to twice as long as the
first engine took. An engine that takes longer goes on alone: it takes no requests that need the new weights,
loads the newest ones when its load ends, and no publication waits for it. Which engines load, and what
happens to one that dies in a load, belongs to `pool.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, TypeVar

from penstock.config import LaunchConfig
from penstock.engine.protocol import Generation
from penstock.errors import (
    EngineError,
    PartFailed,
    PenstockError,
    RunError,
    WeightsGone,
    WorkerDied,
)
from penstock.types import WeightHandle
from penstock.waits import end_all, loop_time
from penstock.weights.protocol import Endpoint
from penstock.workers.pool.requests import Engine
from penstock.workers.supervise.supervised import (
    Call,
    Restarts,
    Supervised,
    SupervisionCallbacks,
    Worker,
)

T = TypeVar("T")
Digests = list[str]  # of one engine: its digest, or nothing if it died
Renew = Callable[[WeightHandle], Awaitable[WeightHandle]]
Spawn = Callable[[str, str, str], Awaitable[Worker]]  # name, node, folder of its predecessor
_TIMES_RECEIVED = 5
_FAN_OUT = 2  # nodes that one node sends to at the same time
_PATIENCE = (
    2.0  # a sending or load that takes so many times as long as the fastest is not waited for
)
_LEAST_WAIT_S = 0.05  # at least so long after the first load: short loads differ by chance
_REMEMBERED = 64  # confirmed weights; more than an engine can be late
_TIMES_RENEWED = 3  # the run fails if weights cannot be read after so many publications
_ANSWER_TIMEOUT_S = 10.0  # of a sender that a receiver did not hear
_REMOVE_TIMEOUT_S = 30.0


class NodeCopies:
    """Consumes the trainer's handles, produces handles that engines of every node can read.

    The trainer writes the copy of its own node. The distributor of every other node receives its copy from a
    node that has one, and passes it on: a tree that forms by itself, as each copy goes to the next node that
    lacks one. A node that is slow, dies or does not answer delays only itself, and a node whose sender died
    receives from another. Distributors are supervised like engines; engines keep decoding with the weights
    that they have meanwhile. On one machine none is started.
    """

    def __init__(
        self, spawn: Spawn, settings: LaunchConfig, callbacks: SupervisionCallbacks
    ) -> None:
        self.supervised: dict[str, Supervised] = {}  # distributors, by name
        self._spawn, self._settings, self._callbacks = spawn, settings, callbacks
        self._nodes: dict[int, str] = {}  # engine -> its node
        self._names: dict[str, str] = {}  # node -> name of its distributor
        self._distributors: dict[str, Supervised] = {}  # by node
        self._endpoints: dict[str, Endpoint] = {}  # node -> where its distributor serves
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # of a node's copy
        self._starts: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._newest: tuple[int, str] | None = None  # version and digest
        self._copies: dict[str, WeightHandle] = {}  # node -> its copy of the newest weights
        self._sends: Counter[str] = Counter()  # sender -> nodes that it sends to
        self._fastest_s = 0.0  # of all sendings; 0: none has ended
        self._changed = asyncio.Event()  # a sender is free, or a node has a copy
        self._has_told_of_delta = self._closed = False

    def place_engine(self, engine: int, node: str) -> None:
        """Note that an engine was started on a node."""
        self._nodes[engine] = node

    async def copy_for(self, engine: int, handle: WeightHandle) -> WeightHandle:
        """The copy that this engine can read; wait until its node has one.

        Raise WeightsGone if the node cannot be reached, or newer weights came meanwhile.
        """
        node = self._nodes[engine]
        self._note_published(handle)
        async with self._locks[node]:
            for _ in range(_TIMES_RECEIVED):
                self._check_newest(handle)
                if node in self._copies or not await self._has_distributor(node):
                    break
                async with self._sender(handle) as sender:
                    await self._receive(node, sender)
            self._check_newest(handle)
            if node in self._copies:
                return self._copies[node]
        raise WeightsGone(f"weights of version {handle.version} have not reached node {node}")

    def _note_published(self, handle: WeightHandle) -> None:
        """Begin to spread a new publication; forget the copies of the one before."""
        identity = (handle.version, handle.digest)
        if self._newest is not None and self._newest[0] > handle.version:
            return
        if self._newest != identity:
            self._newest, self._copies = identity, {}
        self._copies[handle.location["node"]] = handle

    def _check_newest(self, handle: WeightHandle) -> None:
        if self._newest != (handle.version, handle.digest):
            raise WeightsGone(f"weights of version {handle.version} were replaced by newer ones")

    @contextlib.asynccontextmanager
    async def _sender(self, handle: WeightHandle) -> AsyncIterator[str]:
        """Reserve a node that holds the weights; a slow receiver does not keep its sender from others.

        Waits for: a node that sends to few others. Woken by: copies that arrive, sendings that end.
        """
        while not (sender := await self._free_sender()):
            self._changed.clear()
            await self._changed.wait()
            self._check_newest(handle)
        reserved = contextlib.ExitStack()
        reserved.callback(self._release, sender)
        self._sends[sender] += 1
        slow = None
        if self._fastest_s:
            loop = asyncio.get_running_loop()
            slow = loop.call_later(_PATIENCE * self._fastest_s, reserved.close)
        try:
            yield sender
        finally:
            if slow is not None:
                slow.cancel()
            reserved.close()

    def _release(self, sender: str) -> None:
        self._sends[sender] -= 1
        self._changed.set()

    async def _free_sender(self) -> str:
        """A node that can send now; empty if all are busy."""
        while self._copies:
            sender = min(self._copies, key=lambda node: self._sends[node])
            if self._sends[sender] >= _FAN_OUT:
                return ""
            if await self._has_distributor(sender):
                return sender if self._sends[sender] < _FAN_OUT else ""
            self._copies.pop(sender, None)
        raise WeightsGone("no node is left that holds the newest weights")

    async def _receive(self, node: str, sender: str) -> None:
        """Receive the weights once; without success the node gets no copy."""
        source, began = self._copies.get(sender), loop_time()
        if source is None:  # newer weights came, or its node was lost
            return
        receiver = self._distributors[node]
        try:
            copy, num_bytes = await receiver.call("receive", source, self._endpoints[sender])
        except (WeightsGone, PartFailed):
            raise
        except WorkerDied:
            return
        except RunError:
            await self._check_alive(sender)
            return
        seconds = loop_time() - began
        self._fastest_s = min(self._fastest_s or seconds, seconds)
        if (copy.version, copy.digest) == self._newest:
            self._copies[node] = copy
        if num_bytes < (size := source.location["size"]) and not self._has_told_of_delta:
            self._has_told_of_delta = True
            sent = f"{num_bytes / 1e6:.3g} MB of {size / 1e6:.3g} MB"
            self._callbacks.note(f"weights: the first delta was {sent}")

    async def _check_alive(self, node: str) -> None:
        """Replace a sender that a receiver did not hear, if it does not answer here either."""
        distributor = self._distributors[node]
        try:
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                await distributor.call("endpoint")
        except TimeoutError:
            await distributor.replace("it did not answer")
        except WorkerDied:
            pass  # its supervision starts it again

    async def _has_distributor(self, node: str) -> bool:
        """Start a distributor on a node that has none; return whether one runs."""
        async with self._starts[node]:
            try:
                if node not in self._distributors:
                    await self._start(node)
                await self._distributors[node].ready()
            except (PenstockError, OSError) as error:
                if not self._closed:
                    self._callbacks.note(f"weights do not reach node {node}: {error}")
                return False
            return True

    async def _start(self, node: str) -> None:
        if self._closed:
            raise WorkerDied(f"node {node}: the run ends")
        name = self._names.setdefault(node, f"distributor-{len(self._names) + 1}")

        async def spawn() -> Worker:
            known = self._endpoints.get(node)
            return await self._spawn(name, node, known.folder if known else "")

        async def learn_endpoint(call: Call) -> None:
            self._endpoints[node] = await call("endpoint")

        distributor = Supervised(name, spawn, self._settings, self._callbacks)
        distributor.restart_with(Restarts(prepare=learn_endpoint))
        await distributor.start()
        self.supervised[name] = self._distributors[node] = distributor
        await learn_endpoint(distributor.call)
        place = distributor.worker.place if distributor.worker else "nowhere"
        self._callbacks.note(f"{name}: passes weights on, {place}")

    async def close(self, *publishers: Supervised) -> None:
        """Remove the copies and end the distributors; the next start removes what is left.

        A late engine may still ask for a copy: none is sent any more.
        """
        self._closed = True
        distributors = list(self._distributors.values())
        removing = [part.call("remove_weights") for part in publishers]
        removing += [part.call("remove") for part in distributors]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_REMOVE_TIMEOUT_S):
                await asyncio.gather(*removing, return_exceptions=True)
        await asyncio.gather(*(part.close() for part in distributors))


class NewestWeights:
    """Consumes published handles, produces engines that have loaded them."""

    def __init__(
        self,
        copies: NodeCopies | None,
        renew: Renew | None,
        confirmed: Callable[[int, str], None],
    ) -> None:
        """copies: needed if engines are on several nodes. renew: publishes weights again.

        confirmed: called once for each version and digest that an engine has.
        """
        self.handle: WeightHandle | None = None
        self._copies, self._renew, self._when_confirmed = copies, renew, confirmed
        self._confirmed = deque[tuple[int, str]](maxlen=_REMEMBERED)
        self._times_renewed = 0
        self.is_ahead = False  # the handle is of a later version than the one that was published
        self._renewing = asyncio.Lock()  # engines that miss the same weights renew them once

    def publish(self, handle: WeightHandle) -> None:
        self.handle, self._times_renewed, self.is_ahead = handle, 0, False

    def are_in(self, engine: Engine) -> bool:
        """Whether an engine has loaded the newest weights."""
        return self.handle is None or _is_in(self.handle, engine)

    async def load_newest(self, engine: Engine, call: Call) -> None:
        """Load the newest weights, if there are any, into one engine."""
        if self.handle is not None:
            await self.load(engine, self.handle, call)

    async def load(self, engine: Engine, handle: WeightHandle, call: Call) -> str:
        """Load weights into one engine, unless it has them or newer ones; return its digest.

        Its node gets a copy first, if it has none.
        """
        if engine.loaded is not None and _is_in(handle, engine):
            return engine.loaded[1]
        if self._copies is not None:
            handle = await self._copies.copy_for(engine.index, handle)
            if engine.loaded is not None and _is_in(handle, engine):  # it was restarted meanwhile
                return engine.loaded[1]
        engine.loaded = None
        engine.loading = handle
        try:
            digest: str = await call("update_weights", handle.version, handle)
        finally:
            engine.loading = None
        engine.loaded = (handle.version, digest)
        self._confirm(handle.version, digest)
        return digest

    def sampled(self, loading: WeightHandle, answers: list[Generation]) -> None:
        """Take tokens as the confirmation of a load whose answer is late or lost.

        An engine labels tokens with a version only after it has compared the digest. Without this a
        run that ends here would have trained tokens of weights that no engine confirmed.
        """
        versions = {segment.version for answer in answers for segment in answer.segments}
        if loading.version in versions:
            self._confirm(loading.version, loading.digest)

    def _confirm(self, version: int, digest: str) -> None:
        if (version, digest) not in self._confirmed:  # a late engine confirms older ones again
            self._confirmed.append((version, digest))
            self._when_confirmed(version, digest)

    async def renewing(
        self,
        load: Callable[[], Awaitable[T]],
        waiting: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
    ) -> T:
        """Repeat `load` until the newest weights can be read; publish them again in between.

        waiting: entered while the trainer is waited for.
        """
        while True:
            newest = self.handle
            try:
                return await load()
            except WeightsGone:
                async with waiting(), self._renewing:
                    if newest is not None and newest is self.handle:  # none were published since
                        await self._renew_once(newest)

    async def _renew_once(self, newest: WeightHandle) -> None:
        self._times_renewed += 1
        if self._renew is None or self._times_renewed > _TIMES_RENEWED:
            line = f"weights of version {newest.version} cannot be read by all engines"
            raise EngineError(line) from None
        renewed = await self._renew(newest)
        if newest is self.handle:
            self.handle = renewed
            self.is_ahead = self.is_ahead or renewed.version > newest.version


def _is_in(handle: WeightHandle, engine: Engine) -> bool:
    """Whether an engine has these weights, or newer ones."""
    held = engine.loaded
    return held is not None and (
        held[0] > handle.version or held == (handle.version, handle.digest)
    )


class Loads:
    """Consumes an engine's loads, produces the digests of those that loaded in time."""

    def __init__(
        self,
        catch_up: Callable[[Engine, asyncio.Task[Digests]], Coroutine[Any, Any, None]],
        note: Callable[[str], None],
    ) -> None:
        """catch_up: awaits a late load, then loads the newest weights; raises nothing."""
        self._catch_up, self._note = catch_up, note
        self._late: dict[Engine, asyncio.Task[None]] = {}  # engines that catch up
        self._told: set[Engine] = set()  # late engines that the user was told of

    async def together(
        self,
        engines: list[Engine],
        load: Callable[[Engine], Coroutine[Any, Any, Digests]],
        tell: Callable[[str], None] | None,
        *,
        may_leave: bool,
    ) -> Digests:
        """Load into all engines that are not late; raise the first error after all have answered.

        tell: if given, called with a digest when all have loaded, or when the first has waited long enough.
        may_leave: whether an engine may be late.
        """
        began = loop_time()
        for engine in self._late if may_leave else ():
            if engine not in self._told:
                self._told.add(engine)
                self._note(f"{engine.name}: it is late with new weights; the others go on alone")
        tasks = {
            asyncio.create_task(load(engine), name=f"load {engine.name}"): engine
            for engine in engines
            if engine not in self._late
        }
        try:
            waiting = await self._in_time(set(tasks), began)
            if (first := next(filter(_succeeded, tasks), None)) is not None:
                if tell is not None:
                    tell(first.result()[0])
                for task in waiting if may_leave else ():
                    self._leave(tasks.pop(task), task)
            answers = await asyncio.gather(*tasks, return_exceptions=True)
            if self._late and not (may_leave and tasks):
                await asyncio.wait(self._late.values())
        except BaseException:  # cancelled: no load may outlive it
            await end_all(tasks)
            raise
        digests: Digests = []
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
            digests += answer
        return digests

    async def _in_time(
        self, waiting: set[asyncio.Task[Digests]], began: float
    ) -> set[asyncio.Task[Digests]]:
        """Wait until every load has ended, or for twice the time of the first; the loads that still run."""
        ends: float | None = None
        while waiting:
            left = None if ends is None else max(0.0, ends - loop_time())
            done, waiting = await asyncio.wait(
                waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                break
            if ends is None and any(map(_succeeded, done)):
                took = loop_time() - began
                ends = began + max(_PATIENCE * took, took + _LEAST_WAIT_S)
        return waiting

    def _leave(self, engine: Engine, loading: asyncio.Task[Digests]) -> None:
        """Let an engine catch up; nobody waits for it."""
        task = asyncio.create_task(
            self._catch_up(engine, loading), name=f"{engine.name} catches up"
        )
        self._late[engine] = task
        task.add_done_callback(lambda _: self._late.pop(engine))

    async def close(self) -> None:
        """Give up the loads that are under way."""
        await end_all(self._late.values())


def _succeeded(task: asyncio.Task[Digests]) -> bool:
    """Whether a load has ended and its engine lives."""
    return task.done() and not task.cancelled() and not task.exception() and bool(task.result())
