"""A run as Ray actors gives the same bits, loses nothing when a node leaves, and refuses clearly."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.config import LaunchConfig
from penstock.errors import UserError
from penstock.run.job import Job
from penstock.store.run_folder import RunFolder
from penstock.workers.control import scale_run
from stages.disturbed_run import assert_balanced, config_of, digests, run
from stages.ray_nodes import Nodes, node_of

ray = pytest.importorskip("ray")
from penstock.workers.ray.placement import Need, Node, bundles, check_fit  # noqa: E402

pytestmark = pytest.mark.ray
RAY = ["launch.kind=ray", "launch.num_producers=2"]
GPUS: dict[str, object] = {
    "ray_options": {"consumers": {"num_gpus": 1}, "producers": {"num_gpus": 1}}
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Nodes]:
    nodes = Nodes(2, 1)
    yield nodes
    nodes.close()


@pytest.mark.slow
def test_actors_give_the_bits_of_one_process_though_a_node_leaves_and_another_joins(
    cluster: Nodes, quiet: RunFolder, tmp_path: Path
) -> None:
    """The node that joins takes the lost engine and one that `scale` adds."""
    where: dict[str, str] = {}

    async def disturb(job: Job, step: int) -> None:
        if step == 2:
            cluster.leave(cluster.ids[0])
            where["third"] = cluster.join(2)
            await asyncio.to_thread(scale_run, job.folder.path, "producers=3")
            where["engine-2"] = node_of(job, "engine-2")
        if step == 3:
            for number in (1, 2):  # the slot of a drained engine is used again
                await asyncio.to_thread(scale_run, job.folder.path, f"producers={number}")

    folder, notes = run(config_of(tmp_path, "ray", "produce.strategy=sync", *RAY), disturb)
    assert digests(folder) == digests(quiet)
    assert_balanced(folder)
    assert notes[0].startswith("ray: trainer node ")
    assert where["engine-2"] == where["third"]
    text = "\n".join(notes)
    assert "the actor ended unexpectedly" in text
    for line in ("producers: 2 -> 3", "producers: 3 -> 1", "producers: 1 -> 2"):
        assert line in text


def test_what_the_cluster_cannot_hold_is_refused_in_one_line(
    cluster: Nodes, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as refused:
        run(config_of(tmp_path, "gpu", *RAY, "launch.ray_options.producers.num_gpus=1"))
    line = str(refused.value)
    assert "launch.ray_options.producers: got 2 more of 1 CPU, 1 GPU than find a place" in line
    assert re.search(r"allowed: what the \d nodes have: .*2 CPU, 0 GPU", line)


def settings(**fields: object) -> LaunchConfig:
    return LaunchConfig.model_validate({"kind": "ray", **fields})


@pytest.mark.parametrize(
    ("fields", "nodes", "fits"),
    [
        ({"num_producers": 3}, [{"CPU": 2}, {"CPU": 2}], True),
        ({"num_producers": 4}, [{"CPU": 2}, {"CPU": 2}], False),
        ({"ray_options": {"consumers": {"num_cpus": 3}}}, [{"CPU": 2}, {"CPU": 2}], False),
        (GPUS, [{"CPU": 8, "GPU": 1}], False),
        ({**GPUS, "colocate": True}, [{"CPU": 8, "GPU": 1}], True),
        (
            {"ray_options": {"consumers": {"num_gpus": 0.5}, "producers": {"num_gpus": 0.5}}},
            [{"CPU": 8, "GPU": 1}],
            True,
        ),
    ],
)
def test_fit(fields: dict, nodes: list, fits: bool) -> None:
    there = [Node(left=node, labels={}) for node in nodes]
    if fits:
        check_fit(settings(**fields), there, Need(resources={}))
    else:
        with pytest.raises(
            UserError, match=r"launch\.ray_options\.(producers|consumers): got 1 more of"
        ):
            check_fit(settings(**fields), there, Need(resources={}))


def test_colocated_parts_share_a_bundle() -> None:
    shared, own = bundles(settings(num_producers=2, colocate=True, **GPUS))
    assert [need.resources for need in shared] == [{"CPU": 2, "GPU": 1}, {"CPU": 1, "GPU": 1}]
    assert own == []
