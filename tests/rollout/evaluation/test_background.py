"""An evaluation beside training: the next weights wait for it."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.config import SamplingConfig
from penstock.reward.protocol import Reward
from penstock.rollout.evaluation.evaluate import EvalTask, Evaluations
from penstock.run.job import open_job
from penstock.run.loop import Loop
from penstock.run.recover import begin
from penstock.run.session import train_new
from penstock.store.run_folder import RunFolder, create
from penstock.types import Prompt, Rollout, Score, StepReport
from penstock.waits import Waits
from stages.disturbed_run import config_of
from stages.supervised import Crew

pytestmark = pytest.mark.usefixtures("warm_workers")


class Blocked(Reward):
    """A reward that answers when the test allows it."""

    def __init__(self) -> None:
        self.asked, self.allowed = asyncio.Event(), asyncio.Event()

    async def score(self, rollout: Rollout, prompt: Prompt) -> Score:
        self.asked.set()
        await self.allowed.wait()
        return Score(1.0, answer_ok=True)

    async def close(self) -> None: ...


def eval_task(name: str, reward: Reward) -> EvalTask:
    prompts = [Prompt(f"p:{i}", (), np.array([i], np.int32)) for i in range(3)]
    return EvalTask(
        name=name,
        problems=prompts,
        reward=reward,
        sampling=SamplingConfig(max_tokens=4),
        num_generations=1,
        decode=lambda ids: "",
        seed=0,
    )


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("count", [1, 2])
def test_an_evaluation_whose_engine_dies_is_whole_and_of_one_version(
    count: int, tmp_path: Path
) -> None:
    async def run() -> list[dict[str, Any]]:
        crew, reward = Crew(count), Blocked()
        engines = await crew.start()
        evaluations = Evaluations(
            tasks=[eval_task("a", reward), eval_task("b", reward)],
            folder=tmp_path,
            engine=engines,
            waits=Waits(),
            log=lambda step, metrics: None,
            note=lambda text: None,
        )
        async with asyncio.TaskGroup() as group:
            group.create_task(evaluations.evaluate(0, []))
            await reward.asked.wait()
            crew.made["engine-0"][0].die()
            reward.allowed.set()
        await engines.close()
        return lines(tmp_path / "summary.jsonl")

    summaries = asyncio.run(run())
    assert [s["task"] for s in summaries] == ["a", "b"]
    assert [s["failures"] for s in summaries] == [0, 0]
    for summary in summaries:
        assert summary["policy_version"] == 0
        samples = lines(tmp_path / f"{summary['task']}-step-0.jsonl")
        assert {s["policy_version"] for s in samples} == {summary["policy_version"]}


def train(folder: Path, *words: str, until: int) -> tuple[RunFolder, list[str]]:
    """Train while the first evaluation lasts until step `until` is committed; return the events."""
    config = config_of(
        folder, "run", "eval.tasks={a={data='addition:heldout'}}", "eval.max_problems=3", *words
    )
    run_folder = create(config)
    happened: list[str] = []

    async def run() -> None:
        async with open_job(config, run_folder) as job:
            await begin(job)
            reward, commit, log = Blocked(), job.journal.commit_step, job.evaluations.log

            async def committed(report: StepReport) -> None:
                await commit(report)
                happened.append(f"step {report.step}")
                if report.step == until:
                    reward.allowed.set()

            def logged(step: int, metrics: dict[str, float]) -> None:
                happened.append(f"evaluated {step}")
                log(step, metrics)

            if until == 0:
                reward.allowed.set()
            job.journal.commit_step = committed  # type: ignore[method-assign]
            job.evaluations.log = logged
            job.evaluations.tasks = [replace(t, reward=reward) for t in job.evaluations.tasks]
            await Loop(job).run()

    asyncio.run(run())
    return run_folder, happened


def versions(folder: RunFolder, step: int) -> set[int]:
    return {s["policy_version"] for s in lines(folder.evaluations / f"a-step-{step}.jsonl")}


@pytest.mark.parametrize("place", [["launch.kind=inline"], ["launch.num_producers=2"]])
@pytest.mark.parametrize("blocking", ["true", "false"])
def test_a_run_trains_until_the_next_weights_or_waits_if_asked(
    blocking: str, place: list[str], tmp_path: Path
) -> None:
    words = [*place, f"eval.blocking={blocking}"]
    folder, happened = train(tmp_path, *words, until=0 if blocking == "true" else 1)
    wanted = ["step 1", "evaluated 0", "step 2", "step 3", "evaluated 3"]
    if blocking == "true":
        wanted = ["evaluated 0", "step 1", "step 2", "step 3", "evaluated 3"]
    assert happened == wanted
    assert versions(folder, 0) == {0}
    assert versions(folder, 3) == {3}


def test_a_run_says_that_samples_of_an_evaluation_failed_and_shows_no_score(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "fails.py"
    file.write_text("def fails(response):\n    raise ValueError('no server')\n")
    task = f"{{data='addition:heldout', rewards=[{{type='{file}:fails'}}]}}"
    words = [f"eval.tasks={{a={task}}}", "eval.max_problems=3", "train.steps=1"]
    folder = train_new(config_of(tmp_path, "run", "launch.kind=inline", *words))
    shown = " ".join("".join(capsys.readouterr()).split())
    failed = "3 of 3 samples failed and count as wrong: reward: "
    assert f"warning: evaluation a after step 0: {failed}" in shown
    assert "no server" in shown
    assert " a reward" not in shown  # in the summary: nothing was judged
    assert lines(folder.evaluations / "summary.jsonl")[0]["reward"] is None
