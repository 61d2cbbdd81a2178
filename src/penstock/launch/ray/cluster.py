"""A Ray cluster: engines and trainer ranks are actors, placed by what the nodes have.

With no address a cluster of this machine alone is started, and stopped after; with one it is joined.
Who sits where is the business of `placement.py`. Weights go through the object store, or by broadcast.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from penstock.config import Config, LaunchConfig
from penstock.errors import UserError, WorkerDied
from penstock.launch.assemble import all_or_first_error, join, start_all, turns
from penstock.launch.part_factories import Workers
from penstock.launch.ray.actor import ActorWorker
from penstock.launch.ray.placement import Places, Seat, bundles
from penstock.pool.distribution import Distribution
from penstock.supervise.supervised import Supervised, SupervisionCallbacks
from penstock.supervise.trainer import RankGroup
from penstock.supervise.worker import Worker
from penstock.types import WeightHandle
from penstock.watch.waits import WaitKind, Waits
from penstock.weights import sync_kind


async def start(config: Config, total_steps: int, log_folder: Path) -> Workers:
    """Join or start the cluster, place the actors, build the parts."""
    kind = sync_kind(config)
    ours, callbacks = connect(config.launch), SupervisionCallbacks(waits=Waits())
    places = Places(config.launch, ours, lambda text: callbacks.note(text))
    try:
        await places.reserve()
        site = _Site(config, log_folder, places, kind, callbacks)
        return await _start_parts(site, total_steps, ours)
    except BaseException:
        places.release()
        disconnect(ours)
        raise


def connect(settings: LaunchConfig) -> bool:
    """Connect to Ray; True where the cluster was started here and is to be stopped."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # the run itself tells of them
    import ray

    if ray.is_initialized():
        return False
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    try:
        if settings.address:
            ray.init(address=settings.address, **quiet)
        else:
            asked = sum(bundle.get("CPU", 0.0) for part in bundles(settings) for bundle in part)
            cores = max(os.cpu_count() or 1, -int(-asked // 1))  # CPUs are counted, not given
            ray.init(address="local", num_cpus=cores, include_dashboard=False, **quiet)
    except (ConnectionError, OSError, RuntimeError, ValueError) as error:
        where = settings.address or "this machine"
        line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"launch.address: got {where!r}, allowed: a Ray cluster that answers: {line}"
        ) from error
    return not settings.address


def disconnect(ours: bool) -> None:
    if ours:
        import ray

        ray.shutdown()


async def _start_parts(site: _Site, total_steps: int, ours: bool) -> Workers:
    settings, callbacks, places = site.config.launch, site.callbacks, site.places
    site.log_folder.mkdir(parents=True, exist_ok=True)
    if site.sync == "collective":
        site.distribution = Distribution(_spawn_distributor(site), settings, callbacks)
    trainer = Supervised("trainer", _spawn_trainer(site, total_steps), settings, callbacks)

    def make_engine(number: int) -> Supervised:
        name = f"engine-{number}"
        seat = places.take(name)
        one = seat.holder = Supervised(name, _spawn_engine(site, number, seat), settings, callbacks)
        one.when_closed = partial(places.leave, seat, one)
        return one

    engines = [make_engine(number) for number in range(settings.num_producers)]

    async def clean_up() -> None:
        places.release()
        disconnect(ours)

    try:
        await start_all(trainer, engines, colocate=settings.colocate)
    except BaseException:
        await asyncio.gather(*(one.close() for one in (trainer, *engines)))
        raise
    return join(
        "ray",
        trainer,
        engines,
        clean_up,
        callbacks,
        site.sync,
        make_engine,
        publishes=turns(site.config, total_steps),
        distribution=site.distribution,
        settings=site.config.engine,
    )


@dataclass(slots=True)
class _Site:
    """What every actor of a run is made from."""

    config: Config
    log_folder: Path
    places: Places
    sync: str
    callbacks: SupervisionCallbacks
    distribution: Distribution | None = None

    async def actor(self, name: str, threads: int, options: dict[str, Any]) -> ActorWorker:
        timeout_s, log = self.config.launch.start_timeout_s, self.log_folder / f"{name}.log"
        remote = await ActorWorker.create(name, log, threads, timeout_s, **options)
        remote.note = lambda text: self.callbacks.note(text)
        return remote

    async def seated(self, name: str, threads: int, seat: Seat) -> ActorWorker:
        return await self.places.sit(name, seat, partial(self.actor, name, threads))

    async def collect(self, rank: Worker, handle: WeightHandle) -> WeightHandle:
        """Take the weights that a trainer rank has staged into the object store."""
        assert isinstance(rank, ActorWorker)
        detail = f"weights of version {handle.version}"
        waits = self.callbacks.waits
        with waits.wait("trainer", WaitKind.OBJECT_STORE, detail, responder="trainer"):
            return await rank.collect(handle)

    async def build(self, remote: ActorWorker, factory: str, *args: Any) -> ActorWorker:
        timeout_s = self.config.launch.start_timeout_s
        try:
            await remote.build(
                f"penstock.launch.part_factories:{factory}", *args, timeout_s=timeout_s
            )
        except WorkerDied:
            raise
        except BaseException:
            await remote.close()
            raise
        return remote


def _spawn_engine(site: _Site, number: int, seat: Seat) -> Callable[[], Awaitable[Worker]]:
    async def spawn() -> Worker:
        remote = await site.seated(f"engine-{number}", site.config.engine.threads, seat)
        if site.distribution is not None:
            site.distribution.settle(number, remote.node)
        return await site.build(remote, "engine_part", site.config, site.sync, "", number)

    async def spawn_or_leave() -> Worker:
        try:
            worker = await spawn()
        except BaseException:
            if not seat.is_used:
                site.places.leave(seat, seat.holder)
            raise
        seat.is_used = True
        return worker

    return spawn_or_leave


def _spawn_trainer(site: _Site, total_steps: int) -> Callable[[], Awaitable[Worker]]:
    config, world = site.config, site.config.launch.num_consumers
    names = ["trainer"] if world == 1 else [f"trainer-{rank}" for rank in range(world)]
    folders: dict[str, str] = {}  # for weights, by node: a new trainer goes on in the old one's

    async def spawn() -> Worker:
        seats = site.places.consumers
        await site.places.settle(names, seats)
        ranks = await all_or_first_error(
            *(
                site.seated(name, config.train.threads, seat)
                for name, seat in zip(names, seats, strict=True)
            )
        )
        meeting, node = (ranks[0].address, ranks[0].free_port), ranks[0].node
        link = (site.sync, folders.get(node, ""))
        await all_or_first_error(
            *(
                site.build(remote, "trainer_part", config, total_steps, *link, rank, meeting, node)
                for rank, remote in enumerate(ranks)
            )
        )
        for seat in seats:
            seat.is_used = True
        folders[node] = await ranks[0].call("weights_folder")
        return RankGroup(ranks, site.collect if site.sync == "object_store" else None)

    return spawn


def _spawn_distributor(site: _Site) -> Callable[[str, str, str], Awaitable[Worker]]:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    backend = site.config.sync.backend

    async def spawn(name: str, node: str, folder: str) -> Worker:
        where = NodeAffinitySchedulingStrategy(node, soft=False)
        remote = await site.actor(name, 1, {"num_cpus": 0, "scheduling_strategy": where})
        return await site.build(remote, "distributor_part", folder, node, remote.address, backend)

    return spawn
