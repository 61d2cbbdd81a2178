"""A run whose writes are recorded: trained, then resumed with another learning rate, in one process.

Run as `python -m stages.recorded_run ROOT POLICY` under `write_recorder.c`. What the run has promised is
written to ROOT/marks at that moment, and so stands in the record between the writes.
"""

from __future__ import annotations

import os
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager

import torch

from penstock.cli import main
from penstock.store.checkpoint import CheckpointStore
from penstock.store.journal import Journal, schema
from penstock.types import StepReport
from stages.tiny_run import TINY

NAME, STEPS, MORE_STEPS = "run", 8, 10


def write_marks(path: str) -> None:
    """Mark each step that was committed and each checkpoint that was written."""
    marks = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    commit, seal = Journal.commit_step, CheckpointStore._seal

    async def commit_step(journal: Journal, report: StepReport) -> None:
        await commit(journal, report)
        os.write(marks, f"committed {report.step}\n".encode())

    def _seal(*arguments):
        written = seal(*arguments)
        os.write(marks, f"saved {written.step}\n".encode())
        return written

    Journal.commit_step, CheckpointStore._seal = commit_step, _seal  # type: ignore[method-assign]


@contextmanager
def log_merged_often() -> Iterator[None]:
    """Let SQLite move its log into the file after every 40 pages, as a long run does after 1,000."""
    connect = schema._link

    def connected(*arguments):
        database = connect(*arguments)
        database.execute("PRAGMA wal_autocheckpoint = 40")
        return database

    schema._link = connected
    yield
    schema._link = connect


def command(*words: str) -> None:
    sys.argv = ["penstock", *words]
    try:
        main()
    except SystemExit as end:
        if end.code:
            raise


if __name__ == "__main__":
    root, policy = sys.argv[1:]
    torch.set_num_threads(1)
    write_marks(f"{root}/marks")
    settings = [f"run.dir={root}/runs", f"run.name={NAME}", f"model.path={policy}"]
    settings += [f"train.steps={STEPS}", "train.groups_per_step=8", "produce.strategy=async"]
    with log_merged_often():
        command("train", *TINY, *settings)
    with closing(sqlite3.connect(f"{root}/runs/{NAME}/journal.db")) as look:
        look.execute("SELECT * FROM steps").fetchall()  # the last to close it removes SQLite's log
    changes = [f"train.steps={MORE_STEPS}", "train.lr=2e-3"]
    command("resume", f"{root}/runs/{NAME}", *changes)
