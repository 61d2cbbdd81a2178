"""Two trainer ranks in processes of their own: the weights of one, and the death of one is survived."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest
from cluster_runs import STEPS, assert_balanced, config_of, digests, run
from safetensors.numpy import load_file

from penstock.job import Job
from penstock.run_folder import RunFolder

TWO = [
    "produce.strategy=sync",
    "launch.num_consumers=2",
    "checkpoint.every_steps=1",
    "checkpoint.keep=3",
]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return run(config_of(tmp_path_factory.mktemp("ranks"), "two", *TWO))[0]


def weights(folder: RunFolder, step: int) -> np.ndarray:
    named = load_file(folder.checkpoints / f"step-{step}" / "model" / "model.safetensors")
    return np.concatenate([named[name].ravel() for name in sorted(named)])


def test_two_ranks_give_the_weights_of_one(quiet: RunFolder, two_ranks: RunFolder) -> None:
    """Not bitwise: sums over tokens are taken in another order, in float32. Adam divides by the size
    of the gradient, so where that is all rounding a weight may move otherwise, by a part of lr."""
    for step in range(1, STEPS + 1):
        difference = np.abs(weights(two_ranks, step) - weights(quiet, step))
        assert difference.max() < 1e-5  # train.lr is 1e-3
        assert (difference > 1e-6).mean() < 1e-3


def test_a_rank_that_dies_takes_the_group_back_to_the_checkpoint(
    two_ranks: RunFolder, tmp_path: Path
) -> None:
    async def disturb(job: Job, step: int) -> None:
        if step == 3:
            worker = job.workers.supervised["trainer"].worker
            os.kill(worker._ranks[1].pid, signal.SIGKILL)  # type: ignore[union-attr]

    folder, notes = run(config_of(tmp_path, "killed", *TWO), disturb)
    assert digests(folder) == digests(two_ranks)
    assert_balanced(folder)
    assert any("trainer-1: the worker ended unexpectedly" in note for note in notes)
