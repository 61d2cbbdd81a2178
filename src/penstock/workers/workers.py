"""What a launcher returns: the engine and the trainer of a run, and their supervised workers.

A launcher makes the supervised workers; `start_workers` starts them and joins them to what the loop drives,
`start_engine_workers` starts the engines of a program that trains by itself.
"""

from __future__ import annotations

import asyncio
from collections import ChainMap
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.config import Config, LaunchConfig, SamplingConfig
from penstock.engine.protocol import EngineStats, InferenceEngine
from penstock.errors import RunError
from penstock.types import WeightHandle
from penstock.waits import WaitKind, loop_time
from penstock.weights.protocol import Publish
from penstock.workers.pool.pool import EnginePool
from penstock.workers.pool.requests import Generate
from penstock.workers.pool.weights import NodeCopies
from penstock.workers.supervise.supervised import Supervised, SupervisionCallbacks
from penstock.workers.supervise.trainer import ColocatedTrainer, RestartingTrainer, publishes_after

if TYPE_CHECKING:
    from penstock.workers.ray.agents import ActorAgentLoop

# of (workers, task, sampling, is_chat)
StartAgent = Callable[["Workers", str, SamplingConfig, bool], Awaitable["ActorAgentLoop"]]
T = TypeVar("T")


@dataclass(slots=True, frozen=True, kw_only=True)
class SupervisedWorkers:
    """Workers, and what the watchdog asks of them."""

    close: Callable[[], Awaitable[None]]
    description: str  # the place of every worker, in one line
    events: SupervisionCallbacks  # the open waits, and where notes to the user go
    supervised: MutableMapping[str, Supervised] = field(default_factory=dict)  # by worker name

    async def stack_of(self, name: str) -> str:
        """What a worker is doing; empty if `name` is no worker."""
        return await self.supervised[name].stack() if name in self.supervised else ""

    async def progress_of(self, name: str) -> object:
        """Something that changes with every token or micro-batch; None if unknown."""
        worker = self.supervised.get(name)
        if worker is None:
            return None
        if name == "trainer" or name.startswith("distributor"):
            return await worker.progress("progress")
        stats: EngineStats | None = await worker.progress("stats")
        owes_answer = any(  # that its pause does not delay
            wait.responder == name and wait.what is not WaitKind.GENERATE
            for wait in self.events.waits.open.values()
        )
        if stats is not None and stats.paused and not owes_answer:
            return loop_time()  # a paused engine that answers is alive
        return stats.tokens_generated if stats is not None and stats.live else None

    async def activity_of(self, name: str) -> float | None:
        """The seconds of work that a worker's process has spent; None if unknown."""
        return await self.supervised[name].activity() if name in self.supervised else None

    async def end(self, reason: str) -> None:
        """Kill every worker for good, so that nothing waits for one any more."""
        await asyncio.gather(*(worker.end(reason) for worker in self.supervised.values()))

    async def restart(self, name: str, reason: str) -> bool:
        """Kill a worker that does not answer, so that it is restarted; False if it cannot be."""
        worker = self.supervised.get(name)
        if worker is None or not worker.can_restart:
            return False
        await worker.replace(reason)
        return True


@dataclass(slots=True, frozen=True, kw_only=True)
class Workers(SupervisedWorkers):
    """The parts that the loop drives."""

    engine: InferenceEngine | None  # None: nothing is generated
    trainer: RestartingTrainer | ColocatedTrainer
    # changes the number of engines; returns what was done
    scale: Callable[[int], Awaitable[str]] | None = None
    # starts the actors of a task's agent loop; only Ray has it
    start_agent: StartAgent | None = None


@dataclass(slots=True, frozen=True, kw_only=True)
class Engines(SupervisedWorkers):
    """The engines of a program that trains by itself."""

    pool: EnginePool
    publish: Publish


async def all_or_first_error(
    *starting: Coroutine[Any, Any, T], discard: Callable[[T], Awaitable[None]] | None = None
) -> list[T]:
    """Every result; at the first error cancel the others, `discard` their results and raise it."""
    tasks = [asyncio.create_task(work) for work in starting]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:  # a failed or stopped start: none may outlive it
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        if discard is not None:
            unwanted = [result for result in results if not isinstance(result, BaseException)]
            await asyncio.gather(*map(discard, unwanted), return_exceptions=True)
        raise


async def start_or_close(
    starting: Awaitable[object],
    workers: Sequence[Supervised],
    clean_up: Callable[[], None] = lambda: None,
) -> None:
    """Await the start of workers; if it fails or is stopped, close all of them, clean up and raise."""
    try:
        await starting
    except BaseException:  # a failed or stopped start: no worker may outlive it
        await asyncio.gather(*(worker.close() for worker in workers))
        clean_up()
        raise


async def start_all(trainer: Supervised, engines: list[Supervised], settings: LaunchConfig) -> None:
    """Start all workers at once; colocated, the trainer first: engines size their caches by free memory."""
    if settings.kind == "inline":
        for worker in (trainer, *engines):  # of one process: concurrent imports race
            await worker.start()
    elif settings.colocate:
        await trainer.start()
        try:
            async with asyncio.timeout(settings.start_timeout_s):
                await trainer.call("sleep")
        except TimeoutError:
            raise RunError(
                f"trainer: its device memory is not free after {settings.start_timeout_s:g} s"
            ) from None
        await all_or_first_error(*(engine.start() for engine in engines))
    else:
        await all_or_first_error(*(worker.start() for worker in (trainer, *engines)))


def _places(config: Config, workers: list[Supervised]) -> str:
    places = ", ".join(f"{part.name} {part.worker.place}" for part in workers if part.worker)
    return f"{config.launch.kind}: {places}"


async def start_engine_workers(
    config: Config,
    events: SupervisionCallbacks,
    engines: list[Supervised],
    publish: Publish,
    generate: Generate,
    *,
    clean_up: Callable[[], None] = lambda: None,
    copies: NodeCopies | None = None,
) -> Engines:
    """Start engines without a trainer; `clean_up` runs after their end, or after a start that failed."""
    starting = all_or_first_error(*(engine.start() for engine in engines))
    await start_or_close(starting, engines, clean_up)
    supervised = ChainMap({engine.name: engine for engine in engines})
    if copies is not None:
        supervised.maps.append(copies.supervised)
    pool = EnginePool(
        engines,
        events,
        None,
        copies,
        _still_there,
        generate=generate,
        slots=config.engine.max_slots,
        update=config.engine.update,
    )

    async def close() -> None:
        if copies is not None:
            await copies.close()
        await pool.close()
        clean_up()

    return Engines(
        pool=pool,
        publish=publish,
        close=close,
        description=_places(config, engines),
        events=events,
        supervised=supervised,
    )


async def _still_there(handle: WeightHandle) -> WeightHandle:
    """The same weights: they end with the program that published them, not with a worker."""
    return handle


async def start_workers(
    config: Config,
    total_steps: int,
    events: SupervisionCallbacks,
    trainer: Supervised,
    engines: list[Supervised],
    *,
    make_engine: Callable[[int], Supervised] | None = None,
    clean_up: Callable[[], None] = lambda: None,
    copies: NodeCopies | None = None,
    start_agent: StartAgent | None = None,
) -> Workers:
    """Start the supervised workers of a launcher and join them to what the loop drives.

    make_engine: returns a further engine; None: their number is fixed.
    clean_up runs after the end of the workers, or after a start that failed.
    """
    settings, everyone = config.launch, [trainer, *engines]
    await start_or_close(start_all(trainer, engines, settings), everyone, clean_up)
    takes_turns = settings.colocate and settings.kind != "inline"  # one process holds both sides
    supervised = ChainMap({worker.name: worker for worker in everyone})
    if copies is not None:
        supervised.maps.append(copies.supervised)  # distributors are started later
    part: RestartingTrainer | ColocatedTrainer
    part = restarting = RestartingTrainer(trainer)
    pool: EnginePool | None = None  # of a run that samples nothing
    if engines:
        pool_settings = config.pool_engine()
        pool = EnginePool(
            engines,
            events,
            make_engine,
            copies,
            restarting.renewed,
            slots=pool_settings.max_slots,
            update=pool_settings.update,
            shares_gpu=takes_turns,
        )
        if takes_turns:
            publishes = partial(publishes_after, config, total_steps=total_steps)
            part = ColocatedTrainer(restarting, pool, publishes)

    async def scale(count: int) -> str:
        assert pool is not None
        before = pool.count
        for worker in await pool.scale(count):
            supervised[worker.name] = worker
        events.note(line := f"producers: {before} -> {pool.count}")
        return line

    async def close() -> None:
        if copies is not None:
            await copies.close(trainer)
        await asyncio.gather(part.close(), *([pool.close()] if pool is not None else ()))
        clean_up()

    return Workers(
        engine=pool,
        trainer=part,
        close=close,
        description=_places(config, everyone),
        events=events,
        supervised=supervised,
        scale=None if make_engine is None or pool is None else scale,
        start_agent=start_agent,
    )
