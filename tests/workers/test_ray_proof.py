"""Two engines and two trainer ranks as Ray actors, sync and async, with kills and a hang on the way."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from penstock.run.job import Job
from penstock.store.run_folder import RunFolder
from stages.disturbed_run import STEPS, assert_balanced, config_of, run, weights

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]
FOUR = ["launch.kind=ray", "launch.num_producers=2", "launch.num_consumers=2"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    size = {"num_cpus": 8, "object_store_memory": 2**27, "include_dashboard": False}
    ray.init(address="local", log_to_driver=False, logging_level="error", **size)
    yield
    ray.shutdown()


def send(job: Job, name: str, sign: signal.Signals, rank: int = 0) -> None:
    """Send a signal to a worker's process without the driver's knowledge."""
    worker = job.workers.supervised[name].worker
    assert worker is not None
    os.kill(getattr(worker, "_ranks", [worker])[rank].pid, sign)


def test_sync_with_an_engine_and_a_rank_killed_gives_the_weights_of_one_quiet_rank(
    cluster: None, quiet: RunFolder, tmp_path: Path
) -> None:
    """`test_ranks.py` explains by how much one rank and two ranks may differ."""

    async def disturb(job: Job, step: int) -> None:
        if step == 2:
            send(job, "engine-1", signal.SIGKILL)
        if step == 3:
            send(job, "trainer", signal.SIGKILL, rank=1)

    folder, notes = run(config_of(tmp_path, "sync", "produce.strategy=sync", *FOUR), disturb)
    assert_balanced(folder)
    text = "\n".join(notes)
    assert "engine-1: the actor ended unexpectedly" in text
    assert "trainer-1: the actor ended unexpectedly" in text
    assert "trainer: serves again" in text
    difference = np.abs(weights(folder) - weights(quiet))
    assert difference.max() < 1e-5  # train.lr is 1e-3
    assert (difference > 1e-6).mean() < 1e-3


def test_async_with_a_rank_killed_and_an_engine_that_hangs_ends_balanced(
    cluster: None, tmp_path: Path
) -> None:
    """An engine stopped by a signal neither answers nor dies; the watchdog must report it."""
    hung = 0

    async def disturb(job: Job, step: int) -> None:
        nonlocal hung
        if step == 2:
            send(job, "trainer", signal.SIGKILL)
        if step == STEPS:
            hung = job.workers.supervised["engine-0"].worker.pid  # type: ignore[union-attr]
            send(job, "engine-0", signal.SIGSTOP)

    words = ["produce.max_staleness=1", "watchdog.stall_s=8", "launch.max_restarts=20"]
    folder, notes = run(config_of(tmp_path, "async", *words, *FOUR), disturb)
    assert_balanced(folder)
    text = "\n".join(notes)
    assert "trainer-0: the actor ended unexpectedly" in text
    assert "stuck: engine-0 has not answered" in text
    assert re.search("engine-0: stuck: .*; starting it again", text)
    assert hung
