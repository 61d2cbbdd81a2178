"""The same run as Ray actors: the same bits, the same account after kills, and clear refusals."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_runs import assert_balanced, config_of, digests, run

from penstock.config import LaunchConfig
from penstock.errors import UserError, WorkerDied
from penstock.job import Job
from penstock.launch.control import scale_run
from penstock.launch.supervise import Supervised
from penstock.run_folder import RunFolder

ray = pytest.importorskip("ray")
from penstock.launch.ray_cluster import Places, bundles, check_fit  # noqa: E402

pytestmark = pytest.mark.ray
RAY = ["launch.kind=ray", "launch.num_producers=2"]


class Nodes:
    """A cluster of two nodes on this machine; one can leave, another one join."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self._size = {"object_store_memory": 2**27, "include_dashboard": False}
        self._cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, **self._size})
        self._second = self._cluster.add_node(num_cpus=1, **self._size)
        ray.init(address=self._cluster.address, log_to_driver=False, logging_level="error")

    def second_leaves(self) -> None:
        self._cluster.remove_node(self._second)

    def third_joins(self) -> str:
        return str(self._cluster.add_node(num_cpus=2, **self._size).node_id)

    def close(self) -> None:
        ray.shutdown()
        self._cluster.shutdown()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Nodes]:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    nodes = Nodes()
    yield nodes
    nodes.close()


def node_of(job: Job, name: str) -> str:
    return str(job.workers.supervised[name].worker.node)  # type: ignore[union-attr]


@pytest.mark.slow
def test_actors_give_the_bits_of_one_process_though_a_node_leaves_and_another_joins(
    cluster: Nodes, quiet: RunFolder, tmp_path: Path
) -> None:
    """The one that joins takes the engine that was lost, and one more that is asked for."""
    where: dict[str, str] = {}

    async def disturb(job: Job, step: int) -> None:
        if step == 2:
            cluster.second_leaves()
            where["third"] = cluster.third_joins()  # sets signal handlers: not for a thread
            await asyncio.to_thread(scale_run, job.folder.path, "producers=3")
            where["engine-2"] = node_of(job, "engine-2")
        if step == 3:
            for number in (1, 2):  # the place of one that was drained is taken again
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
        run(config_of(tmp_path, "gpu", *RAY, "launch.gpus_per_producer=1"))
    line = str(refused.value)
    assert "1 consumers of 1 CPU, 0 GPU and 2 producers of 1 CPU, 1 GPU" in line
    assert re.search(r"allowed: what \d nodes have: 2 CPU, 0 GPU", line)


def test_one_more_engine_than_any_node_could_hold_is_refused_at_once(cluster: Nodes) -> None:
    notes: list[str] = []
    places = Places(None, None, settings(gpus_per_producer=1), ours=False)
    with pytest.raises(UserError, match="engine-9: got 1 CPU, 1 GPU, allowed: what the nodes have"):
        places.check_later("engine-9", notes.append)
    assert notes == []


def test_a_drained_engine_leaves_its_bundle_to_the_next() -> None:
    places = Places(None, None, settings(num_producers=2), ours=False)
    for number in range(2):
        holder = Supervised("engine", None, places.settings, None)  # type: ignore[arg-type]
        places.held[number] = holder
    assert places.free_bundle() is None
    places.held[1].given_up = WorkerDied("it was drained")
    assert places.free_bundle() == 1
    assert places.producer(None)["num_cpus"] == 1
    places.ours = True  # CPUs of our own cluster are only counted
    assert places.producer(None)["num_cpus"] == 0


def settings(**fields: object) -> LaunchConfig:
    return LaunchConfig.model_validate({"kind": "ray", **fields})


@pytest.mark.parametrize(
    ("fields", "nodes", "fits"),
    [
        ({"num_producers": 3}, [{"CPU": 2}, {"CPU": 2}], True),
        ({"num_producers": 4}, [{"CPU": 2}, {"CPU": 2}], False),
        ({"cpus_per_consumer": 3}, [{"CPU": 2}, {"CPU": 2}], False),
        ({"gpus_per_consumer": 1, "gpus_per_producer": 1}, [{"CPU": 8, "GPU": 1}], False),
        (
            {"gpus_per_consumer": 1, "gpus_per_producer": 1, "colocate": True},
            [{"CPU": 8, "GPU": 1}],
            True,
        ),
    ],
)
def test_fit(fields: dict, nodes: list, fits: bool) -> None:
    if fits:
        check_fit(settings(**fields), nodes)
    else:
        with pytest.raises(UserError, match="launch: got"):
            check_fit(settings(**fields), nodes)


def test_colocated_parts_share_a_bundle() -> None:
    asked = settings(num_producers=2, gpus_per_producer=1, gpus_per_consumer=1, colocate=True)
    assert bundles(asked) == ([{"CPU": 2, "GPU": 1}, {"CPU": 1, "GPU": 1}], [])
