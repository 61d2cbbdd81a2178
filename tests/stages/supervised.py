"""Supervised workers: real processes that serve an Echo, and pools over workers in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from penstock.config import LaunchConfig
from penstock.engine.protocol import GenerationRequest, SamplingParams
from penstock.errors import WorkerDied
from penstock.types import WeightHandle
from penstock.waits import Waits
from penstock.workers.pool.pool import EnginePool
from penstock.workers.processes.process_worker import ProcessWorker
from penstock.workers.supervise.supervised import Supervised, SupervisionCallbacks
from stages.echo import ECHO
from stages.fake_engine import FakeEngine

HANDLE = WeightHandle(version=1, digest="digest-1", kind="none")


def settings(**fields: Any) -> LaunchConfig:
    return LaunchConfig.model_validate({"restart_backoff_s": 0, **fields})


class Play:
    """Supervised workers and the notes about them."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.events = SupervisionCallbacks(waits=Waits(), note=self.notes.append)

    def echo(self, folder: Path, **fields: Any) -> Supervised:
        async def spawn() -> ProcessWorker:
            log = folder / "echo.log"
            return await ProcessWorker.start(
                "echo", ECHO, "hello", log_path=log, threads=1, timeout_s=60
            )

        return Supervised("echo", spawn, settings(**fields), self.events)


async def nothing(worker: Any) -> None: ...


class FakeWorker:
    """A worker in memory around a fake engine; `die` acts like kill -9."""

    def __init__(self, name: str, engine: FakeEngine) -> None:
        self.name, self.place, self.engine = name, "memory", engine
        self.can_be_killed = True
        self._dead = asyncio.Event()

    def die(self) -> None:
        self._dead.set()

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        if self._dead.is_set():
            raise WorkerDied(f"{self.name}: gone")
        work = asyncio.ensure_future(getattr(self.engine, method)(*args, **kwargs))
        dying = asyncio.ensure_future(self._dead.wait())
        await asyncio.wait([work, dying], return_when=asyncio.FIRST_COMPLETED)
        dying.cancel()
        if self._dead.is_set():
            work.cancel()
            raise WorkerDied(f"{self.name}: gone")
        return work.result()

    async def ended(self) -> str:
        await self._dead.wait()
        return f"{self.name}: killed"

    async def stack(self) -> str:
        return ""

    async def activity(self) -> float | None:
        return None

    async def kill(self) -> None:
        self.die()

    async def close(self) -> None:
        self.die()


class EngineCrew(Play):
    """A pool over given engines; the worker of a dead engine is restarted after `revive`."""

    def __init__(
        self, engines: Sequence[Any], *, told: dict[str, Any] | None = None, **options: Any
    ) -> None:
        """told: callbacks of the pool, such as `confirmed`."""
        super().__init__()
        self.events = replace(self.events, **(told or {}))
        self.engines = list(engines)
        self.workers: dict[int, FakeWorker] = {}
        self._revived = [asyncio.Event() for _ in engines]
        supervised = [self._make(index) for index in range(len(engines))]
        self.pool = EnginePool(supervised, self.events, self._make, **options)

    async def start(self) -> EnginePool:
        for engine in self.pool._engines:
            await engine.supervised.start()
        return self.pool

    def _make(self, index: int) -> Supervised:
        async def spawn() -> FakeWorker:
            if index in self.workers:
                await self._revived[index].wait()
                self._revived[index].clear()
                await self.engines[index].start()
            self.workers[index] = FakeWorker(f"engine-{index}", self.engines[index])
            return self.workers[index]

        many = settings(max_restarts=10**6)
        return Supervised(f"engine-{index}", spawn, many, self.events)

    async def add(self, engine: Any) -> None:
        self.engines.append(engine)
        self._revived.append(asyncio.Event())
        await self.pool.scale(self.pool.count + 1)

    def revive(self, index: int) -> None:
        self._revived[index].set()


class Crew(Play):
    """A pool over fake workers; `made` lists all workers that were started, by engine."""

    def __init__(self, count: int, *, poison: str = "", **fields: Any) -> None:
        super().__init__()
        self.made: dict[str, list[FakeWorker]] = {f"engine-{n}": [] for n in range(count)}
        self._poison = poison
        self._fields = fields

    async def start(self) -> EnginePool:
        supervised = [
            Supervised(name, self._spawner(name), settings(**self._fields), self.events)
            for name in self.made
        ]
        for one in supervised:
            await one.start()
        return EnginePool(supervised, self.events, make=self._make)

    def _make(self, number: int) -> Supervised:
        name = f"engine-{number}"
        self.made[name] = []
        return Supervised(name, self._spawner(name), settings(**self._fields), self.events)

    def _spawner(self, name: str) -> Any:
        async def spawn() -> FakeWorker:
            def fail(request: GenerationRequest) -> str:
                if request.request_id == self._poison:
                    worker.die()
                return ""

            worker = FakeWorker(name, FakeEngine(seconds_per_token=0, fail=fail))
            self.made[name].append(worker)
            return worker

        return spawn


def request(name: str) -> GenerationRequest:
    return GenerationRequest(
        request_id=name,
        prompt_ids=np.array([len(name)], np.int32),
        sampling=SamplingParams(),
        seed=1,
    )
