"""The weights of a pool: the newest ones, and how several engines load them at once.

Copies weights to the nodes of the engines first (`node_copies.py`), and asks the trainer to publish
weights again that can no longer be read. A publication waits for an engine up to twice as long as the
first engine took. An engine that takes longer goes on alone: it takes no requests that need the new weights,
loads the newest ones when its load ends, and no publication waits for it. Which engines load, and what
happens to one that dies in a load, belongs to `pool.py`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, TypeVar

from penstock.engine.protocol import Generation
from penstock.errors import EngineError, WeightsGone
from penstock.types import WeightHandle
from penstock.waits import end_all, loop_time
from penstock.workers.pool.node_copies import NodeCopies
from penstock.workers.pool.requests import Engine
from penstock.workers.supervise.supervised import Call

T = TypeVar("T")
Renew = Callable[[WeightHandle], Awaitable[WeightHandle]]
_REMEMBERED = 64  # confirmed weights; more than an engine can be late
_TIMES_RENEWED = 3  # the run fails if weights cannot be read after so many publications
_PATIENCE = 2.0  # wait so many times as long as the first load took,
_LEAST_WAIT_S = 0.05  # and at least so long after it: short loads differ by chance
Digests = list[str]  # of one engine: its digest, or nothing if it died


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
