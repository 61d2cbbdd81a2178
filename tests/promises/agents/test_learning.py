"""Small policies learn to use a calculator and to guess by halving, from the documented commands, on a CPU."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock import cli

ROOT = Path(__file__).resolve().parents[3]


def evaluations(name: str, folder: Path, seed: int) -> list[dict[str, Any]]:
    """Make the data of a recipe, train it, and return the results of its evaluations."""
    recipe = folder / "examples" / name
    shutil.copytree(ROOT / "examples", folder / "examples")
    spec = importlib.util.spec_from_file_location("make_data", recipe / "make_data.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.write(recipe)
    # an evaluation beside training makes the run depend on the load of the machine
    words = ["launch.kind=inline", "eval.blocking=true", "run.name=learnt", "track.trackers=[]"]
    words.append(f"seed={seed}")
    done = CliRunner().invoke(cli.app, ["train", str(recipe / f"{name}.toml"), *words])
    assert done.exit_code == 0, done.output
    lines = Path("runs/learnt/eval/summary.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_a_policy_learns_to_call_the_calculator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """It adds in its head in no rollout, and calls in one of four before training."""
    monkeypatch.chdir(tmp_path)
    results = evaluations("calculator", tmp_path, seed)
    assert results[0]["accuracy"] <= 0.3
    assert results[-1]["accuracy"] >= 0.9


@pytest.mark.slow
@pytest.mark.timeout(1200)  # 80 steps: five minutes beside other tests
def test_a_policy_learns_to_guess_a_number_by_halving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counts up before training; log2 of the 16 numbers is 4."""
    monkeypatch.chdir(tmp_path)
    results = evaluations("guess", tmp_path, seed=0)
    assert results[0]["turns"] >= 5.5
    assert results[-1]["turns"] <= 4.6  # which groups are ready decides: runs end at 3.9 to 4.4
    assert results[-1]["reward"] > results[0]["reward"] + 0.08
