"""Power fails at any point of a run: what was promised is on disk, and what is there is consistent.

A real run is recorded, write by write (`stages/write_recorder.c`), and every point of the record is a
possible failure: the unsynced writes before it are dropped, torn or reordered (`stages/power_loss.py`).
25 points in `make test`, 1,000 in `make test-long`; PENSTOCK_POWER_LOSSES=10000 for more,
PENSTOCK_CRASH_SEED for others.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from penstock.errors import UserError
from penstock.files import memory_folder
from penstock.inspection.audit import _era_bounds, audit_journal
from penstock.run.recover import check_journal, newest_checkpoint
from penstock.store.checkpoint import CheckpointStore
from penstock.store.journal import Journal
from penstock.store.run_folder import RunFolder
from stages.power_loss import Change, Disk, Kind, read_record
from stages.recorded_run import MORE_STEPS, NAME
from stages.tiny_policy import save_policy
from stages.tiny_run import SEED

LOSSES = int(os.environ.get("PENSTOCK_POWER_LOSSES", "1000"))
SHARES = (0.0, 0.1, 0.5, 0.9, 1.0)  # of the unsynced writes that reach the disk; 1: a mere kill -9
SOURCE = Path(__file__).parents[2] / "stages" / "write_recorder.c"


@dataclass(frozen=True)
class Recorded:
    """The record of a run below `root`, and the run as it ended."""

    root: Path
    changes: list[Change]
    digests: dict[int, str]
    batches: dict[int, list[str]]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    compiler = shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("a C compiler and Linux are needed to record the writes of a run")
    folder = tmp_path_factory.mktemp("power")
    library, log, root = folder / "recorder.so", folder / "record", folder / "root"
    root.mkdir()
    build = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE), "-ldl"]
    subprocess.run(build, check=True)
    policy = save_policy(folder / "policy")
    environment = {
        **os.environ,
        "LD_PRELOAD": str(library),
        "RECORD_ROOT": str(root),
        "RECORD_LOG": str(log),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    command = [sys.executable, "-m", "stages.recorded_run", str(root), str(policy)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    journal = Journal.look(root / "runs" / NAME / "journal.db")
    try:
        digests = {report.step: report.digest for report in journal.steps()}
        batches = {step: ids_of(journal, step) for step in digests}
    finally:
        journal.close()
    return Recorded(root, read_record(log), digests, batches)


def ids_of(journal: Journal, step: int) -> list[str]:
    return [group.group_id for group in journal.batch(step).groups]


@pytest.mark.slow
def test_the_record_has_every_write_of_the_run(recorded: Recorded) -> None:
    """All changes in order give the files that are there: nothing passed the recorder by."""
    disk = Disk(str(recorded.root))
    for change in recorded.changes:
        disk.apply(change)
    made = dict(disk.left(random.Random(0), 1.0))
    found = {
        str(path.relative_to(recorded.root)): None if path.is_dir() else path.read_bytes()
        for path in recorded.root.rglob("*")
        if not path.name.endswith("-shm")  # mapped memory, which SQLite makes anew after a crash
    }
    assert {path: data for path, data in made.items() if not path.endswith("-shm")} == found
    assert len(recorded.digests) == MORE_STEPS


def losses(recorded: Recorded, count: int) -> Iterator[tuple[int, Disk, dict[str, int]]]:
    """Yield points of the record in order, the disk there, and what was promised by then."""
    choice = random.Random(f"power/{SEED}/{count}")
    points = sorted(choice.randint(0, len(recorded.changes)) for _ in range(count))
    disk, promised, at = Disk(str(recorded.root)), {"committed": 0, "saved": -1}, 0
    for point in points:
        for change in recorded.changes[at:point]:
            disk.apply(change)
            if change.kind is Kind.WRITE and change.path.endswith("/marks"):
                word, step = change.data.split()
                promised[word.decode()] = int(step)
        at = point
        yield point, disk, promised


@pytest.fixture
def memory() -> Iterator[Path]:
    """Return a folder in memory, if the system has one: thousands of small files are written there."""
    with tempfile.TemporaryDirectory(dir=memory_folder()) as folder:
        yield Path(folder)


@pytest.mark.parametrize("count", [25, pytest.param(LOSSES, marks=pytest.mark.slow)])
def test_power_fails_and_what_was_promised_is_there(
    recorded: Recorded, memory: Path, count: int
) -> None:
    for number, (point, disk, promised) in enumerate(losses(recorded, count)):
        share = SHARES[number % len(SHARES)]
        words = f"seed {SEED}, point {point} of {len(recorded.changes)}, share {share}, {promised}"
        left = memory / str(number)
        left.mkdir()
        for path, data in disk.left(random.Random(f"{SEED}/{number}"), share):
            if data is None:
                (left / path).mkdir(parents=True)
            elif not path.endswith(("-shm", "report.html", "events.jsonl")):
                (left / path).write_bytes(data)
        try:
            check_recovery(recorded, RunFolder(left / "runs" / NAME), promised, share)
        except Exception as error:
            raise AssertionError(f"{words}: {error}") from error
        shutil.rmtree(left, ignore_errors=True)


def check_recovery(
    recorded: Recorded, run: RunFolder, promised: dict[str, int], share: float
) -> None:
    """Do what `penstock resume` does before it starts a trainer, and compare with the whole run."""
    if not (run.path / "config.toml").is_file() or not run.journal.exists():
        assert promised["saved"] < 0, "a run with a checkpoint is gone"
        return
    check_journal(run)  # raises if the journal is damaged, or empty beside later files
    try:
        eras = run.eras()
    except UserError:
        assert promised["committed"] == 0, "the config of a run that trained is gone"
        return
    assert [era.last_step for era in eras[:-1]] in ([], [8])
    journal = Journal.open(run.journal)
    try:
        committed = journal.last_committed_step()
        notes: list[str] = []
        checkpoint = newest_checkpoint(CheckpointStore(run.checkpoints), journal, notes.append)
        assert not notes  # no checkpoint is damaged, and none is ahead of the journal
        saved = -1 if checkpoint is None else checkpoint.step
        assert saved >= promised["saved"], f"the newest checkpoint is of step {saved}"
        if share == 1.0:
            assert committed >= promised["committed"], f"committed: {committed}"
        assert [report.digest for report in journal.steps()] == [
            recorded.digests[step] for step in range(1, committed + 1)
        ]
        for step in range(max(saved, 0) + 1, committed + 1):
            assert ids_of(journal, step) == recorded.batches[step]
        journal.unfinished_groups()
        assert audit_journal(journal, [_era_bounds(era) for era in eras]).faults == []
    finally:
        journal.close()
