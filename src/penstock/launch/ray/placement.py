"""Where the actors of a run are placed in a Ray cluster, also after their node has left.

Consumers are packed, producers spread; if colocated, each producer shares a bundle with a consumer. What
cannot fit is refused before any actor starts. A slot whose node has left gets another node as soon as one
has room, without a time limit: a worker that only lacks a place is never given up.

Every producer has a placement group of its own. Ray would place the lost bundles of a larger group
only together, and would place nothing else in the cluster until that succeeds.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from penstock.config import LaunchConfig
from penstock.errors import RunError, UserError
from penstock.supervise.supervised import Supervised

T = TypeVar("T")
Resources = dict[str, float]
Options = dict[str, Any]  # Ray's options of an actor
_FIRST_LOOK_S = 1.0
_ANYWHERE = "anywhere"


def bundles(settings: LaunchConfig) -> tuple[list[Resources], list[Resources]]:
    """Return the bundles of consumers and of producers; if colocated, the first list holds all."""
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
    """Raise unless every bundle fits a node; tries the largest first, on the node with most left."""
    left = [dict(node) for node in nodes]
    asked = [bundle for part in bundles(settings) for bundle in part]
    for bundle in sorted(asked, key=lambda b: (b.get("GPU", 0), b["CPU"]), reverse=True):
        fitting = [n for n in left if _holds(n, bundle)]
        if not fitting:
            raise UserError(_cannot_fit(settings, nodes))
        best = max(fitting, key=lambda n: (n.get("GPU", 0), n.get("CPU", 0)))
        for key, value in bundle.items():
            best[key] -= value


def _holds(node: Mapping[str, float], asked: Resources) -> bool:
    return all(node.get(key, 0) >= value for key, value in asked.items())


def amount(of: Mapping[str, float]) -> str:
    return f"{of.get('CPU', 0):g} CPU, {of.get('GPU', 0):g} GPU"


def _cannot_fit(settings: LaunchConfig, nodes: list[Resources]) -> str:
    def words(kind: str, count: int, cpus: float, gpus: float) -> str:
        return f"{count} {kind} of {cpus:g} CPU, {gpus:g} GPU"

    there = "; ".join(map(amount, nodes)) or "no"
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


def _living_nodes() -> dict[str, Resources]:
    import ray

    return {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}


class Reservation:
    """One Ray placement group; a new group replaces it after a node of it has left."""

    def __init__(
        self, asked: list[Resources], strategy: str, *, target: str = "", is_shared: bool = False
    ) -> None:
        """`target`: the preferred first node. `is_shared`: its actors end at different times."""
        self.asked, self._strategy, self._is_shared = asked, strategy, is_shared
        self._group, self._was_placed = self._create(target), False

    def _create(self, target: str = "") -> Any:
        from ray.util.placement_group import placement_group

        if target:  # only this strategy reads it; for one bundle all strategies are the same
            return placement_group(self.asked, "STRICT_PACK", _soft_target_node_id=target)
        return placement_group(self.asked, self._strategy)

    def options(self, number: int) -> Options:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        where = PlacementGroupSchedulingStrategy(
            placement_group=self._group, placement_group_bundle_index=number
        )
        return {"scheduling_strategy": where}

    async def node(self, number: int) -> str:
        """Return the living node of a bundle; empty if it has none now."""
        return await asyncio.to_thread(_node_of, self._group, number)

    async def ready(self) -> None:
        """Waits for nodes with room for all bundles; woken by Ray when a node joins or frees resources."""
        group = self._group
        await group.ready()
        self._was_placed = self._was_placed or group is self._group

    async def find_node(self, number: int) -> str:
        """Waits for a node of this bundle; a group whose node has left is replaced, unless it is shared."""
        while True:
            group = self._group
            if node := await self.node(number):
                return node
            is_replaced = group is not self._group  # by the actor of another bundle
            if self._was_placed and not is_replaced and not self._is_shared:
                self.remove()
                self._group, self._was_placed = self._create(), False
            await self.ready()

    def remove(self) -> None:
        from ray.util.placement_group import remove_placement_group

        remove_placement_group(self._group)


def _node_of(group: Any, number: int) -> str:
    from ray.util.placement_group import placement_group_table

    node = str(placement_group_table(group)["bundles_to_node_id"].get(number, ""))
    return node if node in _living_nodes() else ""


@dataclass(slots=True, eq=False)
class PlacementSlot:
    """A bundle for one actor at a time, and the worker that the actor serves."""

    reservation: Reservation | None  # None: any node, as nothing is reserved
    number: int
    cpus: float
    gpus: float
    is_extra: bool = False  # returned to the cluster when its worker is drained
    worker: Supervised | None = None
    has_served: bool = False  # an actor in this slot has served

    @property
    def is_free(self) -> bool:
        return self.worker is None or self.worker.given_up is not None

    @property
    def asked(self) -> Resources:
        return {} if self.reservation is None else self.reservation.asked[self.number]

    def options(self) -> Options:
        counted: Options = {"num_cpus": self.cpus, "num_gpus": self.gpus}
        if self.reservation is None:
            return {**counted, "scheduling_strategy": "SPREAD"}
        return {**counted, **self.reservation.options(self.number)}

    async def node(self) -> str:
        """Return the living node of the bundle; empty if it has none now."""
        return _ANYWHERE if self.reservation is None else await self.reservation.node(self.number)


class Placement:
    """The placement slots of a run. Consumes nodes as they join and leave, produces actors' options."""

    def __init__(self, settings: LaunchConfig, ours: bool, note: Callable[[str], None]) -> None:
        """`ours`: this run has started the cluster and is its only user."""
        self._settings, self._ours, self._note = settings, ours, note
        self._reservations: list[Reservation] = []
        self.consumers: list[PlacementSlot] = []
        self.producers: list[PlacementSlot] = []

    async def reserve(self) -> None:
        """Reserve all slots, or raise one line that says why that failed."""
        import ray

        settings = self._settings
        check_fit(settings, list(_living_nodes().values()))
        try:
            async with asyncio.timeout(settings.start_timeout_s):
                await self._reserve_all()
        except TimeoutError:
            free = ray.available_resources()
            raise RunError(
                f"launch: Ray could not place all workers within {settings.start_timeout_s:g} s; "
                f"free in the cluster: {amount(free)}, the rest is in use"
            ) from None

    async def _reserve_all(self) -> None:
        settings, (packed, spread) = self._settings, bundles(self._settings)
        packed_group = self._add(Reservation(packed, "PACK", is_shared=settings.colocate))
        await packed_group.ready()
        share = 2 if settings.colocate else 1  # two actors see the same device
        counted = (settings.cpus_per_consumer, settings.gpus_per_consumer / share)
        self.consumers = [
            PlacementSlot(packed_group, n, *counted) for n in range(settings.num_consumers)
        ]
        counted = (settings.cpus_per_producer, settings.gpus_per_producer / share)
        if settings.colocate:
            self.producers = [
                PlacementSlot(packed_group, n, *counted) for n in range(settings.num_producers)
            ]
            return
        taken = [await packed_group.node(number) for number in range(len(packed))]
        targets = spread_over(_living_nodes(), list(zip(taken, packed, strict=True)), spread)
        each = [
            self._add(Reservation([asked], "SPREAD", target=target))
            for asked, target in zip(spread, targets, strict=True)
        ]
        await asyncio.gather(*(one.ready() for one in each))
        self.producers = [PlacementSlot(one, 0, *counted) for one in each]

    def _add(self, reservation: Reservation) -> Reservation:
        self._reservations.append(reservation)
        return reservation

    def take(self, name: str) -> PlacementSlot:
        """Return the slot of a producer that was drained or given up, else a new slot."""
        for slot in self.producers:
            if slot.is_free:
                slot.worker, slot.has_served = None, False
                return slot
        asked = self._extra_bundle()
        self._check_extra(name, asked)
        reservation = self._add(Reservation([asked], "SPREAD")) if any(asked.values()) else None
        slot = PlacementSlot(reservation, 0, asked["CPU"], asked.get("GPU", 0.0), is_extra=True)
        self.producers.append(slot)
        return slot

    def anywhere(self) -> Options:
        """Return the options of an actor of one CPU on any node; it takes no slot."""
        return {"num_cpus": 0 if self._ours else 1, "scheduling_strategy": "SPREAD"}

    def _extra_bundle(self) -> Resources:
        """Return the bundle of a producer that joins later; no CPUs in a cluster of this run."""
        cpus = 0.0 if self._ours else self._settings.cpus_per_producer
        return _bundle(cpus, self._settings.gpus_per_producer)

    def _check_extra(self, name: str, asked: Resources) -> None:
        """Raise if no node could ever hold the bundle; tell the user if none can hold it now."""
        import ray

        nodes = list(_living_nodes().values())
        if not any(_holds(node, asked) for node in nodes):
            there = "; ".join(map(amount, nodes))
            raise UserError(f"{name}: got {amount(asked)}, allowed: what the nodes have: {there}")
        free = ray.available_resources()
        if not _holds(free, asked):
            limit_s = self._settings.start_timeout_s
            self._note(
                f"{name}: waits up to {limit_s:g} s for {amount(asked)}; free: {amount(free)}"
            )

    async def find_nodes(self, names: list[str], slots: list[PlacementSlot]) -> None:
        """Find nodes for all actors before the first starts: they lose their nodes together."""
        for name, slot in zip(names, slots, strict=True):
            await self._find_node(name, slot)

    async def start_actor(
        self, name: str, slot: PlacementSlot, create: Callable[[Options], Coroutine[Any, Any, T]]
    ) -> T:
        """Create an actor in this slot; create it again if its node leaves before it has started.

        The first actor of a slot waits up to `start_timeout_s` for a node, later ones without limit.
        """
        while True:
            node = await self._find_node(name, slot)
            creating = asyncio.create_task(create(slot.options()), name=f"create {name}")
            creating.add_done_callback(lambda task: task.cancelled() or task.exception())
            try:
                if await self._has_started(creating, slot, node):
                    return creating.result()
            finally:
                creating.cancel()
                await asyncio.wait([creating])

    async def _has_started(
        self, creating: asyncio.Task[Any], slot: PlacementSlot, node: str
    ) -> bool:
        """Wait for the actor; return False if its node left. Ray does not report that, so this looks."""
        look_s = _FIRST_LOOK_S
        while not (await asyncio.wait([creating], timeout=look_s))[0]:
            look_s *= 2
            if await slot.node() != node:
                return False
        failed = isinstance(creating.exception(), RunError)
        return not failed or await slot.node() == node

    async def _find_node(self, name: str, slot: PlacementSlot) -> str:
        """Waits for a node with room; woken by Ray when a node joins or resources are freed."""
        import ray

        if node := await slot.node():
            return node
        assert slot.reservation is not None
        if not slot.has_served:
            return await self._first_node(name, slot, slot.reservation)
        free = amount(await asyncio.to_thread(ray.available_resources))
        self._note(
            f"{name}: its node has left; it waits for one with {amount(slot.asked)} free, "
            f"for as long as the run goes on (free in the whole cluster: {free})"
        )
        return await slot.reservation.find_node(slot.number)

    async def _first_node(self, name: str, slot: PlacementSlot, reservation: Reservation) -> str:
        limit_s = self._settings.start_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                return await reservation.find_node(slot.number)
        except TimeoutError:
            raise RunError(f"{name}: Ray gave it no place within {limit_s:g} s") from None

    def free(self, slot: PlacementSlot, worker: Supervised | None) -> None:
        """Free the slot of a worker that was drained or never started; return an extra one to the cluster."""
        if slot.worker is not worker:
            return
        slot.worker = None
        if slot.is_extra and slot in self.producers:
            self.producers.remove(slot)
            if slot.reservation is not None:
                self._reservations.remove(slot.reservation)
                slot.reservation.remove()

    def release(self) -> None:
        while self._reservations:
            self._reservations.pop().remove()


def spread_over(
    nodes: Mapping[str, Resources], taken: list[tuple[str, Resources]], asked: list[Resources]
) -> list[str]:
    """Choose a node per bundle: the one with fewest bundles, then most left; empty if none fits."""
    left = {name: dict(node) for name, node in nodes.items()}
    for name, bundle in taken:
        _subtract(left.get(name, {}), bundle)
    counts, chosen = Counter[str](), []
    for bundle in asked:
        fitting = [name for name, node in left.items() if _holds(node, bundle)]
        best = min(
            fitting, key=lambda name: (counts[name], *_by_free_resources(left[name])), default=""
        )
        if best:
            _subtract(left[best], bundle)
            counts[best] += 1
        chosen.append(best)
    return chosen


def _subtract(node: Resources, bundle: Resources) -> None:
    for key, value in bundle.items():
        node[key] = node.get(key, 0) - value


def _by_free_resources(node: Resources) -> tuple[float, float]:
    return -node.get("GPU", 0), -node.get("CPU", 0)
