"""Where the actors of a run are placed in a Ray cluster, also after their node has left.

Consumers are packed, producers spread; if colocated, each producer shares a bundle with a consumer. What
cannot fit is refused before any actor starts. A slot whose node has left gets another node as soon as one
has room, without a time limit: a worker that only lacks a place is never given up. A cluster that the run
started has one node: without it, a start fails, and `launch.max_restarts` bounds how often it is tried.

Every producer has a placement group of its own. Ray would place the lost bundles of a larger group
only together, and would place nothing else in the cluster until that succeeds.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeVar

from penstock.config import LaunchConfig, RayOptions
from penstock.errors import RunError, UserError
from penstock.workers.supervise.supervised import Supervised

T = TypeVar("T")
Resources = dict[str, float]
Labels = dict[str, str]
Options = dict[str, Any]  # Ray's options of an actor
_FIRST_LOOK_S = 1.0
_ANYWHERE = "anywhere"
# Ray's resource of a node with such a GPU, and how much to ask of it
_ACCELERATOR = "accelerator_type:"
_TRACE = 0.001
_NOT_NAMED = ("CPU", "GPU", "memory", "object_store_memory")


@dataclass(slots=True, frozen=True, kw_only=True)
class Need:
    """What a bundle asks of its node."""

    resources: Resources
    labels: Labels = field(default_factory=dict)

    @classmethod
    def of(
        cls, options: RayOptions, *, cpus: float | None = None, gpus: float | None = None
    ) -> Need:
        """What a role asks, with other CPUs or GPUs if given."""
        gpus = options.num_gpus if gpus is None else gpus
        resources = {"CPU": options.num_cpus if cpus is None else cpus}
        resources |= {"GPU": gpus} if gpus else {}
        if options.accelerator_type:
            resources[f"{_ACCELERATOR}{options.accelerator_type}"] = _TRACE
        return cls(resources=resources | options.resources, labels=options.label_selector)

    def fits(self, node: Node) -> bool:
        """Whether a node has the labels and, in what is left of it, the resources."""
        return _holds(node.left, self.resources) and _has_labels(node.labels, self.labels)

    def __str__(self) -> str:
        return _words(self.resources, self.labels)


@dataclass(slots=True, kw_only=True)
class Node:
    """A living node: its labels, and its resources less those of the bundles that were put there."""

    left: Resources
    labels: Labels

    def take(self, need: Need) -> None:
        for key, value in need.resources.items():
            self.left[key] = self.left.get(key, 0) - value

    def __str__(self) -> str:
        labels = {key: value for key, value in self.labels.items() if not key.startswith("ray.io/")}
        return _words(self.left, labels)


def bundles(settings: LaunchConfig) -> tuple[list[Need], list[Need]]:
    """The bundles of consumers and of producers; if colocated, the first list holds all."""
    rank = settings.ray_options_of("consumers")
    consumers = [Need.of(rank)] * settings.num_consumers
    places = [settings.engine_ray_options(number) for number in range(settings.num_producers)]
    if not settings.colocate:
        return consumers, [Need.of(place) for place in places]
    shared = []
    for number in range(max(len(consumers), len(places))):
        cpus = rank.num_cpus if number < len(consumers) else 0.0
        gpus = rank.num_gpus
        if number < len(places):
            cpus, gpus = cpus + places[number].num_cpus, max(gpus, places[number].num_gpus)
        shared.append(Need.of(rank, cpus=cpus, gpus=gpus))
    return shared, []


def check_fit(settings: LaunchConfig, nodes: list[Node], agents: Need, num_agents: int = 0) -> None:
    """Raise unless every bundle fits a node; tries those with the fewest nodes and the largest first.

    Agent actors have no bundle, but they need room too.
    """
    left = [Node(left=dict(node.left), labels=node.labels) for node in nodes]
    packed, spread = bundles(settings)
    asked = [("launch.ray_options.consumers", need) for need in packed]
    asked += [("launch.ray_options.producers", need) for need in spread]
    asked += [("launch.ray_options.agents", agents)] * num_agents
    could = {str(need): sum(need.fits(node) for node in nodes) for _, need in asked}
    asked.sort(key=lambda entry: (could[str(entry[1])], *_by_free_resources(entry[1].resources)))
    while asked:
        role, need = asked[0]
        fitting = [node for node in left if need.fits(node)]
        if not fitting:
            count, there = asked.count((role, need)), "; ".join(map(str, nodes)) or "nothing"
            shared = " (colocated)" if settings.colocate else ""
            raise UserError(
                f"{role}{shared}: got {count} more of {need} than find a place, allowed: what the "
                f"{len(nodes)} nodes have: {there}"
            )
        min(fitting, key=lambda node: _by_free_resources(node.left)).take(need)
        del asked[0]


def _holds(node: Mapping[str, float], asked: Resources) -> bool:
    return all(node.get(key, 0) >= value for key, value in asked.items())


def _has_labels(labels: Labels, asked: Labels) -> bool:
    """Whether a node's labels match; values are written as Ray writes them."""
    for key, wanted in asked.items():
        negated, text = wanted.startswith("!"), wanted.removeprefix("!")
        is_list = text.startswith("in(") and text.endswith(")")
        values = [value.strip() for value in text[3:-1].split(",")] if is_list else [text]
        if (labels.get(key) in values) == negated:
            return False
    return True


def _words(resources: Mapping[str, float], labels: Mapping[str, str] = MappingProxyType({})) -> str:
    """CPUs, GPUs, custom resources and labels as words."""
    parts = [f"{resources.get('CPU', 0):g} CPU, {resources.get('GPU', 0):g} GPU"]
    for key, value in resources.items():
        if key.startswith(_ACCELERATOR):
            parts.append(key.removeprefix(_ACCELERATOR))
        elif key not in _NOT_NAMED and not key.startswith("node:"):
            parts.append(f"{value:g} {key}")
    return ", ".join([*parts, *(f"{key}={value}" for key, value in labels.items())])


def _living_nodes() -> dict[str, Node]:
    import ray

    return {
        node["NodeID"]: Node(left=dict(node["Resources"]), labels=node.get("Labels") or {})
        for node in ray.nodes()
        if node["Alive"]
    }


class Reservation:
    """One Ray placement group; a new group replaces it after a node of it has left."""

    def __init__(
        self, asked: list[Need], strategy: str, *, target: str = "", is_shared: bool = False
    ) -> None:
        """`target`: the preferred first node. `is_shared`: its actors end at different times."""
        self.asked, self._strategy, self._is_shared = asked, strategy, is_shared
        self._group, self._was_placed = self._create(target), False

    def _create(self, target: str = "") -> Any:
        from ray.util.placement_group import placement_group

        nothing = {"memory": 1}  # Ray refuses an empty bundle; no CPU, which another may need whole
        resources = [
            need.resources if any(need.resources.values()) else nothing for need in self.asked
        ]
        more: Options = {}
        if any(need.labels for need in self.asked):
            more["bundle_label_selector"] = [need.labels for need in self.asked]
        if target:  # only this strategy reads it; for one bundle all strategies are the same
            more["_soft_target_node_id"] = target
        return placement_group(resources, "STRICT_PACK" if target else self._strategy, **more)

    def options(self, number: int) -> Options:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        where = PlacementGroupSchedulingStrategy(
            placement_group=self._group, placement_group_bundle_index=number
        )
        return {"scheduling_strategy": where}

    async def node(self, number: int) -> str:
        """The living node of a bundle; empty if it has none now."""
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
    place: RayOptions | None = None  # what its producer asks; None: any producer may take it
    is_extra: bool = False  # returned to the cluster when its worker is drained
    worker: Supervised | None = None
    has_served: bool = False  # an actor in this slot has served

    @property
    def is_free(self) -> bool:
        return self.worker is None or self.worker.given_up is not None

    @property
    def asked(self) -> str:
        return "nothing" if self.reservation is None else str(self.reservation.asked[self.number])

    def options(self) -> Options:
        counted: Options = {"num_cpus": self.cpus, "num_gpus": self.gpus}
        if self.reservation is None:
            return {**counted, "scheduling_strategy": "SPREAD"}
        return {**counted, **self.reservation.options(self.number)}

    async def node(self) -> str:
        """The living node of the bundle; empty if it has none now."""
        return _ANYWHERE if self.reservation is None else await self.reservation.node(self.number)


class Placement:
    """The placement slots of a run. Consumes nodes as they join and leave, produces actors' options."""

    def __init__(
        self,
        settings: LaunchConfig,
        ours: bool,
        note: Callable[[str], None],
        *,
        num_agents: int = 0,
    ) -> None:
        """`ours`: this run has started the cluster and is its only user."""
        self._settings, self._ours, self._note = settings, ours, note
        self._num_agents = num_agents
        self._reservations: list[Reservation] = []
        self.consumers: list[PlacementSlot] = []
        self.producers: list[PlacementSlot] = []

    async def reserve(self) -> None:
        """Reserve all slots, or raise one line that says why that failed."""
        import ray

        limit_s = self._settings.start_timeout_s
        try:
            self._check_fit()
        except UserError as error:
            if not self._settings.wait_for_nodes_s:
                raise
            limit_s = self._settings.wait_for_nodes_s
            self._note(f"launch: waits up to {limit_s:g} s for more nodes ({error})")
        try:
            async with asyncio.timeout(limit_s):
                await self._reserve_all()
        except TimeoutError:
            self._check_fit()  # its line says what is missing
            raise RunError(
                f"launch: Ray could not place all workers within {limit_s:g} s; "
                f"free in the cluster: {_words(ray.available_resources())}, the rest is in use"
            ) from None

    def _check_fit(self) -> None:
        nodes = list(_living_nodes().values())
        check_fit(self._settings, nodes, self._agent_need(), self._num_agents)

    async def _reserve_all(self) -> None:
        """Reserve the slots of the trainer, with engines that share its devices, then those of other engines."""
        settings, (packed, spread) = self._settings, bundles(self._settings)
        places = [settings.engine_ray_options(number) for number in range(settings.num_producers)]
        taken: list[tuple[str, Need]] = []  # node -> a bundle that is there
        if packed:
            group = self._add(Reservation(packed, "PACK", is_shared=settings.colocate))
            await group.ready()
            share = 2 if settings.colocate else 1  # two actors see the same device
            rank = settings.ray_options_of("consumers")
            self.consumers = [
                PlacementSlot(group, number, rank.num_cpus, rank.num_gpus / share)
                for number in range(settings.num_consumers)
            ]
            if settings.colocate:
                self.producers = [
                    PlacementSlot(group, n, place.num_cpus, place.num_gpus / share, place)
                    for n, place in enumerate(places)
                ]
            taken = [(await group.node(number), need) for number, need in enumerate(packed)]
        if settings.colocate:
            return
        targets = spread_over(_living_nodes(), taken, spread)
        groups = [
            self._add(Reservation([asked], "SPREAD", target=target))
            for asked, target in zip(spread, targets, strict=True)
        ]
        await asyncio.gather(*(group.ready() for group in groups))
        self.producers = [
            PlacementSlot(group, 0, place.num_cpus, place.num_gpus, place)
            for group, place in zip(groups, places, strict=True)
        ]

    def _add(self, reservation: Reservation) -> Reservation:
        self._reservations.append(reservation)
        return reservation

    def take(self, name: str, number: int) -> PlacementSlot:
        """The slot of a producer that was drained or given up and asked the same, else a new slot."""
        import ray

        place = self._settings.engine_ray_options(number)
        for slot in self.producers:
            if slot.is_free and slot.place in (None, place):
                slot.worker, slot.has_served = None, False
                return slot
        asked = Need.of(place, cpus=0.0 if self._ours else None)
        nodes = list(_living_nodes().values())
        limit_s = self._settings.wait_for_nodes_s
        if not any(asked.fits(node) for node in nodes):
            if not limit_s:
                there = "; ".join(map(str, nodes))
                raise UserError(f"{name}: got {asked}, allowed: what the nodes have: {there}")
            self._note(f"{name}: waits up to {limit_s:g} s for a node with {asked}")
        else:
            free = ray.available_resources()
            if not _holds(free, asked.resources):
                limit_s = self._settings.start_timeout_s
                self._note(f"{name}: waits up to {limit_s:g} s for {asked}; free: {_words(free)}")
        is_counted = any(asked.resources.values()) or asked.labels
        reservation = self._add(Reservation([asked], "SPREAD")) if is_counted else None
        cpus, gpus = asked.resources["CPU"], place.num_gpus
        slot = PlacementSlot(reservation, 0, cpus, gpus, place=place, is_extra=True)
        self.producers.append(slot)
        return slot

    def agent_options(self) -> Options:
        """The options of an actor that runs an agent loop; it takes no slot."""
        need, options = self._agent_need(), self._settings.ray_options_of("agents")
        custom = {key: value for key, value in need.resources.items() if key not in ("CPU", "GPU")}
        return {
            "num_cpus": need.resources["CPU"],
            "num_gpus": options.num_gpus,
            "resources": custom,
            **({"label_selector": need.labels} if need.labels else {}),
            "scheduling_strategy": "SPREAD",
        }

    def _agent_need(self) -> Need:
        """What an agent actor asks; no CPUs in a cluster of this run, where they are only counted."""
        return Need.of(self._settings.ray_options_of("agents"), cpus=0.0 if self._ours else None)

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
            limit_s = max(self._settings.start_timeout_s, self._settings.wait_for_nodes_s)
            try:
                async with asyncio.timeout(limit_s):
                    return await slot.reservation.find_node(slot.number)
            except TimeoutError:
                raise RunError(f"{name}: Ray gave it no place within {limit_s:g} s") from None
        if self._ours and not await asyncio.to_thread(_living_nodes):
            raise RunError(
                f"{name}: the cluster that this run started has lost its only node, and no other "
                "joins it; resume the run"
            )
        free = _words(await asyncio.to_thread(ray.available_resources))
        self._note(
            f"{name}: its node has left; it waits for one with {slot.asked} free, "
            f"for as long as the run goes on (free in the whole cluster: {free})"
        )
        return await slot.reservation.find_node(slot.number)

    def free(self, slot: PlacementSlot, name: str) -> None:
        """Free the slot of a worker that was drained or never started; return an extra one to the cluster."""
        if slot.worker is not None and slot.worker.name != name:
            return  # another worker has taken the slot
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
    nodes: Mapping[str, Node], taken: list[tuple[str, Need]], asked: list[Need]
) -> list[str]:
    """Choose a node per bundle: the one with fewest bundles, then most left; empty if none fits."""
    left = {name: Node(left=dict(node.left), labels=node.labels) for name, node in nodes.items()}
    for name, bundle in taken:
        if name in left:
            left[name].take(bundle)
    counts, chosen = Counter[str](), []
    for bundle in asked:
        fitting = [name for name, node in left.items() if bundle.fits(node)]
        best = min(
            fitting,
            key=lambda name: (counts[name], *_by_free_resources(left[name].left)),
            default="",
        )
        if best:
            left[best].take(bundle)
            counts[best] += 1
        chosen.append(best)
    return chosen


def _by_free_resources(node: Resources) -> tuple[float, float]:
    return -node.get("GPU", 0), -node.get("CPU", 0)
