"""A run on a disk that cannot be written is audited, replayed and looked at like any other."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from penstock.store.run_folder import RunFolder
from stages.tiny_run import CrashServer, digests

ReadOnly = Callable[[RunFolder], RunFolder]


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[ReadOnly]:
    """Return a function that copies a run and mounts the copy read-only, which binds root too."""
    with ExitStack() as mounts:

        def copy(run: RunFolder) -> RunFolder:
            folder = tmp_path / "copy"
            shutil.copytree(run.path, folder)
            mounts.enter_context(_mounted_read_only(folder))
            return RunFolder(folder)

        yield copy


class _mounted_read_only:
    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)

    def __enter__(self) -> None:
        bind = ["mount", "--bind", self._folder, self._folder]
        if shutil.which("mount") is None or subprocess.run(bind, capture_output=True).returncode:
            pytest.skip("cannot mount a folder read-only here")
        subprocess.run(["mount", "-o", "remount,ro,bind", self._folder], check=True)

    def __exit__(self, *error: object) -> None:
        subprocess.run(["umount", self._folder], check=True)


@pytest.fixture(scope="module")
def killed(server: CrashServer) -> RunFolder:
    """Return a run that was killed, so that its newest records are in the write-ahead log."""
    run, code = server.train("to-copy", point="after take", number=4)
    assert code == -9, server.output()
    assert run.journal.with_name("journal.db-wal").stat().st_size > 0
    return run


def look_at(server: CrashServer, run: RunFolder) -> None:
    assert server.run("audit", str(run.path)) == 0, server.output()
    assert server.run("replay", str(run.path)) == 0, server.output()
    assert "3 steps recomputed" in server.output()
    assert server.run("rollouts", str(run.path), "--step", "3") == 0, server.output()


@pytest.mark.parametrize("index", ["with its index", "without its index"])
def test_a_read_only_copy_of_a_killed_run(
    server: CrashServer, killed: RunFolder, read_only: ReadOnly, index: str, tmp_path: Path
) -> None:
    source = RunFolder(tmp_path / "killed")
    shutil.copytree(killed.path, source.path)
    if index == "without its index":
        source.journal.with_name("journal.db-shm").unlink()
    copy = read_only(source)
    look_at(server, copy)
    assert len(digests(copy)) == 3


def test_a_read_only_copy_of_a_closed_journal(
    server: CrashServer, killed: RunFolder, read_only: ReadOnly, tmp_path: Path
) -> None:
    source = RunFolder(tmp_path / "closed")
    shutil.copytree(killed.path, source.path)
    digests(source)
    from penstock.store.journal import Journal

    Journal.open(source.journal).close()
    assert not source.journal.with_name("journal.db-wal").exists()
    look_at(server, read_only(source))


def test_a_fork_beside_a_read_only_run_asks_for_another_place(
    server: CrashServer, killed: RunFolder, read_only: ReadOnly, tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    shutil.copytree(killed.path, runs / "one")
    copy = read_only(RunFolder(runs))
    assert server.run("replay", str(copy.path / "one"), "--algo", "rloo") == 2, server.output()
    assert "run.dir: nothing can be written to" in server.output()
    where = f"run.dir={tmp_path / 'elsewhere'}"
    assert server.run("replay", str(copy.path / "one"), "--algo", "rloo", where) == 0
