"""The forecast of disk use holds for a real run, and so does the space that is left."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.config import Config
from penstock.store.run_folder import RunFolder
from penstock.store.space import DiskWatch, _step_bytes, checkpoint_bytes
from stages.disturbed_run import STEPS, config_of

MIB = 2**20


def small_run(tmp_path: Path) -> Config:
    return config_of(tmp_path, "one", "checkpoint.keep=2")


def test_the_forecast_is_an_upper_bound_of_a_real_run(quiet: RunFolder) -> None:
    config = quiet.config()
    (checkpoint,) = quiet.checkpoints.glob("step-*")
    real = sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())
    assert real / 1.3 < checkpoint_bytes(config) < real * 1.3
    journal = sum(path.stat().st_size for path in quiet.path.glob("journal.db*"))
    empty = 200_000  # pages of empty tables, and the settings
    assert journal < STEPS * _step_bytes(config) + empty
    assert "disk: at most" in (quiet.logs / "run.log").read_text()


def test_the_forecast_names_journal_checkpoints_and_free_space(tmp_path: Path) -> None:
    config = small_run(tmp_path)
    line = DiskWatch(tmp_path, config, 1000, free=lambda _: 2**40).forecast(0)
    assert line.startswith(
        "disk: at most 7.6 MiB of journal (12 bytes a token) and 3 checkpoints of "
    )
    assert line.endswith("; 1.0 TiB are free")
    scarce = DiskWatch(tmp_path, config, 1000, free=lambda _: 4 * MIB).forecast(0)
    assert scarce.startswith("warning: disk: at most")


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    path = tmp_path / "journal.db"
    path.write_bytes(b"")
    return path


def test_the_space_is_short_when_the_next_steps_do_not_fit(tmp_path: Path, journal: Path) -> None:
    config = small_run(tmp_path)
    needed = checkpoint_bytes(config)
    free = [needed + 200 * MIB]
    watch = DiskWatch(tmp_path, config, 1000, free=lambda _: free[0])
    assert not watch.look(1).is_short
    journal.write_bytes(bytes(MIB))  # one MiB a step
    assert not watch.look(2).is_short
    free[0] = needed + 99 * MIB
    assert watch.look(2).is_short
    assert "the journal 100 MiB for the next 100 steps" in str(watch.look(2))


def test_only_the_steps_that_are_left_count(tmp_path: Path, journal: Path) -> None:
    config = small_run(tmp_path)
    watch = DiskWatch(tmp_path, config, 3, free=lambda _: checkpoint_bytes(config) + 3 * MIB)
    assert not watch.look(1).is_short
    journal.write_bytes(bytes(MIB))
    assert not watch.look(2).is_short
