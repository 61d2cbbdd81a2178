"""Each role of a run gets the nodes that its table names; what is missing is said before anything starts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.config import LaunchConfig
from penstock.errors import UserError
from penstock.run.job import Job
from stages.disturbed_run import assert_balanced, config_of, run
from stages.ray_nodes import Nodes, node_of

ray = pytest.importorskip("ray")
from penstock.workers.ray.placement import Need, Node, Placement, check_fit  # noqa: E402

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]
ROLES = [
    "launch.kind=ray",
    "launch.num_producers=2",
    "launch.ray_options.producers={label_selector={role='generate'}, num_gpus=0.5, accelerator_type='H100'}",
    "launch.producer_kinds=[{ray_options={label_selector={role='slow'}, num_gpus=0, accelerator_type=''}, "
    "engine={max_slots=2}}]",
    "launch.ray_options.consumers={resources={trains=1}}",
    "launch.ray_options.agents={label_selector={role='in(slow,other)'}, num_cpus=0.5}",
    "tasks.train.agent_actors=1",
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Nodes]:
    nodes = Nodes(1)
    yield nodes
    nodes.close()


@pytest.fixture(scope="module")
def places(cluster: Nodes) -> dict[str, str]:
    """Add a node for each role; return their ids."""
    h100 = {"accelerator_type:H100": 1.0}
    return {
        "generate": cluster.join(1, num_gpus=1, labels={"role": "generate"}, resources=h100),
        "slow": cluster.join(2, labels={"role": "slow"}),
        "train": cluster.join(1, resources={"trains": 1}),
    }


def test_a_run_puts_every_role_onto_its_node(places: dict[str, str], tmp_path: Path) -> None:
    """Two kinds of engines, a trainer and an agent actor; the slow engine has two slots of its own."""
    seen: dict[str, Any] = {}

    async def look(job: Job, step: int) -> None:
        names = ("engine-0", "engine-1", "trainer", "agent-train-0")
        for name in names if step == 1 else ():
            seen[name] = node_of(job, name)
        seen["slots"] = [one.slots for one in job.engine._engines]  # type: ignore[union-attr]

    folder, _ = run(config_of(tmp_path, "roles", *ROLES), look)
    assert_balanced(folder)
    assert seen == {
        "engine-0": places["slow"],
        "engine-1": places["generate"],
        "trainer": places["train"],
        "agent-train-0": places["slow"],
        "slots": [2, 16],
    }


def test_what_no_node_has_is_refused_in_one_line(places: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(UserError) as refused:
        run(
            config_of(
                tmp_path,
                "refused",
                *ROLES,
                "launch.ray_options.consumers.label_selector={rack='7'}",
            )
        )
    line = str(refused.value)
    assert line.startswith(
        "launch.ray_options.consumers: got 1 more of 1 CPU, 0 GPU, 1 trains, rack=7 than find a place, "
        "allowed: what the 4 nodes have: "
    )
    assert "1 CPU, 1 GPU, H100, role=generate" in line
    assert "1 CPU, 0 GPU, 1 trains" in line


def test_nodes_that_an_autoscaler_adds_are_waited_for_by_setting(cluster: Nodes) -> None:
    """The trainer asks for nothing, so one CPU holds both sides."""
    notes: list[str] = []
    joined: list[str] = []
    late = {"label_selector": {"role": "late"}}
    nothing = {**late, "num_cpus": 0}
    settings = {"kind": "ray", "ray_options": {"producers": late, "consumers": nothing}}

    async def play(wait_s: float) -> str:
        added = LaunchConfig.model_validate({**settings, "wait_for_nodes_s": wait_s})

        def note(line: str) -> None:
            notes.append(line)
            if wait_s > 1:
                joined.append(cluster.join(1, labels={"role": "late"}))

        placement = Placement(added, False, note)
        try:
            await placement.reserve()
            return await placement.producers[0].node()
        finally:
            placement.release()

    missing = (
        "launch.ray_options.producers: got 1 more of 1 CPU, 0 GPU, role=late than find a place"
    )
    with pytest.raises(UserError, match=missing):
        asyncio.run(play(0))
    assert notes == []
    with pytest.raises(UserError, match=missing):  # none came
        asyncio.run(play(0.2))
    assert asyncio.run(play(300)) == joined[0]
    assert notes[1].startswith(f"launch: waits up to 300 s for more nodes ({missing}")


@pytest.mark.parametrize(
    ("wanted", "matches"),
    [("a", True), ("!a", False), ("in(a, b)", True), ("!in(b,c)", True), ("b", False)],
)
def test_labels_match_as_ray_matches_them(wanted: str, matches: bool) -> None:
    node = Node(left={"CPU": 1.0}, labels={"key": "a"})
    assert Need(resources={"CPU": 1.0}, labels={"key": wanted}).fits(node) == matches


def test_a_bundle_that_only_one_node_can_hold_is_placed_first() -> None:
    nodes = [Node(left={"CPU": 1.0}, labels={"role": "b"}), Node(left={"CPU": 1.0}, labels={})]
    asked = LaunchConfig.model_validate(
        {"kind": "ray", "ray_options": {"producers": {"label_selector": {"role": "b"}}}}
    )
    check_fit(asked, nodes, Need(resources={}))
    with pytest.raises(UserError, match=r"launch\.ray_options\.agents: got 2 more of 1 CPU"):
        check_fit(asked, nodes, Need(resources={"CPU": 1.0}), 2)
