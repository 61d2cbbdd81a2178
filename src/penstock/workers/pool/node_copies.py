"""One copy of the published weights on every node that has engines.

The trainer writes the copy of its own node. The distributor of every other node receives its copy from a
node that has one, and passes it on: a tree that forms by itself, as each copy goes to the next node that
lacks one. A node that is slow, dies or does not answer delays only itself, and a node whose sender died
receives from another. Distributors are supervised like engines; engines keep decoding with the weights that
they have meanwhile. On one machine none is started.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable

from penstock.config import LaunchConfig
from penstock.errors import PartFailed, PenstockError, RunError, WeightsGone, WorkerDied
from penstock.types import WeightHandle
from penstock.waits import loop_time
from penstock.weights.protocol import Endpoint
from penstock.workers.supervise.supervised import (
    Call,
    Restarts,
    Supervised,
    SupervisionCallbacks,
    Worker,
)

Spawn = Callable[[str, str, str], Awaitable[Worker]]  # name, node, folder of its predecessor
_TIMES_RECEIVED = 5
_FAN_OUT = 2  # nodes that one node sends to at the same time
_PATIENCE = 2.0  # a sending that takes so many times as long as the fastest holds up no other
_ANSWER_TIMEOUT_S = 10.0  # of a sender that a receiver did not hear
_REMOVE_TIMEOUT_S = 30.0


class NodeCopies:
    """Consumes the trainer's handles, produces handles that engines of every node can read."""

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

    async def close(self, trainer: Supervised) -> None:
        """Remove the copies and end the distributors; the next start removes what is left.

        A late engine may still ask for a copy: none is sent any more.
        """
        self._closed = True
        distributors = list(self._distributors.values())
        removing = [trainer.call("remove_weights"), *(part.call("remove") for part in distributors)]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_REMOVE_TIMEOUT_S):
                await asyncio.gather(*removing, return_exceptions=True)
        await asyncio.gather(*(part.close() for part in distributors))
