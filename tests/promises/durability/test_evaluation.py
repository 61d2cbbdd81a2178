"""Each evaluation inside a run uses exactly one policy; `penstock eval` evaluates what a run left."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.config.source import load_config
from penstock.errors import UserError
from penstock.store.run_folder import RunFolder
from stages import tiny_run
from stages.tiny_run import CrashServer

SUMS = Path(tiny_run.__file__).with_name("sums.jsonl")
TASKS = [
    f"eval.tasks={{a={{data='{SUMS}'}}, b={{data='{SUMS}', sampling={{temperature=1.0, num_generations=2}}}}}}",
    "eval.every_steps=1",
    "eval.max_problems=6",
    "eval.sampling.max_tokens=40",
    "eval.sampling.temperature=0.0",
]


@pytest.fixture(scope="module", params=["beside", pytest.param("blocking", marks=pytest.mark.slow)])
def evaluated(server: CrashServer, request: pytest.FixtureRequest) -> RunFolder:
    blocking = f"eval.blocking={str(request.param == 'blocking').lower()}"
    run, code = server.train(f"evaluated-{request.param}", *TASKS, blocking)
    assert code == 0, server.output()
    return run


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_every_sample_of_an_evaluation_is_of_one_version(evaluated: RunFolder) -> None:
    summaries = lines(evaluated.evaluations / "summary.jsonl")
    assert [(s["task"], s["step"]) for s in summaries] == [
        (task, step) for step in range(5) for task in ("a", "b")
    ]
    for summary in summaries:
        samples = lines(evaluated.evaluations / f"{summary['task']}-step-{summary['step']}.jsonl")
        assert {sample["policy_version"] for sample in samples} == {summary["policy_version"]}
        assert summary["policy_version"] == summary["step"]


@pytest.mark.slow
def test_an_evaluation_that_a_kill_cut_short_is_made_up_for(server: CrashServer) -> None:
    """Kill the run during its first evaluation, and again after the last step was committed."""
    name, place = "evaluated-killed", ["eval.every_steps=2", "produce.strategy=sync"]
    run, code = server.train(name, *TASKS, *place, point="before step", number=1)
    assert code == -9
    assert server.run("resume", str(run.path), point="after metrics line", number=4) == -9
    assert server.run("resume", str(run.path)) == 0, server.output()
    summaries = lines(run.evaluations / "summary.jsonl")
    assert sorted((s["step"], s["task"]) for s in summaries) == [
        (step, task) for step in (0, 2, 4) for task in ("a", "b")
    ]
    assert all(s["policy_version"] == s["step"] for s in summaries)


@pytest.mark.slow
def test_an_evaluation_that_ended_with_the_run_is_told(server: CrashServer) -> None:
    """The weights of step 2 are evaluated while step 3 is trained; a stop then ends the evaluation."""
    tasks = [f"eval.tasks={{a={{data='{SUMS}'}}}}", "eval.every_steps=2"]
    words = [*tasks, "eval.sampling.max_tokens=60", "checkpoint.keep_best=a/reward"]
    place = {"point": "after step", "number": 3, "fault": "SIGTERM"}
    run, code = server.train("evaluated-stopped", *words, "launch.kind=local", **place)
    assert code == 130, server.output()
    assert server.run("resume", str(run.path)) == 0, server.output()
    assert [s["step"] for s in lines(run.evaluations / "summary.jsonl")] == [0, 4]
    told = server.output()
    assert "warning: evaluation a after step 2 was cut off and is missing; to see it: " in told
    command = told.partition("to see it: penstock ")[2].split()[:3]
    assert server.run(*command) == 0, server.output()
    assert server.run("resume", str(run.path), "train.steps=6") == 0, server.output()
    assert "was cut off" not in server.output()


def test_each_task_has_its_own_sampling(evaluated: RunFolder) -> None:
    counts = {
        s["task"]: (s["samples"], sorted(s["pass_at"]))
        for s in lines(evaluated.evaluations / "summary.jsonl")
    }
    assert counts == {"a": (6, ["1"]), "b": (12, ["1", "2"])}


def test_a_model_folder_is_evaluated_by_itself(server: CrashServer, evaluated: RunFolder) -> None:
    model = evaluated.checkpoints / "step-4" / "model"
    code = server.run("eval", str(model), *TASKS, "--out", str(server.folder / "out"))
    assert code == 0, server.output()
    samples = lines(server.folder / "out" / "a-step-0.jsonl")
    last = lines(evaluated.evaluations / "a-step-4.jsonl")
    assert [s["prediction"] for s in samples] == [s["prediction"] for s in last]
    assert server.run("eval", str(model)) == 2
    assert "eval.tasks: got none" in server.output()


def test_a_run_is_evaluated_at_its_newest_weights(
    server: CrashServer, evaluated: RunFolder
) -> None:
    code = server.run("eval", str(evaluated.path), "--out", str(server.folder / "again"))
    assert code == 0, server.output()
    samples = lines(server.folder / "again" / "b-step-0.jsonl")
    last = lines(evaluated.evaluations / "b-step-4.jsonl")
    assert [s["prediction"] for s in samples] == [s["prediction"] for s in last]


def test_a_misspelt_sampling_field_is_refused() -> None:
    with pytest.raises(UserError, match="temperatur"):
        load_config(None, ["eval.tasks.heldout.sampling={temperatur=1}"])
