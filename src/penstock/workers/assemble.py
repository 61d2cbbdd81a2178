"""Start the workers of a run and assemble them into what the loop drives."""

from __future__ import annotations

import asyncio
from collections import ChainMap
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from penstock.config import Config, EngineConfig, LaunchConfig
from penstock.errors import RunError
from penstock.workers.colocated import ColocatedTrainer
from penstock.workers.pool.node_copies import NodeCopies
from penstock.workers.pool.pool import EnginePool
from penstock.workers.supervise.supervised import Supervised, SupervisionCallbacks
from penstock.workers.supervise.trainer import RestartingTrainer
from penstock.workers.workers import StartAgent, Workers

T = TypeVar("T")


async def all_or_first_error(
    *starting: Coroutine[Any, Any, T], discard: Callable[[T], Awaitable[None]] | None = None
) -> list[T]:
    """Return every result; at the first error cancel the others, `discard` their results and raise it."""
    tasks = [asyncio.create_task(work) for work in starting]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        if discard is not None:
            made = [one for one in results if not isinstance(one, BaseException)]
            await asyncio.gather(*map(discard, made), return_exceptions=True)
        raise


async def start_all(trainer: Supervised, engines: list[Supervised], settings: LaunchConfig) -> None:
    """Start all workers at once; colocated, the trainer first: engines size their caches by free memory."""
    if settings.colocate:
        await trainer.start()
        try:
            async with asyncio.timeout(settings.start_timeout_s):
                await trainer.call("sleep")
        except TimeoutError:
            raise RunError(
                f"trainer: its device memory is not free after {settings.start_timeout_s:g} s"
            ) from None
        await all_or_first_error(*(one.start() for one in engines))
    else:
        await all_or_first_error(*(one.start() for one in (trainer, *engines)))


def colocated_publishes(config: Config, total_steps: int) -> Callable[[int], bool] | None:
    """Return a test of whether weights are published after a step; None unless colocated."""
    if not config.launch.colocate:
        return None
    return partial(config.publishes_after, total_steps=total_steps)


def assemble(
    kind: str,
    trainer: Supervised,
    engines: list[Supervised],
    clean_up: Callable[[], Awaitable[None]],
    events: SupervisionCallbacks,
    sync: str,
    make_engine: Callable[[int], Supervised] | None = None,
    *,
    publishes: Callable[[int], bool] | None = None,
    copies: NodeCopies | None = None,
    settings: EngineConfig,
    may_leave: bool = False,
    start_agent: StartAgent | None = None,
) -> Workers:
    """Return the `Workers` of a launcher; all workers have started, `clean_up` runs after their end.

    publishes: given if colocated; tells whether weights are published after a step. may_leave: whether
    publications go on without a late engine.
    """
    everyone = [trainer, *engines]
    places = ", ".join(f"{one.name} {one.worker.place}" for one in everyone if one.worker)
    restarting = RestartingTrainer(
        trainer, announces=sync != "in_process", replaced=events.replaced
    )
    engine = EnginePool(
        engines,
        events.waits,
        make_engine,
        copies,
        restarting.renewed,
        slots=settings.max_slots,
        update=settings.update,
        may_leave=may_leave,
        shares_gpu=publishes is not None,
        note=events.note,
        first_loaded=events.first_loaded,
        confirmed=events.confirmed,
    )
    part = restarting if publishes is None else ColocatedTrainer(restarting, engine, publishes)
    supervised = ChainMap({one.name: one for one in everyone})
    if copies is not None:
        supervised.maps.append(copies.supervised)  # distributors are started later

    async def scale(count: int) -> str:
        before = engine.count
        for one in await engine.scale(count):
            supervised[one.name] = one
        events.note(line := f"producers: {before} -> {engine.count}")
        return line

    async def close() -> None:
        if copies is not None:
            await copies.close(trainer)
        await asyncio.gather(part.close(), engine.close())
        await clean_up()

    return Workers(
        engine=engine,
        trainer=part,
        close=close,
        description=f"{kind}: {places}",
        events=events,
        supervised=supervised,
        scale=None if make_engine is None else scale,
        start_agent=start_agent,
        set_aside=engine.set_aside,
    )
