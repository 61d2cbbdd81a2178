"""A small demo run in other processes, for tests that kill parts of it, and checks of its result."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from penstock.config import Config
from penstock.config.source import load_config
from penstock.run.job import Job, open_job
from penstock.run.loop import Loop
from penstock.run.recover import begin, keep_trainer_alive
from penstock.store.journal import Journal
from penstock.store.run_folder import RunFolder, create
from stages.rewards import ODD_REWARD
from stages.tiny_run import SUMS

STEPS, GROUPS = 3, 4
SMALL = [
    f"train.steps={STEPS}",
    f"train.groups_per_step={GROUPS}",
    "train.lr=1e-3",
    "sampling.num_generations=4",
    "sampling.max_tokens=8",
    "engine.max_slots=16",
    "eval.tasks={}",
    "track.trackers=[]",
    "launch.restart_backoff_s=0",
    f"tasks.train.data={SUMS}",
    f"tasks.train.rewards=[{{type='{ODD_REWARD}'}}]",
]
Disturb = Callable[[Job, int], Awaitable[None]]


def config_of(folder: Path, name: str, *overrides: str) -> Config:
    words = [*SMALL, f"run.dir={folder}", f"run.name={name}", *overrides]
    return load_config(None, words).config


def run(config: Config, disturb: Disturb | None = None) -> tuple[RunFolder, list[str]]:
    """Train to the end, calling `disturb(job, step)` before the start (0) and each step; return the folder and the notes."""
    folder = create(config)
    notes: list[str] = []

    async def train() -> None:
        async with open_job(config, folder) as job:
            job.notes.listen(notes.append)
            notes.append(job.workers.description)
            async with job.watched():
                keep_trainer_alive(job)
                if disturb is not None:
                    await disturb(job, 0)
                await begin(job)
                if disturb is not None:
                    take = job.source.take_batch

                    async def disturbed(step: int):
                        await disturb(job, step)
                        return await take(step)

                    job.source.take_batch = disturbed  # type: ignore[method-assign]
                await Loop(job).run()
                await job.checkpoints.save(job.trainer)

    asyncio.run(train())
    return folder, notes


def when_told(job: Job, words: str, act: Callable[[], object]) -> None:
    """Call `act` for each note to the user that contains these words."""

    def note(text: str) -> None:
        if words in text:
            act()

    job.notes.listen(note)


def digests(folder: RunFolder) -> list[str]:
    journal = Journal.open(folder.journal, readonly=True)
    try:
        return [report.digest for report in journal.steps()]
    finally:
        journal.close()


def weights(folder: RunFolder) -> np.ndarray:
    """Return the weights of the last step in one row."""
    named = load_file(folder.checkpoints / f"step-{STEPS}" / "model" / "model.safetensors")
    return np.concatenate([named[name].ravel() for name in sorted(named)])


def assert_balanced(folder: RunFolder) -> None:
    """Assert that each step is complete and done once, and each drawn group is counted once."""
    from penstock.inspection.audit import audit_run

    journal = Journal.open(folder.journal, readonly=True)
    try:
        batches = journal.query("SELECT step, group_ids FROM steps WHERE committed ORDER BY step")
    finally:
        journal.close()
    assert [step for step, _ in batches] == list(range(1, STEPS + 1))
    trained = [group for _, ids in batches for group in json.loads(ids)]
    assert len(trained) == len(set(trained)) == STEPS * GROUPS
    assert audit_run(folder, as_json=True) == 0


def kill(job: Job, name: str) -> None:
    worker = job.workers.supervised[name].worker
    assert worker is not None
    ranks = getattr(worker, "_ranks", [worker])
    os.kill(ranks[-1].pid, signal.SIGKILL)
