"""The same run as Ray actors: the same bits, the same account after kills, and clear refusals."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_runs import assert_balanced, config_of, digests, run

from penstock.config import LaunchConfig
from penstock.errors import UserError
from penstock.job import Job
from penstock.run_folder import RunFolder

ray = pytest.importorskip("ray")
from penstock.launch.ray_cluster import bundles, check_fit  # noqa: E402

pytestmark = pytest.mark.ray
RAY = ["launch.kind=ray", "launch.num_producers=2"]


class Nodes:
    """A cluster of two nodes on this machine; the second one can leave."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        size = {"object_store_memory": 2**27, "include_dashboard": False}
        self._cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 3, **size})
        self._second = self._cluster.add_node(num_cpus=1, **size)
        ray.init(address=self._cluster.address, log_to_driver=False, logging_level="error")

    def second_leaves(self) -> None:
        self._cluster.remove_node(self._second)

    def close(self) -> None:
        ray.shutdown()
        self._cluster.shutdown()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Nodes]:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    nodes = Nodes()
    yield nodes
    nodes.close()


def kill(job: Job, name: str) -> None:
    worker = job.workers.supervised[name].worker
    assert worker is not None
    os.kill(getattr(worker, "_ranks", [worker])[-1].pid, signal.SIGKILL)


@pytest.mark.slow
def test_actors_give_the_bits_of_one_process_though_a_node_leaves(
    cluster: Nodes, quiet: RunFolder, tmp_path: Path
) -> None:
    async def disturb(job: Job, step: int) -> None:
        if step == 2:
            cluster.second_leaves()

    folder, notes = run(config_of(tmp_path, "ray", "produce.strategy=sync", *RAY), disturb)
    assert digests(folder) == digests(quiet)
    assert_balanced(folder)
    assert notes[0].startswith("ray: trainer node ")
    assert any("the actor ended unexpectedly" in note for note in notes)


@pytest.mark.slow
def test_two_ranks_as_actors_go_on_after_one_is_killed(cluster: Nodes, tmp_path: Path) -> None:
    async def disturb(job: Job, step: int) -> None:
        if step == 3:
            kill(job, "trainer")

    words = [*RAY, "launch.num_consumers=2", "launch.num_producers=1", "checkpoint.every_steps=2"]
    folder, notes = run(config_of(tmp_path, "ranks", *words), disturb)
    assert_balanced(folder)
    assert any("trainer-1: the actor ended unexpectedly" in note for note in notes)
    assert any("trainer: serves again" in note for note in notes)


@pytest.mark.slow
def test_one_call_does_a_whole_run(cluster: Nodes, tmp_path: Path) -> None:
    from penstock.distributed import launch_distributed

    folder = launch_distributed(
        num_producers=1,
        num_consumer_procs=1,
        num_episodes=1,
        train_batch_size=4,
        train_dataset_config={"path": "addition", "data_options": {"size": 8}},
        model_config={"path": "demo"},
        generate_config={"max_new_tokens": 8},
        grpo_config={"algo": "RLOO", "reward_fn_type": "think_answer_tags"},
        num_generations=2,
        n_behind=1,
        run_dir=str(tmp_path),
        run_name="call",
        overrides={"track": {"trackers": []}},
    )
    assert len(digests(RunFolder(folder))) == 2  # 8 prompts, 4 a step


def test_what_the_cluster_cannot_hold_is_refused_in_one_line(
    cluster: Nodes, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as refused:
        run(config_of(tmp_path, "gpu", *RAY, "launch.gpus_per_producer=1"))
    line = str(refused.value)
    assert "1 consumers of 1 CPU, 0 GPU and 2 producers of 1 CPU, 1 GPU" in line
    assert re.search(r"allowed: what \d nodes have: 3 CPU, 0 GPU", line)


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
