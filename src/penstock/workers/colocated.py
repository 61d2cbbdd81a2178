"""A trainer that shares its GPUs with the engines: each offloads to the host while the other works.

    engines: pause, sleep | trainer: wake, train, sleep | publish | engines: load, wake, resume

Running responses finish before the trainer takes the GPU and new ones wait, so no work is lost. If no
publication follows a step, the engines wake with the weights that they had. A trainer that is restarted
takes the GPU first. What is offloaded, and how, belongs to the parts.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from penstock.errors import WorkerDied
from penstock.types import Batch, StepReport, WeightHandle
from penstock.workers.pool.pool import EnginePool
from penstock.workers.supervise.trainer import RestartingTrainer, TrainerClient

T = TypeVar("T")


class ColocatedTrainer(TrainerClient):
    """See `TrainerClient`. `publishes` tells whether `publish` follows a step."""

    def __init__(
        self, trainer: RestartingTrainer, engines: EnginePool, publishes: Callable[[int], bool]
    ) -> None:
        super().__init__(trainer.call)
        self._trainer, self._supervised = trainer, trainer.supervised
        self._engines, self._publishes = engines, publishes
        self._handover = asyncio.Lock()
        self._engines_sleep = False
        self._needs_gpu = False  # a call that needs the GPU is under way
        self._restarting = False  # the worker needs the GPU to load the model and redo steps
        self._weights_due = False  # the engines wake after they have loaded new weights

    def restart_with(self, restore: Callable[[TrainerClient], Awaitable[None]]) -> None:
        """From now on, restart a trainer that dies; it takes the GPU first."""
        self._trainer.restart_with(restore, self._reserve_start, self._restarted)

    async def restored(self) -> None:
        await self._with_gpu(self._trainer.restored)
        await self._release_gpu()

    async def train(self, batch: Batch) -> StepReport:
        report = await self._with_gpu(lambda: self._trainer.train(batch))
        self._weights_due = self._publishes(batch.step)
        await self._release_gpu()
        return report

    async def load(self, folder: str) -> tuple[int, str]:
        identity = await self._with_gpu(lambda: self._trainer.load(folder))
        await self._release_gpu()
        return identity

    async def publish(self) -> WeightHandle:
        """Publish the weights. After a step, the engines wake when they have loaded them."""
        handle = await self._trainer.publish()
        if self._weights_due:
            self._engines.after_next_update(self._wake_engines)
        return handle

    async def write_snapshot(self) -> None:
        await self._trainer.write_snapshot()

    async def request_stop(self) -> None:
        await self._trainer.request_stop()

    async def close(self) -> None:
        await self._trainer.close()

    async def _wake_engines(self) -> None:
        self._weights_due = False
        await self._release_gpu()

    async def _with_gpu(self, act: Callable[[], Awaitable[T]]) -> T:
        """Do `act` while the engines sleep; repeat it if the worker dies before it has offloaded."""
        self._needs_gpu = True
        try:
            await self._acquire_gpu()
            while True:
                try:
                    await self._supervised.call("wake")
                    done = await act()
                    await self._supervised.call("sleep")
                    return done
                except WorkerDied:
                    await self._supervised.ready()
        finally:
            self._needs_gpu = False

    async def _acquire_gpu(self) -> None:
        async with self._handover:
            await self._engines.release_gpu()
            self._engines_sleep = True

    async def _release_gpu(self) -> None:
        """Let engines start and load; wake them, unless new weights are due first."""
        async with self._handover:
            if self._needs_gpu or self._restarting:
                return  # that call or restart releases the GPU when it ends
            self._engines.trainer_released_gpu()
            if self._engines_sleep and not self._weights_due:
                await self._engines.wake()
                await self._engines.resume()
                self._engines_sleep = False

    @asynccontextmanager
    async def _reserve_start(self) -> AsyncIterator[None]:
        """Acquire the GPU for a restart; a starting engine that needs us meanwhile lends it."""
        self._restarting = True
        await self._acquire_gpu()
        yield

    async def _restarted(self) -> None:
        if not self._needs_gpu:
            await self._supervised.call("sleep")
        self._restarting = False
        await self._release_gpu()
