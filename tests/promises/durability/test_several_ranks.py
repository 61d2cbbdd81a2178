"""Runs of two trainer ranks: recomputed and forked bit for bit, with checkpoints beside training."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from pathlib import Path

import pytest

from penstock.config import CheckpointConfig, Config
from penstock.config.source import load_config
from penstock.errors import WorkerDied
from penstock.run.job import open_trainer
from penstock.store.checkpoint import CheckpointStore
from penstock.store.journal import Journal
from penstock.store.run_folder import RunFolder
from penstock.types import Batch
from stages.tiny_run import (
    STEPS,
    TINY,
    CrashServer,
    assert_no_worker_is_left,
    assert_sound,
    digests,
)

pytestmark = pytest.mark.usefixtures("warm_workers")

RANKS = ("launch.kind=local", "launch.num_consumers=2")


@pytest.fixture
def own(server: CrashServer, tmp_path: Path) -> CrashServer:
    """Return the server with a folder for this test alone."""
    return server.at(tmp_path)


@pytest.fixture
def killed(own: CrashServer) -> RunFolder:
    """Three steps are journalled, the newest checkpoint is of step 2."""
    words = (*RANKS, "checkpoint.every_steps=1", "checkpoint.keep=4")
    run, code = own.train("two-ranks", *words, point="after take", number=4)
    assert code == -9, own.output()
    assert_no_worker_is_left(run)
    assert len(digests(run)) == 3
    # the checkpoint of step 2 is complete; that of step 3 may or may not be
    shutil.rmtree(run.checkpoints / "step-3", ignore_errors=True)
    return run


@pytest.mark.slow
def test_two_ranks_are_recomputed_by_two_ranks(own: CrashServer) -> None:
    run, code = own.train("two-ranks", *RANKS)
    assert code == 0, own.output()
    assert_sound(run)
    check_replay(own, run, steps=STEPS)
    assert not own.folders_left()


@pytest.mark.slow
def test_ranks_that_were_killed_are_recomputed_by_as_many_and_by_one(
    own: CrashServer, killed: RunFolder
) -> None:
    """Change a setting, change the number of ranks, replay the whole run, and fork it."""
    before = digests(killed)
    assert own.run("resume", str(killed.path), "train.lr=2e-3") == 0, own.output()
    assert "redoing step 3 of 3 with the settings it had" in own.output()
    assert digests(killed)[:3] == before
    assert_sound(killed)
    words = ("launch.num_consumers=1", "launch.kind=inline", "train.steps=5")
    assert own.run("resume", str(killed.path), *words) == 0, own.output()
    assert_sound(killed, steps=5)
    assert [era.config.launch.num_consumers for era in killed.eras()] == [2, 2, 1]
    check_replay(own, killed, steps=5)
    assert own.run("audit", str(killed.path)) == 0, own.output()

    fork_words = ("--algo", "rloo", *RANKS, "run.name=two-ranks-fork")
    code = own.run("replay", str(killed.path), *fork_words, point="before step", number=3)
    assert code == -9, own.output()
    fork = RunFolder(own.folder / "two-ranks-fork")
    assert_no_worker_is_left(fork)
    assert own.run("resume", str(fork.path)) == 0, own.output()
    assert_sound(fork, steps=5)
    check_replay(own, fork, steps=5)
    assert not own.folders_left()


def check_replay(server: CrashServer, run: RunFolder, *, steps: int) -> None:
    assert server.run("replay", str(run.path)) == 0, server.output()
    output = server.output()
    assert sum(line.endswith("equal") for line in output.splitlines()) == steps
    assert_no_worker_is_left(run)


class BrokenStore(CheckpointStore):
    """Puts a folder where rank 1 writes (it fails), or a pipe where rank 0 does (it waits)."""

    kind = "folder"

    def _make_draft(self) -> Path:
        draft = super()._make_draft()
        if self.kind == "folder":
            (draft / "shards" / "rank-1-of-2.safetensors").mkdir(parents=True)
        else:
            os.mkfifo(draft / "config.toml")
        return draft


@pytest.mark.slow
def test_training_goes_on_beside_the_ranks_writing_and_a_kill_there_leaves_the_previous_one(
    server: CrashServer, tmp_path: Path
) -> None:
    run, code = server.train("batches")
    assert code == 0, server.output()
    source = Journal.open(run.journal, readonly=True)
    batches = [source.batch(step) for step in range(1, STEPS + 1)]
    source.close()
    notes: list[str] = []
    broken = BrokenStore(tmp_path / "checkpoints", CheckpointConfig(), report=notes.append)
    two = load_config(None, [*TINY, *RANKS]).config
    written = asyncio.run(write_with_two_ranks(two, batches, broken, notes, tmp_path / "logs"))
    newest = broken.newest()
    assert newest is not None
    assert newest.step == 1
    assert [path.name for path in broken.newest().path.parent.iterdir()] == ["step-1"]
    one = load_config(None, TINY).config
    assert asyncio.run(digest_after_load(one, newest.path, tmp_path / "logs")) == written


async def write_with_two_ranks(
    config: Config, batches: list[Batch], broken: BrokenStore, notes: list[str], logs: Path
) -> str:
    """Return the digest of step 1's checkpoint; those of steps 2 and 3 fail, and training continues."""
    async with open_trainer(config, logs) as workers:
        trainer = workers.trainer
        await trainer.train(batches[0])
        whole = CheckpointStore(broken._folder)
        written = await whole.save(trainer)
        assert broken.newest() == written
        await trainer.train(batches[1])
        await broken.begin(trainer)
        await broken.settle()
        assert "Is a directory" in notes[0]
        assert "step 1 stays valid" in notes[0]
        await trainer.train(batches[2])
        broken.kind = "pipe"
        await broken.begin(trainer)
        report = await trainer.train(batches[3])  # rank 0 cannot write during this time
        assert report.step == 4
        os.kill(trainer.supervised.worker._ranks[0].pid, signal.SIGKILL)  # type: ignore[union-attr]
        await broken.settle()
        with pytest.raises(WorkerDied, match="trainer-0: the worker ended unexpectedly"):
            await trainer.identity()
    return written.digest


async def digest_after_load(config: Config, checkpoint: Path, logs: Path) -> str:
    async with open_trainer(config, logs) as workers:
        trainer = workers.trainer
        return (await trainer.load(str(checkpoint)))[1]
