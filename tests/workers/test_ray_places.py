"""A worker whose node has left waits for another node without a limit, and is not given up."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.config import LaunchConfig
from penstock.errors import RunError, UserError, WorkerDied
from penstock.run.job import Job
from penstock.store.run_folder import RunFolder
from penstock.workers.supervise.supervised import Supervised
from stages.disturbed_run import STEPS, assert_balanced, config_of, digests, run, when_told
from stages.ray_nodes import Nodes, node_of

ray = pytest.importorskip("ray")
from penstock.workers.ray.placement import Placement, PlacementSlot  # noqa: E402

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]
LONGEST_S = 300.0  # longer than any test waits


@pytest.fixture(scope="module")
def cluster() -> Iterator[Nodes]:
    nodes = Nodes(2, 1)
    yield nodes
    nodes.close()


def placement_of(notes: list[str], **fields: Any) -> Placement:
    settings = LaunchConfig.model_validate({"kind": "ray", **fields})
    return Placement(settings, False, notes.append)


@pytest.mark.slow
def test_an_engine_that_no_node_has_room_for_comes_back_on_one_that_joins_later(
    cluster: Nodes, quiet: RunFolder, tmp_path: Path
) -> None:
    """The other engine generates a step in that time; waiting does not count as a restart."""
    (second,) = cluster.ids
    seen: dict[str, str] = {}
    waits = asyncio.Event()

    async def disturb(job: Job, step: int) -> None:
        if step == 2:
            when_told(job, "it waits for one with 1 CPU, 0 GPU free", waits.set)
            names = ("engine-0", "engine-1")
            seen["lost"] = next(name for name in names if node_of(job, name) == second)
            cluster.leave(second)
            async with asyncio.timeout(LONGEST_S):
                await waits.wait()
        if step == STEPS:
            lost = job.workers.supervised[seen["lost"]]
            assert lost.worker is None
            seen["third"] = cluster.join(1)
            async with asyncio.timeout(LONGEST_S):
                await lost.ready()
            seen["node"] = node_of(job, seen["lost"])
            assert lost.restarts == 1

    words = ["launch.kind=ray", "launch.num_producers=2", "launch.max_restarts=1"]
    folder, notes = run(config_of(tmp_path, "joins", "produce.strategy=sync", *words), disturb)
    assert seen["node"] == seen["third"]
    assert digests(folder) == digests(quiet)
    assert_balanced(folder)
    told = [note.partition(" (")[0] for note in notes if note.startswith(seen["lost"])]
    assert told[0].startswith(f"{seen['lost']}: the actor ended unexpectedly: ")
    assert told[1:] == [
        f"{seen['lost']}: its node has left; it waits for one with 1 CPU, 0 GPU free, "
        "for as long as the run goes on",
        f"{seen['lost']}: serves again",
    ]


@pytest.mark.slow
def test_of_two_that_lost_their_nodes_each_takes_the_first_place_there_is(cluster: Nodes) -> None:
    """Ray itself would place two lost bundles of one group together or not at all."""
    notes: list[str] = []
    taken: list[str] = []

    async def play() -> None:
        before = [cluster.join(1, num_gpus=1) for _ in range(2)]
        both_wait = asyncio.Event()

        def note(text: str) -> None:
            notes.append(text)
            if len(notes) == 2:
                both_wait.set()

        settings = {
            "kind": "ray",
            "num_producers": 2,
            "ray_options": {"producers": {"num_gpus": 1}},
        }
        placement = Placement(LaunchConfig.model_validate(settings), False, note)
        await placement.reserve()
        slots = list(placement.producers)
        assert sorted([await slot.node() for slot in slots]) == sorted(before)
        for slot in slots:
            slot.has_served = True
        for node in before:
            cluster.leave(node)

        async def start_actor(number: int) -> None:
            await placement.start_actor(f"engine-{number}", slots[number], sat)
            taken.append(await slots[number].node())

        waiting = {asyncio.create_task(start_actor(number)) for number in range(2)}
        async with asyncio.timeout(LONGEST_S):
            await both_wait.wait()
            while waiting:
                joined = cluster.join(1, num_gpus=1)
                done, waiting = await asyncio.wait(waiting, return_when="FIRST_COMPLETED")
                assert len(done) == 1
                assert taken[-1] == joined
        placement.release()
        for node in set(taken):
            cluster.leave(node)

    asyncio.run(play())
    assert len(set(taken)) == 2
    assert [note.partition(";")[0] for note in sorted(notes)] == [
        "engine-0: its node has left",
        "engine-1: its node has left",
    ]


@pytest.mark.slow
def test_ranks_of_one_group_move_together_when_one_loses_its_node(cluster: Nodes) -> None:
    notes: list[str] = []

    async def play() -> None:
        kept, lost = [cluster.join(1, num_gpus=1) for _ in range(2)]
        placement = placement_of(notes, num_consumers=2, ray_options={"consumers": {"num_gpus": 1}})
        await placement.reserve()
        slots, names = placement.consumers, ["trainer-0", "trainer-1"]
        assert {await slot.node() for slot in slots} == {kept, lost}
        for slot in slots:
            slot.has_served = True
        cluster.leave(lost)
        finding = asyncio.create_task(placement.find_nodes(names, slots))
        joined = cluster.join(1, num_gpus=1)
        async with asyncio.timeout(LONGEST_S):
            await finding
            both = zip(names, slots, strict=True)
            assert [await placement.start_actor(name, slot, sat) for name, slot in both] == [
                "started",
                "started",
            ]
        assert {await slot.node() for slot in slots} == {kept, joined}
        placement.release()
        for node in (kept, joined):
            cluster.leave(node)

    asyncio.run(play())


async def sat(options: dict[str, Any]) -> str:
    assert "scheduling_strategy" in options
    return "started"


class Moving:
    """A reservation that moves to the next of these nodes at every look, and stays on the last."""

    asked = ({"CPU": 1.0},)

    def __init__(self, *nodes: str) -> None:
        self._nodes = list(nodes)

    async def node(self, number: int) -> str:
        return self._nodes.pop(0) if len(self._nodes) > 1 else self._nodes[0]

    async def find_node(self, number: int) -> str:
        while not (node := await self.node(number)):
            pass
        return node

    def options(self, number: int) -> dict[str, Any]:
        return {}


def slot_on(*nodes: str) -> PlacementSlot:
    return PlacementSlot(Moving(*nodes), 0, 1.0, 0.0, has_served=True)  # type: ignore[arg-type]


def test_an_actor_whose_node_leaves_before_it_is_there_is_asked_for_again(cluster: Nodes) -> None:
    """Ray may learn of the node's end after the driver; then Ray fails the actor or waits forever."""
    notes: list[str] = []
    asked: list[str] = []

    async def play() -> str:
        slot = slot_on("first", "", "", "third")

        async def create(options: dict[str, Any]) -> str:
            asked.append("asked")
            if len(asked) == 1:
                raise WorkerDied("engine-0: its node has died")
            return "started"

        return await placement_of(notes).start_actor("engine-0", slot, create)

    async def play_a_hang() -> str:
        slot = slot_on("first", "second")

        async def create(options: dict[str, Any]) -> str:
            asked.append("asked")
            if len(asked) == 3:
                await asyncio.Event().wait()
            return "started"

        return await placement_of(notes).start_actor("engine-0", slot, create)

    assert asyncio.run(play()) == "started"
    assert len(asked) == 2
    assert len(notes) == 1
    assert asyncio.run(play_a_hang()) == "started"
    assert len(asked) == 4


def test_what_fails_on_a_node_that_is_there_is_a_failure(cluster: Nodes) -> None:
    async def play() -> None:
        async def create(options: dict[str, Any]) -> str:
            raise WorkerDied("engine-0: ModuleNotFoundError: No module named 'penstock'")

        slot = slot_on("first")
        await placement_of([]).start_actor("engine-0", slot, create)

    with pytest.raises(WorkerDied, match="No module named"):
        asyncio.run(play())


def test_one_more_engine_than_any_node_could_hold_is_refused_at_once(cluster: Nodes) -> None:
    notes: list[str] = []
    placement = placement_of(notes, ray_options={"producers": {"num_gpus": 1}})
    with pytest.raises(UserError, match="engine-9: got 1 CPU, 1 GPU, allowed: what the nodes have"):
        placement.take("engine-9", 9)
    assert notes == []


def test_one_more_engine_than_fits_now_is_waited_for_a_bounded_time_and_leaves_nothing(
    cluster: Nodes,
) -> None:
    notes: list[str] = []

    async def play() -> None:
        all_of_it = int(ray.cluster_resources()["CPU"]) - 1
        placement = placement_of(notes, num_producers=all_of_it, start_timeout_s=LONGEST_S)
        await placement.reserve()
        for slot in placement.producers:
            slot.worker = engine_worker()
        placement._settings = placement._settings.model_copy(update={"start_timeout_s": 0.1})
        slot = placement.take("engine-9", 9)
        try:
            with pytest.raises(RunError, match=r"engine-9: Ray gave it no place within 0.1 s"):
                await placement.start_actor("engine-9", slot, sat)
            placement.free(slot, "engine-9")
            assert slot not in placement.producers
            placement.producers[0].worker.given_up = WorkerDied("it was drained")  # type: ignore[union-attr]
            assert placement.take("engine-9", 9) is placement.producers[0]
        finally:
            placement.release()

    asyncio.run(play())
    (note,) = notes
    assert note.startswith("engine-9: waits up to 0.1 s for 1 CPU, 0 GPU; free: ")


def engine_worker() -> Supervised:
    return Supervised("engine", None, LaunchConfig(), None)  # type: ignore[arg-type]


def test_cpus_of_a_cluster_that_is_ours_are_only_counted(cluster: Nodes) -> None:
    placement = Placement(LaunchConfig(kind="ray"), True, print)
    slot = placement.take("engine-1", 1)
    assert (slot.reservation, slot.cpus) == (None, 0)
    assert slot.options()["num_cpus"] == 0
