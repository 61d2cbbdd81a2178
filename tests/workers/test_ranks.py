"""Two trainer ranks in separate processes, one of them killed, give the weights of one rank."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.data.sampler import Sampler
from penstock.errors import WorkerDied
from penstock.run.job import Job
from penstock.store.run_folder import RunFolder
from penstock.types import Batch, StepReport
from penstock.workers.processes import local
from penstock.workers.processes.process_worker import ProcessWorker
from penstock.workers.supervise.trainer import RankGroup
from stages.disturbed_run import assert_balanced, config_of, run, weights
from stages.rollouts import make_prompts

pytestmark = pytest.mark.usefixtures("warm_workers")


@pytest.mark.slow
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


@pytest.mark.slow
def test_nobody_takes_the_port_of_the_ranks_before_they_meet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[int] = []

    class Besieged(ProcessWorker):
        """Before rank 0 starts, another program asks for the port at which the ranks will meet."""

        @classmethod
        async def start(cls, name: str, factory: str, *args: Any, **more: Any) -> Any:
            if name == "trainer-0":
                with pytest.raises(OSError, match="in use"):
                    socket.create_server(args[-1])
                refused.append(args[-1][1])
            return await ProcessWorker.start(name, factory, *args, **more)

    monkeypatch.setattr(local, "ProcessWorker", Besieged)
    folder, _ = run(config_of(tmp_path, "besieged", "launch.num_consumers=2"))
    assert_balanced(folder)
    assert len(refused) == 1


class FakeRank:
    """A rank whose call raises, at once or when the test says so."""

    def __init__(self, name: str, fault: Exception) -> None:
        self.name, self.place, self._fault = name, "memory", fault
        self.may_end = asyncio.Event()

    async def call(self, method: str, *args: Any) -> Any:
        await self.may_end.wait()
        raise self._fault


def test_the_end_of_a_rank_is_the_reason_though_another_felt_it_first() -> None:
    """A killed rank resets its connections; its peer's error may arrive before its own end."""

    async def train() -> None:
        died = FakeRank("trainer-0", WorkerDied("trainer-0: killed"))
        felt = FakeRank("trainer-1", RuntimeError("connection reset by peer"))
        felt.may_end.set()
        group = RankGroup([died, felt])  # type: ignore[list-item]
        calling = asyncio.create_task(group.call("train", Batch(step=1, groups=())))
        for _ in range(5):  # the error of the other one is there
            await asyncio.sleep(0)
        died.may_end.set()
        await calling

    with pytest.raises(WorkerDied, match="trainer-0: killed"):
        asyncio.run(train())


class SharingRank:
    """A rank that reports what it was given."""

    def __init__(self, rank: int) -> None:
        self.name, self.place = f"trainer-{rank}", "memory"

    async def call(self, method: str, batch: Batch) -> StepReport:
        trained = batch.fingerprints()
        return StepReport(step=batch.step, policy_version=1, digest=self.name, trained=trained)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_report_of_all_ranks_names_the_groups_in_the_order_of_the_batch(world: int) -> None:
    sampler = Sampler(make_prompts(9), task_name="t", prompt_repeat_k=2, seed=0)
    batch = Batch(step=1, groups=tuple(sampler.group_at(cursor) for cursor in range(5)))
    group = RankGroup([SharingRank(rank) for rank in range(world)])  # type: ignore[misc]
    report = asyncio.run(group.call("train", batch))
    assert report.trained == batch.fingerprints()
    assert report.digest == "trainer-0"
