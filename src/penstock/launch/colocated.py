"""A trainer that shares its devices with the engines: they take turns, memory and all.

    engines: pause, sleep | trainer: wake, train, sleep | publish | engines: load, wake, resume

Running responses finish before a turn and new ones wait, so taking turns loses nothing. Where no
publication follows a step the engines wake with what they had. A trainer that is started again takes
its turn first. What is moved to the host, and how, is the business of the parts.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from penstock.errors import WorkerDied
from penstock.pool.engines import Engines
from penstock.supervise.supervised import Supervised, nothing
from penstock.supervise.trainer import RestartingTrainer
from penstock.types import Batch, StepReport, WeightHandle

T = TypeVar("T")


class ColocatedTrainer(RestartingTrainer):
    """See `TrainerPart`. `publishes` tells whether `publish` follows a step."""

    def __init__(
        self,
        supervised: Supervised,
        engines: Engines,
        publishes: Callable[[int], bool],
        *,
        announces: bool = False,
    ) -> None:
        super().__init__(supervised, announces=announces)
        self._engines, self._publishes = engines, publishes
        self._handing_over = asyncio.Lock()
        self._has_devices = False  # the engines sleep
        self._works = False  # a call is under way that needs them
        self._comes_back = False  # it is being started again, and needs them
        self._weights_due = False  # the engines are to wake with new ones
        supervised.start_context = self._room
        supervised.when_back = self._came_back

    async def train(self, batch: Batch) -> StepReport:
        train = super().train
        report = await self._in_its_turn(lambda: train(batch))
        self._weights_due = self._publishes(batch.step)
        await self._give_devices()
        return report

    async def load(self, folder: str) -> tuple[int, str]:
        load = super().load
        identity = await self._in_its_turn(lambda: load(folder))
        await self._give_devices()
        return identity

    async def publish(self) -> WeightHandle:
        """After a step, the engines wake when they have loaded what this gives out."""
        handle = await super().publish()
        if self._weights_due:
            self._engines.when_loaded = self._wake_engines
        return handle

    async def _wake_engines(self) -> None:
        self._engines.when_loaded = nothing
        self._weights_due = False
        await self._give_devices()

    async def _in_its_turn(self, act: Callable[[], Awaitable[T]]) -> T:
        """What a worker has done that dies before it has given its memory back is done again."""
        self._works = True
        try:
            await self._take_devices()
            while True:
                try:
                    await self._supervised.call("wake")
                    done = await act()
                    await self._supervised.call("sleep")
                    return done
                except WorkerDied:
                    await self._supervised.ready()
        finally:
            self._works = False

    async def _take_devices(self, *, at_once: bool = False) -> None:
        async with self._handing_over:
            if not self._has_devices:
                await self._engines.pause("wait")
            await self._engines.sleep(at_once=at_once)
            self._has_devices = True

    async def _give_devices(self) -> None:
        async with self._handing_over:
            if self._works or self._comes_back:
                return  # they are given at the end of that
            self._engines.take_devices()
            if self._has_devices and not self._weights_due:
                await self._engines.wake()
                await self._engines.resume()
                self._has_devices = False

    @asynccontextmanager
    async def _room(self) -> AsyncIterator[None]:
        """To load the model and to redo steps; an engine that starts may wait for this very trainer."""
        self._comes_back = True
        await self._take_devices(at_once=True)
        yield

    async def _came_back(self) -> None:
        if not self._works:
            await self._supervised.call("sleep")
        self._comes_back = False
        await self._give_devices()
