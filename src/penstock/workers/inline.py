"""Everything in this process: the trainer on one thread, the engine on another.

For debuggers, notebooks and tests. Python threads share one interpreter lock, so generation and training
overlap less than with `local`. A thread cannot be killed: an engine that dies of an error is started
again, a part that hangs is not. `offline_trainer` has no engine: it trains steps that a journal already has.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from penstock.config import Config
from penstock.engine.protocol import Fetch, InferenceEngine
from penstock.types import WeightHandle
from penstock.waits import Waits
from penstock.weights.protocol import WeightSync
from penstock.workers.part_factories import TrainerService, engine_part
from penstock.workers.pool.pool import EnginePool
from penstock.workers.pool.requests import Generate
from penstock.workers.processes.local import spawn_trainer
from penstock.workers.rpc import RpcServer, activity_of
from penstock.workers.supervise.supervised import Spawn, Supervised, SupervisionCallbacks
from penstock.workers.supervise.trainer import RestartingTrainer
from penstock.workers.workers import (
    Engines,
    Workers,
    all_or_first_error,
    start_engine_workers,
    start_or_close,
    start_workers,
)

_NOTHING_IS_PUBLISHED = ("shared_memory", "")


class ThreadWorker:
    """See `Worker`: a part of this process, its blocking methods on a thread of their own."""

    can_be_killed = False
    place = "a thread of this process"

    def __init__(self, name: str) -> None:
        self.name = name
        self._server = RpcServer(name)
        self._closed = asyncio.Event()

    @classmethod
    async def start(cls, name: str, make: Callable[[], Any]) -> ThreadWorker:
        """Start a worker that serves the part that `make` returns."""
        worker = cls(name)
        await worker._server.build(make)
        return worker

    async def call(self, method: str, *args: Any) -> Any:
        return await self._server.call(method, args)

    async def ended(self) -> str:
        await self._closed.wait()
        return f"{self.name}: it was closed"

    async def stack(self) -> str:
        return ""

    async def activity(self) -> float | None:
        return await asyncio.to_thread(activity_of, os.getpid())

    async def kill(self) -> None:
        """Give up a part that has died inside: its thread has ended, or ends when it is closed."""
        self._closed.set()

    async def close(self) -> None:
        self._closed.set()
        await self._server.close()


def _engines(
    config: Config, fetch: Fetch, events: SupervisionCallbacks, most: int, adapters: bool = False
) -> list[Supervised]:
    """One engine, because more would share the interpreter; for servers, one each."""

    async def spawn(number: int) -> ThreadWorker:
        return await ThreadWorker.start(
            f"engine-{number}", partial(engine_part, config, number, fetch, adapters)
        )

    count = most if config.engine.name == "openai" else min(most, 1)
    return [
        Supervised(f"engine-{number}", partial(spawn, number), config.launch, events)
        for number in range(count)
    ]


@asynccontextmanager
async def opened_engine(config: Config) -> AsyncIterator[InferenceEngine]:
    """The engine of this process without a trainer, with the weights of its model, until the block ends."""
    events = SupervisionCallbacks(waits=Waits())
    engines = _engines(config, _no_weights, events, config.launch.num_producers)
    await start_or_close(all_or_first_error(*(engine.start() for engine in engines)), engines)
    pool = EnginePool(engines, events, slots=config.engine.max_slots)
    try:
        await pool.start()
        yield pool
    finally:
        await pool.close()


async def start_engines(
    config: Config, log_folder: Path, events: SupervisionCallbacks, generate: Generate
) -> Engines:
    """Build one engine that holds adapters; it reads weights where this process has them."""
    engines = _engines(config, lambda handle: handle.location(), events, 1, adapters=True)

    def publish(version: int, digest: str, read: object) -> WeightHandle:
        return WeightHandle(version=version, digest=digest, kind="in_process", location=read)

    return await start_engine_workers(config, events, engines, publish, generate)


def _no_weights(handle: WeightHandle) -> NoReturn:
    raise AssertionError(f"an engine that only samples gets no weights, got {handle}")


async def _spawn_trainer(config: Config, total_steps: int, sync: WeightSync) -> ThreadWorker:
    return await ThreadWorker.start("trainer", lambda: TrainerService(config, total_steps, sync))


async def start(
    config: Config, total_steps: int, log_folder: Path, events: SupervisionCallbacks
) -> Workers:
    """Build the trainer and its engine, or one engine for each server, in this process."""
    from penstock.weights.in_process import InProcessSync

    sync = InProcessSync()
    trainer = Supervised(
        "trainer", partial(_spawn_trainer, config, total_steps, sync), config.launch, events
    )
    engines = _engines(config, sync.fetch, events, config.num_engines)

    return await start_workers(config, total_steps, events, trainer, engines, clean_up=sync.close)


@asynccontextmanager
async def offline_trainer(
    config: Config, total_steps: int, log_folder: Path, events: SupervisionCallbacks
) -> AsyncIterator[Workers]:
    """Yield the trainer of `config` without an engine; the logs of its ranks go to `log_folder`.

    Runs as many ranks as the run had, because the order of sums is part of the digest: one rank on a thread,
    several in worker processes of this machine, even if the run had them on a cluster. The end of a rank is
    final until `RestartingTrainer.restart_with`.
    """
    from penstock.weights.in_process import InProcessSync

    spawn: Spawn = spawn_trainer(config, total_steps, log_folder, _NOTHING_IS_PUBLISHED)
    if config.launch.num_consumers == 1:
        spawn = partial(_spawn_trainer, config, total_steps, InProcessSync())
    supervised = Supervised("trainer", spawn, config.launch, events)
    await supervised.start()
    workers = Workers(
        engine=None,
        trainer=RestartingTrainer(supervised),
        close=supervised.close,
        description="offline: the trainer alone",
        events=events,
        supervised={"trainer": supervised},
    )
    try:
        yield workers
    finally:
        await workers.close()  # sends no request: a rank that hangs would not answer
