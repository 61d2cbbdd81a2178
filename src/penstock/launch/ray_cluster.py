"""A Ray cluster: engines and trainer ranks are actors, placed by what the nodes have. Layer 5.

With no address a cluster of this machine alone is started, and stopped after; with one it is joined.
Consumers sit together (packed), producers spread; colocated, each producer shares a bundle with a
consumer. What cannot fit is refused before any actor starts. Weights go through the object store.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.config import Config, LaunchConfig
from penstock.edges import Edges
from penstock.errors import RunError, UserError, WorkerDied
from penstock.launch.ray_actor import RayRemote
from penstock.launch.remote import Worker
from penstock.launch.services import Workers, sync_kind
from penstock.launch.supervise import Supervised, Surroundings
from penstock.launch.together import all_or_first_error, join
from penstock.launch.trainer import RankGroup
from penstock.types import WeightHandle

Resources = dict[str, float]


async def start(config: Config, total_steps: int, log_folder: Path) -> Workers:
    """Join or start the cluster, place the actors, build the parts."""
    kind = sync_kind(config, "object_store", "collective")
    ours = connect(config.launch)
    places: Places | None = None
    try:
        places = await Places.reserve(config.launch)
        return await _start_parts(config, total_steps, log_folder, places, ours, kind)
    except BaseException:
        if places is not None:
            places.release()
        disconnect(ours)
        raise


def connect(settings: LaunchConfig) -> bool:
    """Connect to Ray; True where the cluster was started here and is to be stopped."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
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


def bundles(settings: LaunchConfig) -> tuple[list[Resources], list[Resources]]:
    """What consumers and producers ask for; colocated, all of it is in the first."""
    consumer = _bundle(settings.cpus_per_consumer, settings.gpus_per_consumer)
    producer = _bundle(settings.cpus_per_producer, settings.gpus_per_producer)
    consumers = [consumer] * settings.num_consumers
    producers = [producer] * settings.num_producers
    if not settings.colocate:
        return consumers, producers
    shared = []
    for number in range(max(len(consumers), len(producers))):
        cpus = sum(part[number]["CPU"] for part in (consumers, producers) if number < len(part))
        gpus = max(settings.gpus_per_consumer, settings.gpus_per_producer)
        shared.append(_bundle(cpus, gpus))
    return shared, []


def _bundle(cpus: float, gpus: float) -> Resources:
    return {"CPU": cpus, **({"GPU": gpus} if gpus else {})}


def check_fit(settings: LaunchConfig, nodes: list[Resources]) -> None:
    """Raise unless every bundle finds a node; largest first, into the node with most left."""
    left = [dict(node) for node in nodes]
    asked = [bundle for part in bundles(settings) for bundle in part]
    for bundle in sorted(asked, key=lambda b: (b.get("GPU", 0), b["CPU"]), reverse=True):
        fitting = [n for n in left if all(n.get(k, 0) >= v for k, v in bundle.items())]
        if not fitting:
            raise UserError(_cannot_fit(settings, nodes))
        best = max(fitting, key=lambda n: (n.get("GPU", 0), n.get("CPU", 0)))
        for key, value in bundle.items():
            best[key] -= value


def _cannot_fit(settings: LaunchConfig, nodes: list[Resources]) -> str:
    def words(kind: str, count: int, cpus: float, gpus: float) -> str:
        return f"{count} {kind} of {cpus:g} CPU, {gpus:g} GPU"

    there = "; ".join(f"{n.get('CPU', 0):g} CPU, {n.get('GPU', 0):g} GPU" for n in nodes) or "no"
    consumers = words(
        "consumers",
        settings.num_consumers,
        settings.cpus_per_consumer,
        settings.gpus_per_consumer,
    )
    producers = words(
        "producers",
        settings.num_producers,
        settings.cpus_per_producer,
        settings.gpus_per_producer,
    )
    shared = " (colocated)" if settings.colocate else ""
    return f"launch: got {consumers} and {producers}{shared}, allowed: what {len(nodes)} nodes have: {there}"


@dataclass(slots=True)
class Places:
    """Reserved bundles of the cluster."""

    consumers: Any
    producers: Any
    settings: LaunchConfig

    @classmethod
    async def reserve(cls, settings: LaunchConfig) -> Places:
        import ray
        from ray.util.placement_group import placement_group

        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        check_fit(settings, nodes)
        for_consumers, for_producers = bundles(settings)
        consumers = placement_group(for_consumers, strategy="PACK")
        producers = placement_group(for_producers, strategy="SPREAD") if for_producers else None
        places = cls(consumers, producers, settings)
        for group in places._groups():
            try:
                async with asyncio.timeout(settings.start_timeout_s):
                    await group.ready()
            except TimeoutError:
                places.release()
                free = ray.available_resources()
                raise RunError(
                    f"launch: no place after {settings.start_timeout_s:g} s; free in the cluster: "
                    f"{free.get('CPU', 0):g} CPU, {free.get('GPU', 0):g} GPU, the rest is in use"
                ) from None
        return places

    def _groups(self) -> list[Any]:
        return [group for group in (self.consumers, self.producers) if group is not None]

    def consumer(self, number: int) -> dict[str, Any]:
        settings = self.settings
        return self._options(
            self.consumers, number, settings.cpus_per_consumer, settings.gpus_per_consumer
        )

    def producer(self, number: int) -> dict[str, Any]:
        settings = self.settings
        if number >= settings.num_producers:  # one that joined later has no bundle
            return {
                "num_cpus": settings.cpus_per_producer,
                "num_gpus": settings.gpus_per_producer,
                "scheduling_strategy": "SPREAD",
            }
        group = self.producers or self.consumers
        return self._options(group, number, settings.cpus_per_producer, settings.gpus_per_producer)

    def _options(self, group: Any, number: int, cpus: float, gpus: float) -> dict[str, Any]:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        share = gpus / 2 if self.settings.colocate else gpus  # two actors see the same device
        where = PlacementGroupSchedulingStrategy(
            placement_group=group, placement_group_bundle_index=number
        )
        return {"num_cpus": cpus, "num_gpus": share, "scheduling_strategy": where}

    def release(self) -> None:
        from ray.util.placement_group import remove_placement_group

        for group in self._groups():
            remove_placement_group(group)


async def _start_parts(
    config: Config, total_steps: int, log_folder: Path, places: Places, ours: bool, kind: str
) -> Workers:
    settings = config.launch
    around = Surroundings(edges=Edges())
    log_folder.mkdir(parents=True, exist_ok=True)
    trainer = Supervised(
        "trainer", _spawn_trainer(config, total_steps, log_folder, places, kind), settings, around
    )

    def make_engine(number: int) -> Supervised:
        spawn = _spawn_engine(config, log_folder, places, number, kind)
        return Supervised(f"engine-{number}", spawn, settings, around)

    engines = [make_engine(number) for number in range(settings.num_producers)]

    def clean_up() -> None:
        places.release()
        disconnect(ours)

    try:
        await all_or_first_error(*(one.start() for one in (trainer, *engines)))
    except BaseException:
        await asyncio.gather(*(one.close() for one in (trainer, *engines)))
        raise
    return join(
        "ray", trainer, engines, clean_up, around, kind, make_engine, colocate=settings.colocate
    )


def _spawn_engine(
    config: Config, log_folder: Path, places: Places, number: int, kind: str
) -> Callable[[], Awaitable[Worker]]:
    async def spawn() -> Worker:
        name, timeout_s = f"engine-{number}", config.launch.start_timeout_s
        remote = await RayRemote.create(
            name,
            log_folder / f"{name}.log",
            config.engine.threads,
            timeout_s,
            **places.producer(number),
        )
        factory = "penstock.launch.services:engine_part"
        return await _built(remote, factory, config, kind, "", number, timeout_s=timeout_s)

    return spawn


def _spawn_trainer(
    config: Config, total_steps: int, log_folder: Path, places: Places, kind: str
) -> Callable[[], Awaitable[Worker]]:
    world, timeout_s = config.launch.num_consumers, config.launch.start_timeout_s
    names = ["trainer"] if world == 1 else [f"trainer-{rank}" for rank in range(world)]
    factory = "penstock.launch.services:trainer_part"

    async def spawn() -> Worker:
        ranks = await all_or_first_error(
            *(
                RayRemote.create(
                    name,
                    log_folder / f"{name}.log",
                    config.train.threads,
                    timeout_s,
                    **places.consumer(rank),
                )
                for rank, name in enumerate(names)
            )
        )
        meeting = (ranks[0].address, ranks[0].free_port)
        await all_or_first_error(
            *(
                _built(
                    remote,
                    factory,
                    config,
                    total_steps,
                    kind,
                    "",
                    rank,
                    meeting,
                    timeout_s=timeout_s,
                )
                for rank, remote in enumerate(ranks)
            )
        )
        return RankGroup(ranks, _collect if kind == "object_store" else None)

    return spawn


async def _collect(rank: Worker, handle: WeightHandle) -> WeightHandle:
    assert isinstance(rank, RayRemote)
    return await rank.collect(handle)


async def _built(remote: RayRemote, factory: str, *args: Any, timeout_s: float) -> RayRemote:
    try:
        await remote.build(factory, *args, timeout_s=timeout_s)
    except WorkerDied:
        raise
    except BaseException:
        await remote.close()
        raise
    return remote
