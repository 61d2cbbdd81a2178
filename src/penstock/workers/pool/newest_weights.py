"""The newest weights of a pool: owns their handle and loads them into one engine.

Copies weights to the nodes of the engines first (`node_copies.py`), and asks the trainer to publish
weights again that can no longer be read. Which engines load, and when, belongs to `pool.py`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import TypeVar

from penstock.engine.protocol import Generation
from penstock.errors import EngineError, WeightsGone
from penstock.types import WeightHandle
from penstock.workers.pool.engine import Engine
from penstock.workers.pool.node_copies import NodeCopies
from penstock.workers.supervise.supervised import Call

T = TypeVar("T")
Renew = Callable[[WeightHandle], Awaitable[WeightHandle]]
_REMEMBERED = 64  # confirmed weights; more than an engine can be late
_TIMES_RENEWED = 3  # the run fails if weights cannot be read after so many publications


class NewestWeights:
    """Consumes published handles, produces engines that have loaded them."""

    def __init__(
        self,
        copies: NodeCopies | None,
        renew: Renew | None,
        confirmed: Callable[[int, str], None] = lambda version, digest: None,
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
        """Return whether an engine has loaded the newest weights."""
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

    def sampled(self, engine: Engine, made: list[Generation]) -> None:
        """Take tokens as the confirmation of a load whose answer is late or lost.

        An engine labels tokens with a version only after it has compared the digest. Without this a
        run that ends here would have trained tokens of weights that no engine confirmed.
        """
        handle = engine.loading
        if handle is not None and any(
            segment.version == handle.version for one in made for segment in one.segments
        ):
            self._confirm(handle.version, handle.digest)

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
    """Return whether an engine has these weights, or newer ones."""
    held = engine.loaded
    return held is not None and (
        held[0] > handle.version or held == (handle.version, handle.digest)
    )
