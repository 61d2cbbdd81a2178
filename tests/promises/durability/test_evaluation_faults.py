"""An evaluation beside a fault of a worker has all its samples, each of the one version that it is of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stages.tiny_run import SUMS, CrashServer, assert_went_on

TASKS = [
    f"eval.tasks={{a={{data='{SUMS}'}}, b={{data='{SUMS}'}}}}",
    "eval.max_problems=6",
    "eval.sampling.max_tokens=40",
]


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


LOCAL = ["launch.kind=local", "launch.restart_backoff_s=0", "produce.strategy=sync"]


@pytest.mark.parametrize(
    "fault",
    [
        "SIGKILL engine-0",
        pytest.param("SIGKILL trainer", marks=pytest.mark.slow),
        pytest.param("SIGSTOP engine-0", marks=pytest.mark.slow),
        pytest.param("SIGSTOP trainer", marks=pytest.mark.slow),
    ],
)
def test_an_evaluation_beside_a_fault_is_whole_and_of_one_version(
    server: CrashServer, fault: str
) -> None:
    name = f"evaluated-{fault}".replace(" ", "-")
    words = [*TASKS, *LOCAL, "eval.every_steps=2", "watchdog.stall_s=2"]
    run, code = server.train(name, *words, point="before step", number=3, fault=fault)
    assert code == 0, server.output()
    summaries = lines(run.evaluations / "summary.jsonl")
    assert sorted((s["step"], s["task"]) for s in summaries) == [
        (step, task) for step in (0, 2, 4) for task in ("a", "b")
    ]
    for summary in summaries:
        samples = lines(run.evaluations / f"{summary['task']}-step-{summary['step']}.jsonl")
        assert {sample["policy_version"] for sample in samples} == {summary["step"]}
        assert not any(sample["error"] for sample in samples)
    assert_went_on(server, run)
