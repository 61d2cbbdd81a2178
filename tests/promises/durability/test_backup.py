"""`penstock backup` of a run that is under way is a run: audited, replayed and continued."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from penstock import cli
from penstock.inspection import backup
from penstock.inspection.backup import back_up
from penstock.run.job import Job
from penstock.store.checkpoint import Checkpoint
from penstock.store.journal import Journal
from penstock.store.run_folder import RunFolder
from stages.disturbed_run import GROUPS, STEPS, assert_balanced, config_of, digests, run
from stages.made_run import make_run
from stages.tiny_run import CrashServer, assert_sound

SYNC = ("produce.strategy=sync", "launch.kind=inline", "checkpoint.every_steps=1")


@pytest.mark.slow
def test_a_live_run_is_copied_and_the_copy_goes_on_to_the_same_end(
    server: CrashServer, tmp_path: Path
) -> None:
    copy = RunFolder(tmp_path / "copies" / "copy")

    async def back_up_in_step_3(job: Job, step: int) -> None:
        if step == 3:  # the journal is open, and its newest records are in the write-ahead log
            await job.checkpoints.settle()
            words = ["-m", "penstock.cli", "backup", str(job.folder.path), str(copy.path)]
            process = await asyncio.create_subprocess_exec(
                sys.executable, *words, stdout=asyncio.subprocess.PIPE
            )
            output, _ = await process.communicate()
            assert process.returncode == 0
            assert b": 2 steps, the checkpoint of step 2; continue it with" in output

    original, _ = run(config_of(tmp_path, "live", *SYNC), back_up_in_step_3)
    assert_balanced(original)
    assert digests(copy) == digests(original)[:2]
    assert not list(copy.path.parent.glob(".*"))
    assert server.run("audit", str(copy.path)) == 0, server.output()
    assert server.run("replay", str(copy.path)) == 0, server.output()
    shutil.rmtree(original.path)  # the copy stands on its own
    assert server.run("resume", str(copy.path)) == 0, server.output()
    assert_sound(copy, steps=STEPS, groups=GROUPS)


@pytest.fixture
def writer(tmp_path: Path) -> subprocess.Popen[str]:
    """Return a process that writes to a journal without a pause."""
    return subprocess.Popen(
        [sys.executable, "-m", "stages.journal_writer", str(tmp_path / "journal.db")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )


def test_each_copy_of_a_journal_that_is_written_is_of_one_moment(
    writer: subprocess.Popen[str], tmp_path: Path
) -> None:
    assert writer.stdout is not None
    for number in range(5):
        told = int(writer.stdout.readline())
        with closing(Journal.open(tmp_path / "journal.db", readonly=True)) as journal:
            journal.copy_to(tmp_path / f"copy-{number}.db")
        with closing(Journal.open(tmp_path / f"copy-{number}.db", readonly=True)) as copy:
            copy.check_file()
            assert copy.damaged() == []
            committed = copy.last_committed_step()
            assert committed >= told
            begun = committed + (copy.pending_step() is not None)
            assert copy.taken() == {"t": 4 * begun}
    more, _ = writer.communicate("")
    assert writer.returncode == 0
    with closing(Journal.open(tmp_path / "journal.db", readonly=True)) as journal:
        assert journal.last_committed_step() == int(more.splitlines()[-1])


def test_a_checkpoint_that_falls_behind_the_removed_steps_is_copied_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_run(tmp_path / "one", steps=4)
    journal = Journal.open(folder.journal)
    journal.prune_payloads(3, keep_text=True)
    journal.close()
    found = iter([1, 3])  # the live run has made and removed checkpoints meanwhile

    def copy_checkpoint(_: RunFolder, target: Path) -> Checkpoint:
        step = next(found)
        (target / f"step-{step}").mkdir(parents=True)
        return Checkpoint(target / f"step-{step}", step, "")

    monkeypatch.setattr(backup, "_copy_checkpoint", copy_checkpoint)
    assert "4 steps, the checkpoint of step 3" in back_up(folder, tmp_path / "copy")
    assert [path.name for path in (tmp_path / "copy" / "checkpoints").iterdir()] == ["step-3"]


def test_a_folder_that_exists_is_refused_and_a_failure_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_run(tmp_path / "runs" / "one", steps=2)
    (tmp_path / "taken").mkdir()
    words = ["penstock", "backup", str(folder.path), str(tmp_path / "taken")]
    monkeypatch.setattr("sys.argv", words)
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2
    assert "which exists already, allowed: a new folder" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("sys.argv", [*words[:-1], str(tmp_path / "file" / "copy")])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 1
    assert "cannot be written" in capsys.readouterr().err


def test_the_name_of_a_copy_is_made_from_the_run_and_the_time(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "runs" / "one", steps=2)
    text = back_up(folder)
    (copy,) = folder.path.parent.glob("one-backup-*")
    assert text.startswith(f"{copy}: 2 steps, no checkpoint;")
    assert {path.name for path in copy.iterdir()} == {
        *("config.toml", "eval", "journal.db", "metrics.jsonl", "rollouts.jsonl")
    }
