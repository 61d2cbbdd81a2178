"""Files that are taken away under a live run: it stops at once, saves its records, and says how to go on."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import shutil
import signal
import sqlite3
import subprocess
from pathlib import Path

import pytest

from penstock.config.source import load_config
from penstock.errors import UserError
from penstock.run.session import StopSignals, train_new
from penstock.store import run_folder
from penstock.store.run_folder import RunFolder
from stages.tiny_run import TINY, CrashServer, assert_sound, digests

SYNC = ["produce.strategy=sync", "train.steps=12"]
TAKEN = {
    "removed": "rm {run}/journal.db*",
    "emptied": "rm -rf {run}/*",
    "gone": "rm -rf {run}",
    "replaced": "for f in {run}/journal.db*; do cp $f $f.new; mv $f.new $f; done",
}


@pytest.fixture(scope="module")
def expected(server: CrashServer) -> list[str]:
    run, code = server.train("untouched", *SYNC)
    assert code == 0, server.output()
    return digests(run)


def end_line(server: CrashServer) -> str:
    """Return the one line that names the fault."""
    output = server.output()
    assert "Traceback" not in output
    (line,) = {line for line in output.splitlines() if line.startswith("error: ")}
    return line


@pytest.mark.slow
@pytest.mark.parametrize("how", TAKEN)
def test_a_journal_that_is_taken_away_stops_the_run_and_is_saved(
    server: CrashServer, expected: list[str], how: str
) -> None:
    command = f"sh {TAKEN[how].format(run=server.folder / how)}"
    run, code = server.train(how, *SYNC, point="before step", number=6, fault=command)
    assert code == 1
    line = end_line(server)
    assert "all records are saved in" in line
    put_back = re.search(r"put them back with: (.*); then continue with", line)
    assert put_back is not None, line
    assert "step-8" not in str(list(run.path.rglob("*")))  # it stopped at once
    assert run.path.exists() == (how != "gone")  # else its loss would be hidden
    subprocess.run(["sh", "-c", put_back[1]], check=True)
    signed = how in ("removed", "replaced")
    assert server.run("resume", str(run.path), *([] if signed else ["--trust"])) == 0
    assert digests(run) == expected
    assert_sound(run, steps=12)
    assert server.run("audit", str(run.path)) == 0, server.output()


@pytest.mark.slow
def test_a_run_whose_folder_is_moved_stops_and_names_the_new_place(
    server: CrashServer, expected: list[str]
) -> None:
    new = RunFolder(server.folder / "new-place")
    command = f"sh mv {server.folder / 'old-place'} {new.path}"
    old, code = server.train("old-place", *SYNC, point="before step", number=6, fault=command)
    assert code == 1
    line = end_line(server)
    assert f"moved from {old.path} to {new.path}" in line
    assert line.endswith(f"continue with: penstock resume {new.path}")
    assert not old.path.exists()
    assert server.run("resume", str(new.path)) == 0, server.output()
    assert digests(new) == expected


@pytest.fixture(scope="module")
def killed(server: CrashServer) -> RunFolder:
    """Return a run killed in step 9, with the checkpoints of steps 2, 4 and 6 at least."""
    words = (*SYNC, "checkpoint.keep=9")
    run, code = server.train("killed", *words, point="after take", number=9)
    assert code == -9, server.output()
    return run


def copy_of(run: RunFolder, folder: Path) -> RunFolder:
    shutil.copytree(run.path, folder)
    return RunFolder(folder)


@pytest.mark.slow
def test_the_loss_of_a_journals_end_is_never_forgotten(
    server: CrashServer, killed: RunFolder, expected: list[str], tmp_path: Path
) -> None:
    run = copy_of(killed, tmp_path / "run")
    log = run.journal.with_name("journal.db-wal")
    with log.open("r+b") as file:
        file.truncate(log.stat().st_size // 2)
    before = len(digests(run))
    assert 0 < before < 6
    assert server.run("audit", str(run.path)) == 1
    told = f"the end of the journal was lost after step {before}: metrics.jsonl had step 8"
    for _ in range(2):
        assert server.run("resume", str(run.path)) == 0, server.output()
        assert server.run("audit", str(run.path)) == 0, server.output()
        assert f"warning: {told}" in server.output()
    assert digests(run) == expected
    (lost,) = run.path.glob("metrics-lost-*.jsonl")
    assert len(lost.read_text().splitlines()) == 8 - before


@pytest.mark.slow
def test_a_checkpoint_of_other_weights_is_set_aside(
    server: CrashServer, killed: RunFolder, expected: list[str], tmp_path: Path
) -> None:
    """It came from another run, or it could not be read while its step was redone with other bits."""
    run = copy_of(killed, tmp_path / "run")
    other, code = server.train("of-other-weights", *SYNC, "seed=7", "train.steps=4")
    assert code == 0, server.output()
    for path in run.checkpoints.glob("step-*"):
        if path.name != "step-2":
            shutil.rmtree(path)
    shutil.copytree(other.checkpoints / "step-4", run.checkpoints / "step-4")
    assert server.run("resume", str(run.path)) == 0, server.output()
    assert "the journal has" in server.output()
    assert "using the next older checkpoint" in server.output()
    assert (run.checkpoints / "lost-step-4").is_dir()
    assert digests(run) == expected


def test_a_failed_start_removes_what_it_made_and_nothing_else(
    server: CrashServer, tmp_path: Path
) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    words = ["train", *TINY, "tasks.train.max_prompt_tokens=1"]
    assert server.run(*words, f"run.dir={mine}") == 2, server.output()
    assert list(tmp_path.iterdir()) == [mine]
    assert list(mine.iterdir()) == []
    assert server.run(*words, f"run.dir={tmp_path / 'new' / 'folder'}") == 2, server.output()
    assert list(tmp_path.iterdir()) == [mine]


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_disk_without_locks_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(descriptor: int, kind: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(run_folder, "flock", refuse)
    with pytest.raises(UserError, match="a file system without flock"):
        train_new(load_config(None, [*TINY, f"run.dir={tmp_path / 'runs'}"]).config)
    assert not (tmp_path / "runs").exists()


def test_the_audit_reads_the_checkpoints_too(
    server: CrashServer, killed: RunFolder, tmp_path: Path
) -> None:
    run = copy_of(killed, tmp_path / "run")
    assert server.run("audit", str(run.path), "--deep") == 0, server.output()
    weights = run.checkpoints / "step-2" / "model" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[5000] ^= 0x10
    weights.write_bytes(content)
    assert server.run("audit", str(run.path), "--deep") == 1
    assert "model/model.safetensors is not what was written" in server.output()
    shutil.rmtree(run.checkpoints / "step-2")
    other, code = server.train("forger", *SYNC, "seed=7", "train.steps=2")
    assert code == 0, server.output()
    shutil.copytree(other.checkpoints / "step-2", run.checkpoints / "step-2")
    assert server.run("audit", str(run.path)) == 1
    assert "FAULT: checkpoint step-2 has weights with digest" in server.output()


def test_a_changed_format_is_damage(server: CrashServer, killed: RunFolder, tmp_path: Path) -> None:
    """The format is in the header of the file, at byte 60, where no checksum covers it."""
    run = copy_of(killed, tmp_path / "run")
    with sqlite3.connect(run.journal) as database:
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    for version, line in (
        (0, "names no format, but it has tables"),
        (7, "got format 7, allowed: 1"),
    ):
        content = bytearray(run.journal.read_bytes())
        content[60:64] = version.to_bytes(4, "big")
        run.journal.write_bytes(content)
        for command in ("audit", "resume"):
            assert server.run(command, str(run.path)) == 1, server.output()
            assert line in end_line(server)


def test_a_closed_terminal_stops_as_a_kill_does(server: CrashServer) -> None:
    _, code = server.train("hung-up", *SYNC, point="after step", number=3, fault="SIGHUP")
    assert code == 130, server.output()
    assert "checkpoint written" in server.output()


def test_a_closed_terminal_does_not_stop_a_run_under_nohup() -> None:
    async def main() -> None:
        with StopSignals("", lambda text: None):
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) not in (signal.SIG_IGN, signal.SIG_DFL)

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        asyncio.run(main())
    finally:
        signal.signal(signal.SIGHUP, before)
