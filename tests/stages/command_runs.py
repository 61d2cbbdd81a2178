"""`penstock train` in this process, as a user calls it, and what a run of it left."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock import cli
from penstock.store.journal import Journal
from penstock.store.run_folder import RunFolder
from stages.tiny_run import TINY


@dataclass(slots=True)
class CommandRun:
    """One finished run."""

    folder: RunFolder
    code: int
    told: str  # what it wrote to the terminal

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.folder.metrics.read_text().splitlines()]

    def total(self, name: str) -> float:
        """Return the sum of a metric over all steps."""
        return sum(line.get(name, 0.0) for line in self.metrics)

    def query(self, sql: str) -> list[Any]:
        with self.journal() as journal:
            return journal.query(sql)

    @contextmanager
    def journal(self) -> Iterator[Journal]:
        journal = Journal.open(self.folder.journal, readonly=True)
        try:
            yield journal
        finally:
            journal.close()


def penstock(*words: str) -> int:
    """Run one command; return its exit code."""
    before, sys.argv = sys.argv, ["penstock", *words]
    try:
        cli.main()
    except SystemExit as left:
        return int(left.code or 0)
    finally:
        sys.argv = before
    raise AssertionError("penstock returned without an exit code")


def train(folder: Path, name: str, *overrides: str) -> CommandRun:
    """Train the smallest run with these settings on top."""
    words = [*TINY, f"run.dir={folder}", f"run.name={name}", *overrides]
    told = io.StringIO()
    with redirect_stdout(told), redirect_stderr(told):
        code = penstock("train", *words)
    return CommandRun(RunFolder(folder / name), code, told.getvalue())
