"""Oversampling must not bias what is trained: runs the default row of the table in docs/async.md."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from penstock.run.twin.virtual_time import VirtualClock

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "length_bias.py"


def test_over_sample_half_drops_nothing_and_trains_the_lengths_it_drew(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("length_bias", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    clock = VirtualClock()
    row = clock.run(script.experiment({"over_sample_threshold": 0.5}, True, str(tmp_path)))
    clock.close()
    assert row["dropped"] == 0
    assert row["drawn"] == row["trained"] + row["left"]
    assert row["trained"] == 40 * 16
    assert row["mean trained"] == pytest.approx(row["mean drawn"], rel=0.05)
    assert row["generated / trained"] < 1.94  # what leaving stragglers for good would cost
