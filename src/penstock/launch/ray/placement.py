"""Where the actors of a run sit in a Ray cluster, and where one sits whose node has left.

Consumers sit together (packed), producers spread; colocated, each producer shares a bundle with a
consumer. What cannot fit is refused before any actor starts. A seat whose node has left gets another
node as soon as one has room, however long that takes: a worker that only lacks a place is never given up.

Every producer has a placement group of its own. Ray would place the lost bundles of a larger group only
together, and try that before anything else in the cluster: while it fails, nobody gets a place.
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
Options = dict[str, Any]  # of an actor
_FIRST_LOOK_S = 1.0
_ANYWHERE = "anywhere"


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


class Reserved:
    """Bundles that Ray keeps for us: one placement group, and the next one when a node of it has left."""

    def __init__(
        self, asked: list[Resources], strategy: str, *, target: str = "", is_shared: bool = False
    ) -> None:
        """`target`: the node to begin with, if it has room. `is_shared`: who sits there ends at different times."""
        self.asked, self._strategy, self._is_shared = asked, strategy, is_shared
        self._group, self._was_placed = self._ask(target), False

    def _ask(self, target: str = "") -> Any:
        from ray.util.placement_group import placement_group

        if target:  # which Ray heeds for this strategy alone; of one bundle they are all the same
            return placement_group(self.asked, "STRICT_PACK", _soft_target_node_id=target)
        return placement_group(self.asked, self._strategy)

    def options(self, number: int) -> Options:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        where = PlacementGroupSchedulingStrategy(
            placement_group=self._group, placement_group_bundle_index=number
        )
        return {"scheduling_strategy": where}

    async def node(self, number: int) -> str:
        """The living node that a bundle is on; empty: none now."""
        return await asyncio.to_thread(_node_of, self._group, number)

    async def ready(self) -> None:
        """Waits for: nodes with room for all of it. Woken by Ray, when one joins or is given back."""
        group = self._group
        await group.ready()
        self._was_placed = self._was_placed or group is self._group

    async def find_node(self, number: int) -> str:
        """Waits for a node of this bundle. One that left is replaced, when all who sit here have ended."""
        while True:
            group = self._group
            if node := await self.node(number):
                return node
            seen_to = group is not self._group  # by another bundle's actor
            if self._was_placed and not seen_to and not self._is_shared:
                self.remove()
                self._group, self._was_placed = self._ask(), False
            await self.ready()

    def remove(self) -> None:
        from ray.util.placement_group import remove_placement_group

        remove_placement_group(self._group)


def _node_of(group: Any, number: int) -> str:
    from ray.util.placement_group import placement_group_table

    node = str(placement_group_table(group)["bundles_to_node_id"].get(number, ""))
    return node if node in _living_nodes() else ""


@dataclass(slots=True, eq=False)
class Seat:
    """Of one actor after another: a bundle, and whose it is."""

    reserved: Reserved | None  # None: anywhere, since nothing is counted for it
    number: int
    cpus: float
    gpus: float
    is_extra: bool = False  # given back to the cluster when its holder is drained
    holder: Supervised | None = None
    is_used: bool = False  # its holder has served from here

    @property
    def is_free(self) -> bool:
        return self.holder is None or self.holder.given_up is not None

    @property
    def asked(self) -> Resources:
        return {} if self.reserved is None else self.reserved.asked[self.number]

    def options(self) -> Options:
        counted: Options = {"num_cpus": self.cpus, "num_gpus": self.gpus}
        if self.reserved is None:
            return {**counted, "scheduling_strategy": "SPREAD"}
        return {**counted, **self.reserved.options(self.number)}

    async def node(self) -> str:
        """The living node of its bundle; empty: it has none now."""
        return _ANYWHERE if self.reserved is None else await self.reserved.node(self.number)


class Places:
    """The seats of a run. Consumes nodes as they come and go, produces options for actors."""

    def __init__(self, settings: LaunchConfig, ours: bool, note: Callable[[str], None]) -> None:
        """`ours`: the cluster is this run's alone."""
        self._settings, self._ours, self._note = settings, ours, note
        self._reserved: list[Reserved] = []
        self.consumers: list[Seat] = []
        self.producers: list[Seat] = []

    async def reserve(self) -> None:
        """All seats, or one line that says why not."""
        import ray

        settings = self._settings
        check_fit(settings, list(_living_nodes().values()))
        try:
            async with asyncio.timeout(settings.start_timeout_s):
                await self._reserve_all()
        except TimeoutError:
            free = ray.available_resources()
            raise RunError(
                f"launch: no place after {settings.start_timeout_s:g} s; free in the cluster: "
                f"{amount(free)}, the rest is in use"
            ) from None

    async def _reserve_all(self) -> None:
        settings, (packed, spread) = self._settings, bundles(self._settings)
        together = self._keep(Reserved(packed, "PACK", is_shared=settings.colocate))
        await together.ready()
        share = 2 if settings.colocate else 1  # two actors see the same device
        counted = (settings.cpus_per_consumer, settings.gpus_per_consumer / share)
        self.consumers = [Seat(together, n, *counted) for n in range(settings.num_consumers)]
        counted = (settings.cpus_per_producer, settings.gpus_per_producer / share)
        if settings.colocate:
            self.producers = [Seat(together, n, *counted) for n in range(settings.num_producers)]
            return
        taken = [await together.node(number) for number in range(len(packed))]
        targets = spread_over(_living_nodes(), list(zip(taken, packed, strict=True)), spread)
        each = [
            self._keep(Reserved([asked], "SPREAD", target=target))
            for asked, target in zip(spread, targets, strict=True)
        ]
        await asyncio.gather(*(one.ready() for one in each))
        self.producers = [Seat(one, 0, *counted) for one in each]

    def _keep(self, reserved: Reserved) -> Reserved:
        self._reserved.append(reserved)
        return reserved

    def take(self, name: str) -> Seat:
        """For a producer: the seat of one that was drained or given up, else a further one."""
        for seat in self.producers:
            if seat.is_free:
                seat.holder, seat.is_used = None, False
                return seat
        asked = self._later()
        self._check_later(name, asked)
        reserved = self._keep(Reserved([asked], "SPREAD")) if any(asked.values()) else None
        seat = Seat(reserved, 0, asked["CPU"], asked.get("GPU", 0.0), is_extra=True)
        self.producers.append(seat)
        return seat

    def _later(self) -> Resources:
        """What one that joins later asks for; CPUs of our own cluster are only counted."""
        cpus = 0.0 if self._ours else self._settings.cpus_per_producer
        return _bundle(cpus, self._settings.gpus_per_producer)

    def _check_later(self, name: str, asked: Resources) -> None:
        """Raise where no node could ever hold one more; tell where none can hold it now."""
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

    async def settle(self, names: list[str], seats: list[Seat]) -> None:
        """Before the first of several sits down again: a node for each, since they lose them together."""
        for name, seat in zip(names, seats, strict=True):
            await self._find_node(name, seat)

    async def sit(
        self, name: str, seat: Seat, create: Callable[[Options], Coroutine[Any, Any, T]]
    ) -> T:
        """An actor in this seat; one whose node leaves before it is there is asked for again.

        A holder that never served waits `start_timeout_s` for a place; later, for as long as it takes.
        """
        while True:
            node = await self._find_node(name, seat)
            creating = asyncio.create_task(create(seat.options()), name=f"create {name}")
            creating.add_done_callback(lambda task: task.cancelled() or task.exception())
            try:
                if await self._is_made(creating, seat, node):
                    return creating.result()
            finally:
                creating.cancel()
                await asyncio.wait([creating])

    async def _is_made(self, creating: asyncio.Task[Any], seat: Seat, node: str) -> bool:
        """False: its node is lost. Nothing tells of that, so it is looked at, ever more seldom."""
        look_s = _FIRST_LOOK_S
        while not (await asyncio.wait([creating], timeout=look_s))[0]:
            look_s *= 2
            if await seat.node() != node:
                return False
        failed = isinstance(creating.exception(), RunError)
        return not failed or await seat.node() == node

    async def _find_node(self, name: str, seat: Seat) -> str:
        """Waits for: a node with room. Woken by Ray, when one joins or others give back what they had."""
        import ray

        if node := await seat.node():
            return node
        assert seat.reserved is not None
        if not seat.is_used:
            return await self._first_node(name, seat, seat.reserved)
        free = amount(await asyncio.to_thread(ray.available_resources))
        self._note(
            f"{name}: its node has left; it waits for one with {amount(seat.asked)} free, "
            f"for as long as the run goes on (free in the whole cluster: {free})"
        )
        return await seat.reserved.find_node(seat.number)

    async def _first_node(self, name: str, seat: Seat, reserved: Reserved) -> str:
        limit_s = self._settings.start_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                return await reserved.find_node(seat.number)
        except TimeoutError:
            raise RunError(f"{name}: Ray gave it no place within {limit_s:g} s") from None

    def leave(self, seat: Seat, holder: Supervised | None) -> None:
        """It was drained, or did not even start: the next may have its seat, or the whole cluster."""
        if seat.holder is not holder:
            return
        seat.holder = None
        if seat.is_extra and seat in self.producers:
            self.producers.remove(seat)
            if seat.reserved is not None:
                self._reserved.remove(seat.reserved)
                seat.reserved.remove()

    def release(self) -> None:
        while self._reserved:
            self._reserved.pop().remove()


def spread_over(
    nodes: Mapping[str, Resources], taken: list[tuple[str, Resources]], asked: list[Resources]
) -> list[str]:
    """A node for each, where the fewest of them are, then the one with most left; empty: none has room."""
    left = {name: dict(node) for name, node in nodes.items()}
    for name, bundle in taken:
        _subtract(left.get(name, {}), bundle)
    counts, chosen = Counter[str](), []
    for bundle in asked:
        fitting = [name for name, node in left.items() if _holds(node, bundle)]
        best = min(fitting, key=lambda name: (counts[name], *_most_first(left[name])), default="")
        if best:
            _subtract(left[best], bundle)
            counts[best] += 1
        chosen.append(best)
    return chosen


def _subtract(node: Resources, bundle: Resources) -> None:
    for key, value in bundle.items():
        node[key] = node.get(key, 0) - value


def _most_first(node: Resources) -> tuple[float, float]:
    return -node.get("GPU", 0), -node.get("CPU", 0)
