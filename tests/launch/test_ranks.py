"""Two trainer ranks in processes of their own, one of them killed: the weights of one rank."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
from cluster_runs import assert_balanced, config_of, run, weights

from penstock.job import Job
from penstock.run_folder import RunFolder


def test_two_ranks_give_the_weights_of_one_though_one_of_them_dies(
    quiet: RunFolder, tmp_path: Path
) -> None:
    """The redo after the death is bitwise (a digest that differs would stop the run). Against one rank
    it is not: sums over tokens are taken in another order, in float32, and Adam divides by the size of
    the gradient, so where that is all rounding a weight may move otherwise, by a part of lr."""

    async def disturb(job: Job, step: int) -> None:
        if step == 3:
            worker = job.workers.supervised["trainer"].worker
            os.kill(worker._ranks[1].pid, signal.SIGKILL)  # type: ignore[union-attr]

    words = ["produce.strategy=sync", "launch.num_consumers=2"]
    folder, notes = run(config_of(tmp_path, "killed", *words), disturb)
    assert_balanced(folder)
    assert any("trainer-1: the worker ended unexpectedly" in note for note in notes)
    difference = np.abs(weights(folder) - weights(quiet))
    assert difference.max() < 1e-5  # train.lr is 1e-3
    assert (difference > 1e-6).mean() < 1e-3
