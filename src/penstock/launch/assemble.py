"""Workers of a run, started together and joined to what the loop drives."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from penstock.config import Config, EngineConfig
from penstock.launch.colocated import ColocatedTrainer
from penstock.launch.workers import Workers
from penstock.pool.distribution import Distribution
from penstock.pool.engines import Engines
from penstock.supervise.supervised import Supervised, SupervisionCallbacks
from penstock.supervise.trainer import RestartingTrainer
from penstock.types import WeightHandle

T = TypeVar("T")


async def all_or_first_error(*starting: Coroutine[Any, Any, T]) -> list[T]:
    """Every result; at the first error the others are cancelled and it rises."""
    tasks = [asyncio.create_task(work) for work in starting]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


async def start_all(trainer: Supervised, engines: list[Supervised], *, colocate: bool) -> None:
    """At the same time; on shared devices the trainer first, so that engines see what it leaves them."""
    if colocate:
        await trainer.start()
        await trainer.call("sleep")
        await all_or_first_error(*(one.start() for one in engines))
    else:
        await all_or_first_error(*(one.start() for one in (trainer, *engines)))


def turns(config: Config, total_steps: int) -> Callable[[int], bool] | None:
    """Whether weights are published after a step, where parts take turns on shared devices."""
    if not config.launch.colocate:
        return None
    return partial(config.publishes_after, total_steps=total_steps)


def join(
    kind: str,
    trainer: Supervised,
    engines: list[Supervised],
    clean_up: Callable[[], Awaitable[None]],
    callbacks: SupervisionCallbacks,
    sync: str,
    make_engine: Callable[[int], Supervised] | None = None,
    *,
    publishes: Callable[[int], bool] | None = None,
    distribution: Distribution | None = None,
    settings: EngineConfig,
) -> Workers:
    """What a launcher returns, from workers that have started; `clean_up` comes after their end.

    `publishes` is given where they share devices: whether weights are published after a step.
    """
    everyone = [trainer, *engines]
    places = ", ".join(f"{one.name} {one.worker.place}" for one in everyone if one.worker)
    announces = sync not in ("object_store", "in_process")

    async def renew(handle: WeightHandle) -> WeightHandle:
        return await part.renewed(handle)

    engine = Engines(
        engines,
        callbacks.waits,
        make_engine,
        distribution,
        renew,
        slots=settings.max_slots,
        update=settings.update,
        note=lambda line: callbacks.note(line),  # where these go is said later
        first_loaded=lambda version, digest: callbacks.first_loaded(version, digest),
    )
    part = RestartingTrainer(trainer, announces=announces)
    if publishes is not None:
        part = ColocatedTrainer(trainer, engine, publishes, announces=announces)
    supervised = {one.name: one for one in everyone}

    async def scale(count: int) -> str:
        before = engine.count
        for one in await engine.scale(count):
            supervised[one.name] = one
        callbacks.note(line := f"producers: {before} -> {engine.count}")
        return line

    async def close() -> None:
        if distribution is not None:
            await distribution.close(trainer)
        await asyncio.gather(*(one.close() for one in supervised.values()))
        await clean_up()

    return Workers(
        engine=engine,
        trainer=part,
        close=close,
        description=f"{kind}: {places}",
        callbacks=callbacks,
        supervised=supervised,
        scale=None if make_engine is None else scale,
        set_aside=engine.set_aside,
    )
