"""The smallest run that has everything: a few steps of a small policy, with rewards that differ."""

from __future__ import annotations

import copy
import json
import os
import random
import select
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from penstock.inspection.audit import audit_run
from penstock.store.checkpoint import CheckpointStore
from penstock.store.journal import Journal
from penstock.store.run_folder import RunFolder
from stages import nursery
from stages.rewards import ODD_REWARD

STEPS, GROUPS = 4, 2
SEED = int(os.environ.get("PENSTOCK_CRASH_SEED", "0"))
KILLED = -9
LEAVING_S = 60.0  # longest wait for workers whose driver is gone; they take a fraction of a second
# random weights, two layers, the demo's tokenizer: a run takes two thirds of the time of the demo's
SMALL_POLICY = Path(__file__).with_name("small_policy")
SUMS = Path(__file__).with_name("sums.jsonl")
TINY = [
    "launch.kind=inline",
    f"model.path={SMALL_POLICY}",
    f"train.steps={STEPS}",
    f"train.groups_per_step={GROUPS}",
    "train.lr=1e-3",
    "sampling.num_generations=2",
    "sampling.max_tokens=6",
    "engine.max_slots=8",
    "eval.tasks={}",
    "track.trackers=[]",
    "checkpoint.every_steps=2",
    f"tasks.train.data={SUMS}",
    f"tasks.train.rewards=[{{type='{ODD_REWARD}'}}]",
]


class CrashServer:
    """Client of the program `crash_server.py`."""

    def __init__(self, folder: Path) -> None:
        self._place(folder)
        single = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
        environment = {
            **os.environ,
            **dict.fromkeys(single, "1"),
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }
        self._process = nursery.open_program(
            "stages.crash_server:serve", directory=folder, environment=environment
        )
        assert self._process.stdout is not None
        self.nursery = Path(self._process.stdout.readline().strip())
        assert self.nursery.is_socket(), "the crash server does not start"

    def _place(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "output.log"
        self._folders = folder / "folders.txt"

    def at(self, folder: Path) -> CrashServer:
        """Return a client of the same process with a folder of its own for runs."""
        other = copy.copy(self)
        other._place(folder)
        return other

    def run(
        self,
        *arguments: str,
        point: str = "",
        number: int = 0,
        fault: str = "SIGKILL",
        then: Sequence[tuple[str, int, str]] = (),
        directory: Path | None = None,
    ) -> int:
        """Return the exit code of `penstock ARGUMENTS` (-9: killed); `output()` has its output.

        The fault (a signal, the name of an OSError, or `sh COMMAND`) happens at the n-th passing of the point;
        `then` lists further ones.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.log.unlink(missing_ok=True)
        counts = self.folder / "counts.json"
        counts.unlink(missing_ok=True)
        request = {
            "arguments": arguments,
            "log": str(self.log),
            "faults": [*([(point, number, fault)] if point else []), *then],
            "counts": str(counts),
            "folders": str(self._folders),
            "directory": str(directory or self.folder),
        }
        self._process.stdin.write(json.dumps(request) + "\n")
        answer = self._process.stdout.readline()
        assert answer, "the crash server has died"
        if point and fault != "SIGKILL" and counts.exists():
            assert self.counts().get(point), f"no part of the driver passed {point!r}"
        return int(json.loads(answer))

    def train(self, name: str, *overrides: str, **death: Any) -> tuple[RunFolder, int]:
        assert not (self.folder / name).exists(), f"another test has a run with the name {name}"
        words = ["train", *TINY, f"run.dir={self.folder}", f"run.name={name}", *overrides]
        return RunFolder(self.folder / name), self.run(*words, **death)

    def output(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def counts(self) -> dict[str, int]:
        """Return how often the last command that ended by itself passed each point."""
        return json.loads((self.folder / "counts.json").read_text())

    def folders_left(self) -> list[str]:
        """Return the temporary folders, in shared memory too, that drivers made and nobody removed."""
        made = self._folders.read_text().splitlines() if self._folders.exists() else []
        return [path for path in made if Path(path).exists()]

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def death(choice: random.Random, counts: dict[str, int]) -> dict[str, str | int]:
    """Return a random boundary, and at which of its passings to die; all are equally likely."""
    point = choice.choice(sorted(counts))
    return {"point": point, "number": choice.randint(1, counts[point])}


def digests(run: RunFolder) -> list[str]:
    journal = Journal.open(run.journal, readonly=True)
    try:
        return [report.digest for report in journal.steps()]
    finally:
        journal.close()


def assert_sound(run: RunFolder, *, steps: int = STEPS, groups: int = GROUPS) -> None:
    """Assert that each step is complete and done once, no group is lost, the last step is saved."""
    journal = Journal.open(run.journal, readonly=True)
    try:
        batches = journal.query("SELECT step, group_ids FROM steps WHERE committed ORDER BY step")
        balance = sum(map(Counter, journal.counts().values()), Counter())  # of all tasks
        journal.check_file()
    finally:
        journal.close()
    assert [step for step, _ in batches] == list(range(1, steps + 1))
    trained = [group for _, ids in batches for group in json.loads(ids)]
    assert len(trained) == len(set(trained)) == steps * groups
    assert balance["trained"] == len(trained)
    assert balance["drawn"] == sum(n for state, n in balance.items() if state != "drawn")
    assert "taken" not in balance
    lines = [json.loads(line)["step"] for line in run.metrics.read_text().splitlines()]
    assert lines == list(range(1, steps + 1))
    newest = CheckpointStore(run.checkpoints).newest()
    assert newest is not None
    assert (newest.step, newest.digest) == (steps, digests(run)[-1])
    assert not list(run.checkpoints.glob(".draft*"))


def assert_went_on(server: CrashServer, run: RunFolder, expected: list[str] | None = None) -> None:
    """Assert that a disturbed run is whole, and has the digests of an undisturbed one, if given."""
    assert "Traceback" not in server.output()
    assert_no_worker_is_left(run)
    assert_sound(run)
    assert audit_run(run, console=Console(quiet=True)) == 0
    assert expected is None or digests(run) == expected


def assert_no_worker_is_left(run: RunFolder) -> None:
    """Wait until the workers and actors of a dead driver have ended by themselves."""
    until = time.monotonic() + LEAVING_S
    for pid in workers_of(run):
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        select.select([handle], [], [], max(0.0, until - time.monotonic()))
        os.close(handle)
    assert not workers_of(run)


def workers_of(run: RunFolder) -> list[int]:
    """Return the processes that write to a log of the run."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            output = os.readlink(process / "fd" / "1")
        except OSError:  # it has just ended
            continue
        if output.startswith(f"{run.logs}/"):
            found.append(int(process.name))
    return found
