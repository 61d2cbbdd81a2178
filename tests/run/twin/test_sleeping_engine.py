"""The engine that sleeps, with which benchmarks/twin.py measures the twin's error, trains and is predicted.

The run has engines of two kinds, without Ray, and its trainer two ranks that share only their optimizers (ZeRO 1).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.cli import app
from penstock.store.run_folder import RunFolder
from stages.tiny_run import TINY, assert_sound

ENGINE = Path(__file__).parents[3] / "benchmarks" / "sleeping_engine.py"
SLEEPS = [
    f"engine.name={ENGINE}:SleepingEngine",
    "engine.options={step_s=0.002, row_s=0.0, prefill_s=0.0, mean_tokens=4}",
    f"tasks.train.rewards=[{{type='{ENGINE}:Differs'}}]",
    f"algorithm.name={ENGINE}:SleepingGRPO",
    "produce.strategy=sync",
    "launch.kind=local",
    "launch.num_producers=2",
    "launch.producer_kinds=[{engine={max_slots=4, options={step_s=0.008}}}]",
    "launch.num_consumers=2",
    "train.parallel.zero=1",
]


@pytest.mark.slow
@pytest.mark.usefixtures("warm_workers")
def test_a_run_with_two_kinds_of_sleeping_engines_is_predicted(tmp_path: Path) -> None:
    words = [*TINY, *SLEEPS, f"run.dir={tmp_path}", "run.name=asleep"]
    trained = CliRunner().invoke(app, ["train", *words])
    assert trained.exit_code == 0, trained.output
    run, saved = RunFolder(tmp_path / "asleep"), tmp_path / "profile.json"
    assert_sound(run)
    command = ["simulate", "--check", str(run.path), "--profile", str(run.path)]
    checked = CliRunner().invoke(app, [*command, "--save-profile", str(saved)])
    assert checked.exit_code == 0, checked.output
    assert all(f"{name} " in checked.output for name in ("tokens/s", "trainer idle", "engine idle"))
    ((kind, model),) = json.loads(saved.read_text())["kinds"].items()
    assert "step_s" in kind
    assert model["slots"] == 4
