"""A worker whose node has left waits for another one, for as long as it takes, and is not given up."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.config import LaunchConfig
from penstock.errors import RunError, UserError, WorkerDied
from penstock.job import Job
from penstock.run_folder import RunFolder
from penstock.supervise.supervised import Supervised
from stages.disturbed_run import STEPS, assert_balanced, config_of, digests, run, when_told
from stages.ray_nodes import Nodes, node_of

ray = pytest.importorskip("ray")
from penstock.launch.ray.placement import Places, Seat  # noqa: E402

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]
LONGEST_S = 300.0  # no test waits for so long


@pytest.fixture(scope="module")
def cluster() -> Iterator[Nodes]:
    nodes = Nodes(2, 1)
    yield nodes
    nodes.close()


def places_of(notes: list[str], **fields: Any) -> Places:
    settings = LaunchConfig.model_validate({"kind": "ray", **fields})
    return Places(settings, False, notes.append)


@pytest.mark.slow
def test_an_engine_that_no_node_has_room_for_comes_back_on_one_that_joins_later(
    cluster: Nodes, quiet: RunFolder, tmp_path: Path
) -> None:
    """A step is made by the other engine meanwhile; waiting is no restart."""
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

        settings = {"kind": "ray", "num_producers": 2, "gpus_per_producer": 1}
        places = Places(LaunchConfig.model_validate(settings), False, note)
        await places.reserve()
        seats = list(places.producers)
        assert sorted([await seat.node() for seat in seats]) == sorted(before)
        for seat in seats:
            seat.is_used = True
        for node in before:
            cluster.leave(node)

        async def sit(number: int) -> None:
            await places.sit(f"engine-{number}", seats[number], sat)
            taken.append(await seats[number].node())

        waiting = {asyncio.create_task(sit(number)) for number in range(2)}
        async with asyncio.timeout(LONGEST_S):
            await both_wait.wait()
            while waiting:
                joined = cluster.join(1, num_gpus=1)
                done, waiting = await asyncio.wait(waiting, return_when="FIRST_COMPLETED")
                assert len(done) == 1
                assert taken[-1] == joined
        places.release()
        for node in set(taken):
            cluster.leave(node)

    asyncio.run(play())
    assert len(set(taken)) == 2
    assert [note.partition(";")[0] for note in sorted(notes)] == [
        "engine-0: its node has left",
        "engine-1: its node has left",
    ]


@pytest.mark.slow
def test_ranks_that_sit_together_move_together_when_one_loses_its_node(cluster: Nodes) -> None:
    notes: list[str] = []

    async def play() -> None:
        kept, lost = [cluster.join(1, num_gpus=1) for _ in range(2)]
        places = places_of(notes, num_consumers=2, gpus_per_consumer=1)
        await places.reserve()
        seats, names = places.consumers, ["trainer-0", "trainer-1"]
        assert {await seat.node() for seat in seats} == {kept, lost}
        for seat in seats:
            seat.is_used = True
        cluster.leave(lost)
        settling = asyncio.create_task(places.settle(names, seats))
        joined = cluster.join(1, num_gpus=1)
        async with asyncio.timeout(LONGEST_S):
            await settling
            both = zip(names, seats, strict=True)
            assert [await places.sit(name, seat, sat) for name, seat in both] == ["sits", "sits"]
        assert {await seat.node() for seat in seats} == {kept, joined}
        places.release()
        for node in (kept, joined):
            cluster.leave(node)

    asyncio.run(play())


async def sat(options: dict[str, Any]) -> str:
    assert "scheduling_strategy" in options
    return "sits"


class Moving:
    """A bundle that is on these nodes, one look after another; then it stays on the last."""

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


def seat_on(*nodes: str) -> Seat:
    return Seat(Moving(*nodes), 0, 1.0, 0.0, is_used=True)  # type: ignore[arg-type]


def test_an_actor_whose_node_leaves_before_it_is_there_is_asked_for_again(cluster: Nodes) -> None:
    """Ray may hear of the node's end after the driver has; then it fails the actor, or waits for ever."""
    notes: list[str] = []
    asked: list[str] = []

    async def play() -> str:
        seat = seat_on("first", "", "", "third")

        async def create(options: dict[str, Any]) -> str:
            asked.append("asked")
            if len(asked) == 1:
                raise WorkerDied("engine-0: its node has died")
            return "sits"

        return await places_of(notes).sit("engine-0", seat, create)

    async def play_a_hang() -> str:
        seat = seat_on("first", "second")

        async def create(options: dict[str, Any]) -> str:
            asked.append("asked")
            if len(asked) == 3:
                await asyncio.Event().wait()
            return "sits"

        return await places_of(notes).sit("engine-0", seat, create)

    assert asyncio.run(play()) == "sits"
    assert len(asked) == 2
    assert len(notes) == 1
    assert asyncio.run(play_a_hang()) == "sits"
    assert len(asked) == 4


def test_what_fails_on_a_node_that_is_there_is_a_failure(cluster: Nodes) -> None:
    async def play() -> None:
        async def create(options: dict[str, Any]) -> str:
            raise WorkerDied("engine-0: ModuleNotFoundError: No module named 'penstock'")

        seat = seat_on("first")
        await places_of([]).sit("engine-0", seat, create)

    with pytest.raises(WorkerDied, match="No module named"):
        asyncio.run(play())


def test_one_more_engine_than_any_node_could_hold_is_refused_at_once(cluster: Nodes) -> None:
    notes: list[str] = []
    places = places_of(notes, gpus_per_producer=1)
    with pytest.raises(UserError, match="engine-9: got 1 CPU, 1 GPU, allowed: what the nodes have"):
        places.take("engine-9")
    assert notes == []


def test_one_more_engine_than_fits_now_is_waited_for_a_bounded_time_and_leaves_nothing(
    cluster: Nodes,
) -> None:
    notes: list[str] = []

    async def play() -> None:
        all_of_it = int(ray.cluster_resources()["CPU"]) - 1
        places = places_of(notes, num_producers=all_of_it, start_timeout_s=LONGEST_S)
        await places.reserve()
        for seat in places.producers:
            seat.holder = holder()
        places._settings = places._settings.model_copy(update={"start_timeout_s": 0.1})
        seat = places.take("engine-9")
        try:
            with pytest.raises(RunError, match=r"engine-9: Ray gave it no place within 0.1 s"):
                await places.sit("engine-9", seat, sat)
            places.leave(seat, None)
            assert seat not in places.producers
            places.producers[0].holder.given_up = WorkerDied("it was drained")  # type: ignore[union-attr]
            assert places.take("engine-9") is places.producers[0]
        finally:
            places.release()

    asyncio.run(play())
    (note,) = notes
    assert note.startswith("engine-9: waits up to 0.1 s for 1 CPU, 0 GPU; free: ")


def holder() -> Supervised:
    return Supervised("engine", None, LaunchConfig(), None)  # type: ignore[arg-type]


def test_cpus_of_a_cluster_that_is_ours_are_only_counted(cluster: Nodes) -> None:
    places = Places(LaunchConfig(kind="ray"), True, print)
    seat = places.take("engine-1")
    assert (seat.reserved, seat.cpus) == (None, 0)
    assert seat.options()["num_cpus"] == 0
