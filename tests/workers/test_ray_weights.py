"""Weights between the nodes of a Ray cluster: one distributor per node, one of them killed."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.run.job import Job
from penstock.store.run_folder import RunFolder
from stages.disturbed_run import assert_balanced, config_of, digests, run

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.ray


@pytest.fixture
def four_nodes() -> Iterator[None]:
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    size = {"object_store_memory": 2**27, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, **size})
    for _ in range(3):
        cluster.add_node(num_cpus=1, **size)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
    yield
    ray.shutdown()
    cluster.shutdown()


@pytest.mark.slow
def test_weights_reach_every_node_though_a_distributor_is_killed(
    four_nodes: None, quiet: RunFolder, tmp_path: Path
) -> None:
    notes: list[str] = []

    async def disturb(job: Job, step: int) -> None:
        """Kill a distributor at step 3, after the second weights have been sent."""
        if step == 1:
            job.notes.listen(notes.append)
        if step == 3:
            told = re.search(r"distributor-1: passes weights on, .* pid (\d+)", "\n".join(notes))
            assert told is not None, notes
            os.kill(int(told[1]), signal.SIGKILL)

    words = ["launch.kind=ray", "launch.num_producers=3", "sync.kind=delta"]
    folder, _ = run(config_of(tmp_path, "nodes", "produce.strategy=sync", *words), disturb)
    assert digests(folder) == digests(quiet)
    assert_balanced(folder)
    text = "\n".join(notes)
    assert "starting it again (1 of" in text
    assert "distributor-1: serves again" in text
    for number in (1, 2, 3, 4):  # those of the other engines, and that of the trainer
        assert f"distributor-{number}: passes weights on" in text
