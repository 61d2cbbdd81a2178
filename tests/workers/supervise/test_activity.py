"""The activity of a process includes that of its descendants, read from a made-up /proc."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.workers.rpc import BYTES_PER_SECOND, activity_of, is_stopped

TICKS = os.sysconf("SC_CLK_TCK")


def process(proc: Path, pid: int, parent: int, seconds: float, moved: int | None = 0) -> None:
    folder = proc / str(pid)
    folder.mkdir()
    before_times = "0 " * 9  # between the parent and the times
    times = f"{round(seconds * TICKS)} 0 0 0"
    (folder / "stat").write_text(f"{pid} (a (strange) name) S {parent} {before_times}{times} 20 0")
    if moved is not None:
        (folder / "io").write_text(f"rchar: {moved}\nwchar: {moved}\nsyscr: 3\n")


def test_processes_that_it_started_and_bytes_count(tmp_path: Path) -> None:
    process(tmp_path, 10, parent=1, seconds=2.0, moved=int(BYTES_PER_SECOND))
    process(tmp_path, 11, parent=10, seconds=1.0)
    process(tmp_path, 12, parent=11, seconds=0.5, moved=None)  # of another user
    process(tmp_path, 20, parent=1, seconds=100.0)
    assert activity_of(10, tmp_path) == pytest.approx(2.0 + 2.0 + 1.0 + 0.5)
    assert activity_of(12, tmp_path) == pytest.approx(0.5)


def test_who_is_not_there_cannot_be_told(tmp_path: Path) -> None:
    assert activity_of(10, tmp_path) is None
    assert activity_of(10, tmp_path / "no proc") is None


def test_this_process_has_worked() -> None:
    before = activity_of(os.getpid())
    if before is None:
        pytest.skip("needs /proc")
    _ = sum(number * number for number in range(1_000_000))
    after = activity_of(os.getpid())
    assert after is not None
    assert after > before


def test_a_stopped_process_is_known(tmp_path: Path) -> None:
    process(tmp_path, 10, parent=1, seconds=1.0)
    assert not is_stopped(10, tmp_path)
    stat = tmp_path / "10" / "stat"
    stat.write_text(stat.read_text().replace(") S", ") T"))
    assert is_stopped(10, tmp_path)
    assert not is_stopped(11, tmp_path)
