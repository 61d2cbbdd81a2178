"""A small policy learns to use a calculator, from the documented command, on a CPU."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock import cli

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_a_policy_learns_to_call_the_calculator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It adds in its head in no rollout, and calls in one of four before training."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "examples" / "calculator"
    spec = importlib.util.spec_from_file_location("make_data", folder / "make_data.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.write(folder)
    words = ["launch.kind=inline", "run.name=sums", "track.trackers=[]"]
    done = CliRunner().invoke(cli.app, ["train", str(folder / "calculator.toml"), *words])
    assert done.exit_code == 0, done.output
    lines = Path("runs/sums/metrics.jsonl").read_text().splitlines()
    rewards = [json.loads(line)["reward/mean"] for line in lines]
    assert rewards[0] <= 0.4  # 64 rollouts of a policy that calls in a quarter of them
    assert sum(rewards[-4:]) / 4 >= 0.9
