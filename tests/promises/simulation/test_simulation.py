"""The simulation holds for its first seeds, repeats a seed exactly, and finds defects that are put in."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from simulation.defects import DEFECTS


def simulate(*options: str, hash_seed: str = "0") -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, sys.path))
    return subprocess.run(
        [sys.executable, "-m", "simulation", *options],
        env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
    )


def test_every_promise_holds_in_the_first_schedules() -> None:
    """`make test-simulation` runs many more."""
    done = simulate("--schedules", "20")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_seed_gives_the_same_schedule_in_any_process(tmp_path: Path) -> None:
    """Also where sets of strings have another order, which a process draws when it starts."""
    for name, hash_seed in (("first", "0"), ("second", "1")):
        done = simulate("--seed", "6", "--trace", str(tmp_path / name), hash_seed=hash_seed)
        assert done.returncode == 0, done.stdout + done.stderr
    first, second = ((tmp_path / name).read_text() for name in ("first", "second"))
    assert len(first.splitlines()) > 300
    assert first == second


@pytest.mark.parametrize(
    "defect",
    [
        pytest.param(defect, marks=[] if defect == "staleness" else [pytest.mark.slow])
        for defect in sorted(DEFECTS.keys() - {"statistics"})  # rare: see `test_found.py`
    ],
)
def test_a_known_defect_is_found_and_its_seed_is_named(defect: str) -> None:
    first = "130" if defect == "tools" else "0"  # near a seed that finds it
    done = simulate("--first", first, "--schedules", "300", "--defect", defect)
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(
        r"PYTHONPATH=tests:tests/promises python -m simulation --seed \d+", done.stdout
    )
    assert "broken:" in done.stdout
