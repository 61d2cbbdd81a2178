"""A Ray cluster: engines and trainer ranks are actors, placed by what the nodes have. Layer 5.

With no address a cluster of this machine alone is started, and stopped after; with one it is joined.
Consumers sit together (packed), producers spread; colocated, each producer shares a bundle with a
consumer. What cannot fit is refused before any actor starts. Weights go through the object store.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.config import Config, LaunchConfig
from penstock.edges import Edges
from penstock.errors import RunError, UserError, WorkerDied
from penstock.launch.distribution import Distribution
from penstock.launch.ray_actor import RayRemote
from penstock.launch.remote import Worker
from penstock.launch.services import Workers, sync_kind
from penstock.launch.supervise import Supervised, Surroundings
from penstock.launch.together import all_or_first_error, join, start_all, turns
from penstock.launch.trainer import RankGroup, watched
from penstock.types import WeightHandle

Resources = dict[str, float]


async def start(config: Config, total_steps: int, log_folder: Path) -> Workers:
    """Join or start the cluster, place the actors, build the parts."""
    kind = sync_kind(config, "object_store", "collective")
    ours = connect(config.launch)
    places: Places | None = None
    try:
        places = await Places.reserve(config.launch, ours)
        return await _start_parts(config, total_steps, log_folder, places, ours, kind)
    except BaseException:
        if places is not None:
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


def _amount(of: Mapping[str, float]) -> str:
    return f"{of.get('CPU', 0):g} CPU, {of.get('GPU', 0):g} GPU"


def _cannot_fit(settings: LaunchConfig, nodes: list[Resources]) -> str:
    def words(kind: str, count: int, cpus: float, gpus: float) -> str:
        return f"{count} {kind} of {cpus:g} CPU, {gpus:g} GPU"

    there = "; ".join(map(_amount, nodes)) or "no"
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


def _living_nodes() -> list[Resources]:
    import ray

    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


@dataclass(slots=True)
class Places:
    """Reserved bundles of the cluster, and who holds those of the producers."""

    consumers: Any
    producers: Any
    settings: LaunchConfig
    ours: bool  # the cluster is this run's alone
    held: dict[int, Supervised] = field(default_factory=dict)

    @classmethod
    async def reserve(cls, settings: LaunchConfig, ours: bool) -> Places:
        import ray
        from ray.util.placement_group import placement_group

        check_fit(settings, _living_nodes())
        for_consumers, for_producers = bundles(settings)
        consumers = placement_group(for_consumers, strategy="PACK")
        producers = placement_group(for_producers, strategy="SPREAD") if for_producers else None
        places = cls(consumers, producers, settings, ours)
        for group in places._groups():
            try:
                async with asyncio.timeout(settings.start_timeout_s):
                    await group.ready()
            except TimeoutError:
                places.release()
                free = ray.available_resources()
                raise RunError(
                    f"launch: no place after {settings.start_timeout_s:g} s; free in the cluster: "
                    f"{_amount(free)}, the rest is in use"
                ) from None
        return places

    def _groups(self) -> list[Any]:
        return [group for group in (self.consumers, self.producers) if group is not None]

    def consumer(self, number: int) -> dict[str, Any]:
        settings = self.settings
        return self._options(
            self.consumers, number, settings.cpus_per_consumer, settings.gpus_per_consumer
        )

    def free_bundle(self) -> int | None:
        """One that no producer holds, or whose producer was drained or given up."""
        for number in range(self.settings.num_producers):
            holder = self.held.get(number)
            if holder is None or holder.given_up is not None:
                return number
        return None

    def producer(self, bundle: int | None) -> dict[str, Any]:
        """None: it joined later and takes what is free, wherever that is."""
        settings = self.settings
        if bundle is None:
            return {
                "num_cpus": self._later()["CPU"],
                "num_gpus": settings.gpus_per_producer,
                "scheduling_strategy": "SPREAD",
            }
        group = self.producers or self.consumers
        return self._options(group, bundle, settings.cpus_per_producer, settings.gpus_per_producer)

    def _later(self) -> Resources:
        """What one that joins later asks for; CPUs of our own cluster are only counted."""
        cpus = 0.0 if self.ours else self.settings.cpus_per_producer
        return _bundle(cpus, self.settings.gpus_per_producer)

    def check_later(self, name: str, note: Callable[[str], None]) -> None:
        """Raise where no node could ever hold one more; tell where none can hold it now."""
        import ray

        asked, nodes = self._later(), _living_nodes()
        if not any(all(n.get(k, 0) >= v for k, v in asked.items()) for n in nodes):
            there = "; ".join(map(_amount, nodes))
            raise UserError(f"{name}: got {_amount(asked)}, allowed: what the nodes have: {there}")
        free = ray.available_resources()
        if any(free.get(key, 0) < value for key, value in asked.items()):
            timeout_s = self.settings.start_timeout_s
            note(f"{name}: waits up to {timeout_s:g} s for {_amount(asked)}; free: {_amount(free)}")

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
    site = _Site(config, log_folder, places, kind, around)
    if kind == "collective":
        site.distribution = Distribution(_spawn_distributor(site), settings, around)
    trainer = Supervised("trainer", _spawn_trainer(site, total_steps), settings, around)

    def make_engine(number: int) -> Supervised:
        name, bundle = f"engine-{number}", places.free_bundle()
        if bundle is None:
            places.check_later(name, around.note)
        one = Supervised(name, _spawn_engine(site, number, bundle), settings, around)
        if bundle is not None:
            places.held[bundle] = one
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
        around,
        kind,
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
    around: Surroundings
    distribution: Distribution | None = None

    async def actor(self, name: str, threads: int, options: dict[str, Any]) -> RayRemote:
        timeout_s, log = self.config.launch.start_timeout_s, self.log_folder / f"{name}.log"
        remote = await RayRemote.create(name, log, threads, timeout_s, **options)
        remote.note = lambda text: self.around.note(text)
        return remote

    async def build(self, remote: RayRemote, factory: str, *args: Any) -> RayRemote:
        timeout_s = self.config.launch.start_timeout_s
        try:
            await remote.build(f"penstock.launch.services:{factory}", *args, timeout_s=timeout_s)
        except WorkerDied:
            raise
        except BaseException:
            await remote.close()
            raise
        return remote


def _spawn_engine(site: _Site, number: int, bundle: int | None) -> Callable[[], Awaitable[Worker]]:
    async def spawn() -> Worker:
        options = site.places.producer(bundle)
        remote = await site.actor(f"engine-{number}", site.config.engine.threads, options)
        if site.distribution is not None:
            site.distribution.settle(number, remote.node)
        return await site.build(remote, "engine_part", site.config, site.sync, "", number)

    return spawn


def _spawn_trainer(site: _Site, total_steps: int) -> Callable[[], Awaitable[Worker]]:
    config, world = site.config, site.config.launch.num_consumers
    names = ["trainer"] if world == 1 else [f"trainer-{rank}" for rank in range(world)]
    folders: dict[str, str] = {}  # for weights, by node: a new trainer goes on in the old one's

    async def spawn() -> Worker:
        ranks = await all_or_first_error(
            *(
                site.actor(name, config.train.threads, site.places.consumer(rank))
                for rank, name in enumerate(names)
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
        folders[node] = await ranks[0].call("weights_folder")
        collect = watched(_collect, site.around.edges)
        return RankGroup(ranks, collect if site.sync == "object_store" else None)

    return spawn


def _spawn_distributor(site: _Site) -> Callable[[str, str, str], Awaitable[Worker]]:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    backend = site.config.sync.backend

    async def spawn(name: str, node: str, folder: str) -> Worker:
        where = NodeAffinitySchedulingStrategy(node, soft=False)
        remote = await site.actor(name, 1, {"num_cpus": 0, "scheduling_strategy": where})
        return await site.build(remote, "distributor_part", folder, node, remote.address, backend)

    return spawn


async def _collect(rank: Worker, handle: WeightHandle) -> WeightHandle:
    assert isinstance(rank, RayRemote)
    return await rank.collect(handle)
