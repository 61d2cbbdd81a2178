"""Full disks, failing disks and damaged files: one line names the fault and how to continue."""

from __future__ import annotations

import re
import shutil
import sqlite3
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.store.journal import Journal
from penstock.store.run_folder import RunFolder
from stages.tiny_run import CrashServer, assert_sound, digests

SYNC = "produce.strategy=sync"


@pytest.fixture(scope="module")
def stopped(server: CrashServer) -> RunFolder:
    """Return a run killed in step 4: three steps are journalled, steps 1 and 2 have checkpoints."""
    words = ("checkpoint.every_steps=1", "checkpoint.keep=3", SYNC)
    run, code = server.train("stopped", *words, point="after take", number=4)
    assert code == -9, server.output()
    # the checkpoint of step 3 was being written during step 4: it may or may not be complete
    shutil.rmtree(run.checkpoints / "step-3", ignore_errors=True)
    return run


@pytest.fixture
def broken(stopped: RunFolder, tmp_path: Path) -> RunFolder:
    """Return a copy of that run to damage."""
    shutil.copytree(stopped.path, tmp_path / "run")
    return RunFolder(tmp_path / "run")


@pytest.fixture(scope="module")
def expected(server: CrashServer) -> list[str]:
    run, code = server.train("undamaged", SYNC)
    assert code == 0
    return digests(run)


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 0x10
    path.write_bytes(content)


def merge_wal(run: RunFolder) -> None:
    """Bring the write-ahead log into the file, as an undisturbed close does."""
    with sqlite3.connect(run.journal) as database:
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def error_line(server: CrashServer) -> str:
    output = server.output()
    assert "Traceback" not in output
    (line,) = [line for line in output.splitlines() if line.startswith("error:")]
    return line


@pytest.mark.slow
def test_a_flipped_byte_in_a_checkpoint_costs_a_longer_redo(
    server: CrashServer, broken: RunFolder, expected: list[str]
) -> None:
    newest = max(broken.checkpoints.glob("step-*"))
    flip(newest / "model" / "model.safetensors", 5000)
    assert server.run("resume", str(broken.path)) == 0, server.output()
    assert f"{newest.name}: model/model.safetensors is not what was written" in server.output()
    assert_sound(broken)
    assert digests(broken) == expected


def test_without_any_good_checkpoint_everything_is_redone(
    server: CrashServer, broken: RunFolder, expected: list[str]
) -> None:
    for path in broken.checkpoints.glob("step-*"):
        flip(path / "manifest.json", 20)
    assert server.run("resume", str(broken.path)) == 0, server.output()
    assert "every step is redone from the journal" in server.output()
    assert digests(broken) == expected


@pytest.mark.parametrize("share", [0.0, 0.4, pytest.param(0.9, marks=pytest.mark.slow)])
def test_a_truncated_log_is_noticed_and_gone_on_from(
    server: CrashServer, broken: RunFolder, expected: list[str], share: float
) -> None:
    wal = broken.journal.with_name("journal.db-wal")
    assert wal.stat().st_size > 0
    with wal.open("r+b") as file:
        file.truncate(int(wal.stat().st_size * share))
    before = committed(broken) if share else None
    code = server.run("resume", str(broken.path))
    if share == 0.0:  # nothing is left of the journal
        assert code == 1
        assert "newest good state: step 2" in error_line(server)
        return
    assert code == 0, server.output()
    assert before is not None
    if before < 3:
        assert f"the journal ends at step {before}" in server.output()
    assert_sound(broken)
    assert digests(broken) == expected


def committed(run: RunFolder) -> int:
    journal = Journal.open(run.journal, readonly=True)
    try:
        return journal.last_committed_step()
    finally:
        journal.close()


def test_a_flipped_byte_in_a_payload_is_found(server: CrashServer, broken: RunFolder) -> None:
    merge_wal(broken)
    with sqlite3.connect(broken.journal) as database:
        (data,) = database.execute(
            "SELECT data FROM rollout_rows JOIN group_rows USING(group_id) WHERE step = 3"
        ).fetchone()
    flip(broken.journal, broken.journal.read_bytes().index(data) + len(data) // 2)
    assert server.run("audit", str(broken.path)) == 1
    assert re.search(r"FAULT: rollout \S+: the record is not what was written", server.output())
    assert server.run("resume", str(broken.path)) == 1
    line = error_line(server)
    assert re.search(r"rollout \S+ is not what was written", line)
    assert "newest good state: step 2" in line
    assert f"model.path={broken.checkpoints / 'step-2' / 'model'}" in line


def test_the_state_that_is_offered_can_be_started_from(
    server: CrashServer, broken: RunFolder
) -> None:
    for path in broken.path.glob("journal.db*"):
        path.write_bytes(b"no journal" * 100)
    assert server.run("resume", str(broken.path)) == 1
    line = error_line(server)
    words = line[line.index("penstock train") :].split()[1:]
    assert server.run(*words, f"run.dir={broken.path.parent}") == 0, server.output()
    assert_sound(RunFolder(broken.path.parent / "run-2"))


def test_a_damaged_page_is_named(server: CrashServer, broken: RunFolder) -> None:
    merge_wal(broken)
    content = bytearray(broken.journal.read_bytes())
    content[4096 : 4096 + 64] = b"\xff" * 64
    broken.journal.write_bytes(content)
    assert server.run("resume", str(broken.path)) == 1
    assert "damaged" in error_line(server)


def test_a_missing_journal_is_not_taken_for_a_new_run(
    server: CrashServer, broken: RunFolder
) -> None:
    for path in broken.path.glob("journal.db*"):
        path.unlink()
    assert server.run("resume", str(broken.path)) == 1
    assert "it is missing or empty; newest good state: step 2" in error_line(server)


@pytest.mark.parametrize("fault", ["ENOSPC", pytest.param("EIO", marks=pytest.mark.slow)])
def test_a_disk_that_fails_checkpoints_does_not_stop_the_run_at_once(
    server: CrashServer, fault: str
) -> None:
    words = ("train.steps=6", "checkpoint.every_steps=1", SYNC)
    run, code = server.train(f"ck-{fault}", *words, point="before seal", number=2, fault=fault)
    assert code == 1
    output = server.output()
    assert output.count("checkpoint not written") >= 3
    assert "3 checkpoints in a row failed" in error_line(server)
    assert "step 1 stays valid" in output
    assert [path.name for path in run.checkpoints.iterdir()] == ["step-1"]
    assert server.run("resume", str(run.path)) == 0, server.output()
    assert_sound(run, steps=6)


def test_a_run_killed_before_its_first_record_starts_anew(
    server: CrashServer, broken: RunFolder, expected: list[str]
) -> None:
    for name in ("checkpoints", "metrics.jsonl"):
        path = broken.path / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for path in broken.path.glob("journal.db*"):
        path.write_bytes(b"")
    assert server.run("resume", str(broken.path)) == 0, server.output()
    assert digests(broken) == expected


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system with room for one checkpoint."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=14m", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("cannot mount a small file system here")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.slow
def test_a_full_disk_ends_the_run_in_one_line_and_room_lets_it_go_on(
    server: CrashServer, small_disk: Path
) -> None:
    demo = ("model.path=demo", SYNC)  # its checkpoints fill the disk
    undisturbed, code = server.train("not-full", *demo)
    assert code == 0, server.output()
    _, code = server.train("full", f"run.dir={small_disk}", "checkpoint.every_steps=1", *demo)
    run = RunFolder(small_disk / "full")
    assert code == 1, server.output()
    # the journal or a checkpoint reports the full disk, whichever writes first
    assert "No space left" in server.output() or "disk is full" in server.output()
    assert "MiB free there" in error_line(server)
    told = (run.logs / "run.log").read_text()
    assert "warning: disk: at most" in told  # the forecast
    assert "The disk will soon be full" in told  # before it was full
    subprocess.run(["mount", "-o", "remount,size=200m", str(small_disk)], check=True)
    assert server.run("resume", str(run.path)) == 0, server.output()
    assert_sound(run)
    assert digests(run) == digests(undisturbed)


@pytest.mark.slow
def test_a_journal_that_cannot_grow_stops_the_run_in_one_line(
    server: CrashServer, expected: list[str]
) -> None:
    run, code = server.train("no-room", SYNC, point="before journal record", number=20, fault="EIO")
    assert code == 1
    assert "cannot write: [Errno 5]" in error_line(server)
    assert (run.logs / "run.log").read_text().endswith(f" {error_line(server)}\n")
    assert server.run("resume", str(run.path)) == 0, server.output()
    assert_sound(run)
    assert digests(run) == expected


@pytest.mark.slow
def test_a_full_disk_under_metrics_samples_and_timeline_is_told_once_and_costs_no_step(
    server: CrashServer, expected: list[str]
) -> None:
    words = (SYNC, "track.rollouts_every_steps=1")
    run, code = server.train(
        "no-lines", *words, point="before line write", number=4, fault="ENOSPC"
    )
    assert code == 0, server.output()
    assert digests(run) == expected
    output = server.output()
    for name in ("metrics.jsonl", "rollouts.jsonl", "timeline/events.jsonl"):
        path = run.path / name
        assert output.count(f"{path}: cannot write: No space left on device") == 1
        assert len(re.findall(rf"{path}: \d+ lines could not be written", output)) == 1
    assert "Traceback" not in output
    assert server.run("resume", str(run.path), "train.steps=5") == 0, server.output()
    assert_sound(run, steps=5)
