"""The weights of a pool: the newest ones, and a copy of them on every node.

`NodeCopies` brings weights to the nodes of the engines first; the trainer is asked to publish weights
again that can no longer be read. Which engines load, and what happens to one that dies in a load, belongs
to `pool.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import TypeVar

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
Renew = Callable[[WeightHandle], Awaitable[WeightHandle]]
Spawn = Callable[[str, str, str], Awaitable[Worker]]  # name, node, folder of its predecessor
_TIMES_RECEIVED = 5
_FAN_OUT = 2  # nodes that one node sends to at the same time
_REMEMBERED = 64  # confirmed weights
_TIMES_RENEWED = 3  # the run fails if weights cannot be read after so many publications
_ANSWER_TIMEOUT_S = 10.0  # of a sender that a receiver did not hear
_REMOVE_TIMEOUT_S = 30.0


class NodeCopies:
    """Consumes the trainer's handles, produces handles that engines of every node can read.

    The trainer writes the copy of its own node. The distributor of every other node receives its copy from a
    node that has one, and passes it on: a tree that forms by itself, as each copy goes to the next node that
    lacks one. A node that dies or does not answer delays only itself, and a node whose sender died
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
        identity = (handle.version, handle.digest)
        if self._newest is None or self._newest[0] <= handle.version:
            if self._newest != identity:
                self._newest, self._copies = identity, {}
            self._copies[handle.location["node"]] = handle
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

    def _check_newest(self, handle: WeightHandle) -> None:
        if self._newest != (handle.version, handle.digest):
            raise WeightsGone(f"weights of version {handle.version} were replaced by newer ones")

    @contextlib.asynccontextmanager
    async def _sender(self, handle: WeightHandle) -> AsyncIterator[str]:
        """Reserve a node that holds the weights.

        Waits for: a node that sends to few others. Woken by: copies that arrive, sendings that end.
        """
        while not (sender := await self._free_sender()):
            self._changed.clear()
            await self._changed.wait()
            self._check_newest(handle)
        self._sends[sender] += 1
        try:
            yield sender
        finally:
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
        source = self._copies.get(sender)
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
            distributor = self._distributors[sender]
            try:
                async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                    await distributor.call("endpoint")
            except TimeoutError:
                await distributor.replace("it did not answer")
            except WorkerDied:
                pass  # its supervision starts it again
            return
        if (copy.version, copy.digest) == self._newest:
            self._copies[node] = copy
        if num_bytes < (size := source.location["size"]) and not self._has_told_of_delta:
            self._has_told_of_delta = True
            sent = f"{num_bytes / 1e6:.3g} MB of {size / 1e6:.3g} MB"
            self._callbacks.note(f"weights: the first delta was {sent}")

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

        An engine may still ask for a copy: none is sent any more.
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
        self._renewing = asyncio.Lock()  # engines that miss the same weights renew them once

    def publish(self, handle: WeightHandle) -> None:
        self.handle, self._times_renewed = handle, 0

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
        """Take tokens as the confirmation of a load whose answer is lost or comes later.

        An engine labels tokens with a version only after it has compared the digest. Without this a
        run that ends here would have trained tokens of weights that no engine confirmed.
        """
        versions = {segment.version for answer in answers for segment in answer.segments}
        if loading.version in versions:
            self._confirm(loading.version, loading.digest)

    def _confirm(self, version: int, digest: str) -> None:
        if (version, digest) not in self._confirmed:  # several engines confirm them
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


def _is_in(handle: WeightHandle, engine: Engine) -> bool:
    """Whether an engine has these weights, or newer ones."""
    held = engine.loaded
    return held is not None and (
        held[0] > handle.version or held == (handle.version, handle.digest)
    )
