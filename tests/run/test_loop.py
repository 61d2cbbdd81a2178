"""One step of the loop: what happens between an update and its commit."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.config.source import load_config
from penstock.engine.protocol import EngineStats
from penstock.errors import RunError
from penstock.run.loop import Loop
from penstock.types import Batch, StepReport, WeightHandle
from penstock.waits import Waits

NO_EVALUATION = ["eval.at_start=false", "eval.every_steps=0", "sync.every_steps=5", "train.steps=9"]


def made_job(calls: list[str], **parts: Any) -> Any:
    """A job whose parts note their calls; each is answered at once."""

    def noted(name: str, answer: Any = None) -> Any:
        async def call(*args: Any) -> Any:
            calls.append(name)
            return answer

        return call

    stats = EngineStats(
        policy_version=0, digest="", running=0, waiting=0, tokens_generated=7, busy_s=0.0
    )
    job = SimpleNamespace(
        config=load_config(None, NO_EVALUATION).config,
        total_steps=9,
        waits=Waits(),
        engine=SimpleNamespace(stats=noted("stats", stats)),
        trainer=SimpleNamespace(
            train=noted("train", StepReport(step=1, policy_version=1, digest="d"))
        ),
        source=SimpleNamespace(
            take_batch=noted("take", Batch(step=1, groups=())),
            read_metrics=lambda: {"produced/groups": 3.0},
            run=noted("produce"),
        ),
        journal=SimpleNamespace(commit_step=noted("commit")),
        workers=SimpleNamespace(supervised={}),
        stop_rules=SimpleNamespace(met=lambda metrics, findings: ""),
        findings=SimpleNamespace(open=[], newest={}),
        log_step=lambda batch, report: calls.append("log"),
        status=SimpleNamespace(doing=lambda activity: None),
        checkpoints=SimpleNamespace(due=lambda step: False),
    )
    vars(job).update(parts)
    return job


def test_no_engine_is_asked_between_an_update_and_its_commit() -> None:
    """An engine that stalls there would keep the update out of the journal while the trainer may die."""
    calls: list[str] = []
    committed: list[StepReport] = []

    async def commit(report: StepReport) -> None:
        calls.append("commit")
        committed.append(report)

    job = made_job(calls, journal=SimpleNamespace(commit_step=commit))
    asyncio.run(Loop(job)._one_step(1))
    assert calls == ["take", "stats", "train", "commit", "log"]
    assert committed[0].metrics["tokens/generated"] == 7
    assert committed[0].metrics["produced/groups"] == 3


@pytest.mark.parametrize("place", ["train", "publish"])
def test_a_step_that_is_committed_at_a_stop_is_logged(place: str) -> None:
    """`penstock runs` and the report said 0 steps of a run that stopped after step 1."""
    calls: list[str] = []
    job = made_job(calls)

    async def stop() -> StepReport:
        running.cancel()
        await asyncio.sleep(0)  # where the cancellation lands
        return StepReport(step=1, policy_version=1, digest="d")

    async def no_answer() -> None:
        return None

    job.trainer.request_stop = no_answer
    if place == "train":
        job.trainer.train = lambda batch: stop()
    else:
        job.config = load_config(None, [*NO_EVALUATION, "sync.every_steps=1"]).config
        job.trainer.publish = stop

    async def run_and_stop() -> None:
        nonlocal running
        running = asyncio.create_task(Loop(job).run())
        with pytest.raises(asyncio.CancelledError):
            await running

    running: asyncio.Task[None]
    asyncio.run(run_and_stop())
    assert calls[-2:] == ["commit", "log"]


def test_weights_of_another_version_than_the_step_are_not_published() -> None:
    """A trainer that lost its update would hand the engines the version before, under no error."""
    published: list[int] = []

    async def publish() -> WeightHandle:
        return WeightHandle(version=1, digest="d", kind="in_process")

    job = SimpleNamespace(
        trainer=SimpleNamespace(publish=publish),
        journal=SimpleNamespace(record_published=lambda version, digest: published.append(version)),
    )
    loop = Loop(job, first_step=2)  # type: ignore[arg-type]
    with pytest.raises(RunError, match="published version 1, allowed: 2"):
        asyncio.run(loop._publish(SimpleNamespace()))  # type: ignore[arg-type]
    assert published == []
