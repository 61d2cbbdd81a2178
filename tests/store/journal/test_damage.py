"""A flipped byte anywhere in a journal is found and named, or changes nothing that can be read."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from rich.console import Console

from penstock.data.sampler import Sampler
from penstock.errors import JournalDamaged, PenstockError
from penstock.inspection.audit import audit_run
from penstock.store.journal import Journal, schema
from penstock.store.journal.codec import row_check
from penstock.store.run_folder import RunFolder
from penstock.types import StepReport
from stages.made_run import make_run
from stages.rollouts import finish_rollout, make_prompts

FLIPS = int(os.environ.get("PENSTOCK_FLIPS", "200"))  # of `make test-long`
VIEWS = ("groups", "rollouts", "steps", "weights", "events")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    folder = make_run(tmp_path_factory.mktemp("made") / "run", steps=4, groups_per_step=4)
    with closing(Journal.open(folder.journal)) as journal:
        for step in range(5):
            journal.record_published(step, f"{step:032x}")
            journal.record_confirmed("engine", step, f"{step:032x}")
    return folder


@pytest.fixture
def run(made: RunFolder, tmp_path: Path) -> RunFolder:
    """Return a copy to damage; its journal is one file."""
    shutil.copytree(made.path, tmp_path / "run")
    with sqlite3.connect(tmp_path / "run" / "journal.db") as database:
        database.execute("PRAGMA journal_mode = DELETE")
    return RunFolder(tmp_path / "run")


def all_that_can_be_read(folder: RunFolder) -> list[object]:
    with closing(Journal.open(folder.journal, readonly=True)) as journal:
        views = [sorted(map(repr, journal.query(f"SELECT * FROM {name}"))) for name in VIEWS]
        return [*views, journal.steps(), repr([journal.batch(step) for step in range(1, 5)])]


def outcome(folder: RunFolder) -> str:
    """Return the audit's result: fine, faults, or a one-line error."""
    try:
        code = audit_run(folder, console=Console(quiet=True))
    except PenstockError:
        return "named"
    return "fine" if code == 0 else "faults"


def flips(size: int, seed: int, count: int) -> Iterator[tuple[int, int]]:
    randomness = random.Random(seed)
    for _ in range(count):
        yield randomness.randrange(size), 1 << randomness.randrange(8)


@pytest.mark.parametrize("count", [20, pytest.param(FLIPS, marks=pytest.mark.slow)])
def test_a_flipped_byte_is_never_a_silent_wrong_answer(run: RunFolder, count: int) -> None:
    assert outcome(run) == "fine"
    before = all_that_can_be_read(run)
    original = run.journal.read_bytes()
    found = 0
    seed = int(os.environ.get("PENSTOCK_FLIP_SEED", "0"))
    for at, bit in flips(len(original), seed, count):
        with run.journal.open("r+b") as file:
            file.seek(at)
            file.write(bytes([original[at] ^ bit]))
        if outcome(run) == "fine":
            assert all_that_can_be_read(run) == before, f"byte {at}, bit {bit}"
        else:
            found += 1
        with run.journal.open("r+b") as file:
            file.seek(at)
            file.write(original[at : at + 1])
    assert found > 0.5 * count  # the others hit unused space
    assert outcome(run) == "fine"


def with_log(made: RunFolder, folder: Path) -> RunFolder:
    """Return a copy of the run whose version 9 is only in SQLite's log."""
    live = RunFolder(shutil.copytree(made.path, folder / "live"))
    with closing(sqlite3.connect(live.journal)) as reader:  # the log stays as long as one is open
        reader.execute("SELECT * FROM sqlite_master").fetchone()
        with closing(Journal.open(live.journal)) as journal:
            journal.record_published(9, "9" * 32)
        return RunFolder(shutil.copytree(live.path, folder / "run"))


def ways_to_open(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which every further opening of a journal adds how it opens the file."""
    ways: list[str] = []
    link = schema._link

    def noted(path: Path, how: str) -> sqlite3.Connection:
        ways.append(how)
        return link(path, how)

    monkeypatch.setattr(schema, "_link", noted)
    return ways


def test_an_index_that_was_cut_is_not_waited_for(
    made: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite would try for ten seconds to read it; the log is read without it."""
    run, ways = with_log(made, tmp_path), ways_to_open(monkeypatch)
    os.truncate(f"{run.journal}-shm", 1000)
    with closing(Journal.look(run.journal)) as copy:
        assert [report.step for report in copy.steps()] == [1, 2, 3, 4]
        assert copy.query("SELECT version FROM weights WHERE version = 9")
    assert ways == ["mode=ro"]  # of a copy, whose index SQLite makes


def test_a_log_without_rows_is_not_waited_for(
    made: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss of power may leave its header alone, and an index beside it that SQLite cannot use."""
    run, ways = with_log(made, tmp_path), ways_to_open(monkeypatch)
    os.truncate(f"{run.journal}-wal", 32)
    with closing(Journal.look(run.journal)) as copy:
        assert [report.step for report in copy.steps()] == [1, 2, 3, 4]
        assert not copy.query("SELECT version FROM weights WHERE version = 9")
    assert ways == ["immutable=1"]


def test_a_flipped_byte_in_the_log_beside_the_file_loses_an_end_that_is_missed(
    made: RunFolder, tmp_path: Path
) -> None:
    """SQLite silently skips everything after a damaged frame of its log."""
    run = RunFolder(shutil.copytree(made.path, tmp_path / "run"))
    sampler = Sampler(make_prompts(200), task_name="other", prompt_repeat_k=1, seed=0)

    async def write_on(journal: Journal) -> None:
        journal.dropped(journal.unfinished_groups().buffered[0], "failed")
        for step in range(5, 9):
            group = sampler.group_at(step - 5)
            finish_rollout(group.rollouts[0], version=step - 1)
            journal.drawn(group)
            await journal.landed(group)
            await journal.begin_step(step, [group])
            await journal.commit_step(StepReport(step=step, policy_version=step, digest="d"))
            journal.record_published(step, "d")
            journal.record_confirmed("engine", step, "d")
            with run.metrics.open("a") as file:
                file.write(json.dumps({"step": step}) + "\n")

    with closing(Journal.open(run.journal)) as journal:
        asyncio.run(write_on(journal))
        killed = RunFolder(shutil.copytree(run.path, tmp_path / "killed"))
    assert outcome(killed) == "fine"
    log = killed.path / "journal.db-wal"
    content = bytearray(log.read_bytes())
    content[len(content) // 2] ^= 1
    (killed.path / "journal.db-shm").unlink()
    log.write_bytes(content)
    assert outcome(killed) == "faults"


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ("UPDATE group_rows SET reward = 0.25 WHERE group_id = 'train:3'", "group train:3"),
        ("UPDATE group_rows SET cursor = 77 WHERE group_id = 'train:3'", "group train:3"),
        ("UPDATE rollout_rows SET reward = 9 WHERE rollout_id = 'train:3.1'", "rollout train:3.1"),
        ("UPDATE rollout_rows SET number = 9 WHERE rollout_id = 'train:3.1'", "rollout train:3.1"),
        ("UPDATE step_rows SET digest = 'ff' WHERE step = 2", "step 2"),
        ("UPDATE event_rows SET reason = 'none' WHERE number = 1", "event 1 of group train:0"),
        ("UPDATE weight_rows SET at = at + 1 WHERE version = 1", "weights 1, record 3"),
        (
            "UPDATE prompt_rows SET task = 'other' WHERE prompt_id = 'addition:3'",
            "prompt addition:3",
        ),
    ],
)
def test_a_changed_value_is_found_by_the_name_of_its_record(
    run: RunFolder, change: str, name: str
) -> None:
    with sqlite3.connect(run.journal) as database:
        assert database.execute(change).rowcount > 0
    with closing(Journal.open(run.journal, readonly=True)) as journal:
        assert name in journal.damaged()
    assert outcome(run) != "fine"


def test_a_move_does_not_hide_the_damage_of_a_row(tmp_path: Path) -> None:
    """A moved row's checksum came from the file, so it vouched for whatever the file had by then."""
    sampler = Sampler(make_prompts(2), task_name="t", prompt_repeat_k=2, seed=0)
    group = sampler.group_at(0)
    for rollout in group.rollouts:
        finish_rollout(rollout)

    async def land(journal: Journal) -> None:
        journal.drawn(group)
        await journal.landed(group)

    with closing(Journal.open(tmp_path / "journal.db", threaded=False)) as journal:
        asyncio.run(land(journal))
        with sqlite3.connect(tmp_path / "journal.db") as database:
            database.execute("UPDATE group_rows SET reward = 0.25")
        asyncio.run(journal.begin_step(1, [group]))
        assert journal.damaged() == ["group t:0"]


def test_a_run_is_not_gone_on_with_from_a_damaged_row(run: RunFolder) -> None:
    with sqlite3.connect(run.journal) as database:
        database.execute("UPDATE group_rows SET tries = 2 WHERE group_id = 'train:3'")
    with (
        closing(Journal.open(run.journal, readonly=True)) as journal,
        pytest.raises(JournalDamaged, match="group train:3 is not what was written"),
    ):
        journal.check_for_resume()


def test_a_changed_view_is_found(run: RunFolder) -> None:
    with sqlite3.connect(run.journal) as database:
        database.execute("DROP VIEW weights")
        database.execute(
            "CREATE VIEW weights AS SELECT kind, engine, version + 1 AS version, digest, at FROM weight_rows"
        )
    assert outcome(run) == "named"


def test_the_checksum_of_a_row_is_the_same_in_every_python() -> None:
    row = ("train:3", 7, -1, 2**40, 0.1, 1763188888.5, None, "", "\u00e9\u4e2d", b"\x00\xff")
    assert row_check(*row) == 1893532117
