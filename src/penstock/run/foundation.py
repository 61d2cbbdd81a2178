"""What a run has before its workers: where notes, waits and records go, and what the workers tell of.

Parts are built in one order: notes, waits, journal, workers, batch source, tracker, loop. Each gets what it
needs when it is built, so nothing is set from outside later (tests/test_wiring.py).
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from penstock.inspection.track.logs import Notes
from penstock.rollout import ProducerSnapshot
from penstock.store.journal import Journal
from penstock.store.run_folder import RunFolder
from penstock.types import Batch
from penstock.waits import WaitKind, Waits
from penstock.workers.rpc import append_to_log
from penstock.workers.supervise.supervised import SupervisionCallbacks


class BatchSource(Protocol):
    """Where the batches of a run come from: its producer, or the journal of another run.

    The methods that return something here are those of a source that generates nothing.
    """

    async def restore(self, journal: Journal) -> None:
        """Continue from what the run's own journal holds."""

    async def run(self) -> None:
        """Prepare batches until cancelled."""

    async def take_batch(self, step: int) -> Batch:
        """Wait for the batch of a step; it is journalled when this returns."""

    def weights_updated(self, version: int) -> None:
        """Note that the engines confirmed these weights."""
        return

    async def pause(self, *, abort: bool) -> float:
        """Generate nothing until `resume`; abort what is running or wait for it; return the seconds."""
        return 0.0

    def resume(self) -> None:
        """Generate again; do nothing if it was not paused."""
        return

    def read_metrics(self) -> dict[str, float]:
        """The metrics of the producing side since the last call."""
        return {"time/producer_wait_s": 0.0}

    def snapshot(self) -> ProducerSnapshot:
        """The counts of groups by state."""
        return ProducerSnapshot()


class Status:
    """What a run does now, for those who show it."""

    def __init__(self, source: BatchSource, waits: Waits) -> None:
        self._source, self._waits = source, waits
        self.activity = "starting"  # of the loop
        self.newest_batch: Batch | None = None  # that was trained

    def doing(self, activity: str) -> None:
        self.activity = activity

    def trained(self, batch: Batch) -> None:
        self.newest_batch = batch

    def live(self) -> str:
        """What the loop does, what the producing side waits for, then the group counts of each task."""
        now = self._waits.clock()
        waiting = [
            f"{wait.lane} waits for {wait.detail} ({now - wait.since:.1f} s)"
            for wait in self._waits.open.values()
            if wait.what is WaitKind.WAIT and wait.lane != "loop" and now - wait.since >= 0.1
        ]
        first = "; ".join([self.activity, *waiting])
        return "\n".join([first, *map(str, self._source.snapshot().tasks)])

    def last_failure(self) -> str:
        """Why a group failed, the newest reason of the first task that has one."""
        tasks = self._source.snapshot().tasks
        return next((task.last_error for task in tasks if task.last_error), "")

    def next_batch(self) -> tuple[int, int]:
        """How many groups of the next batch are there, and how many it needs."""
        now = self._source.snapshot()
        return now.batch_ready, now.batch_size


@dataclass(slots=True, frozen=True, kw_only=True)
class Foundation:
    """What exists before the workers of a run, and outlives them."""

    notes: Notes
    waits: Waits
    journal: Journal
    events: SupervisionCallbacks  # what workers tell of; ends in the other three


def lay_foundation(folder: RunFolder, notes: Notes, closing: AsyncExitStack) -> Foundation:
    """Open the run's journal, and join it to what workers will tell."""
    waits = Waits()
    journal = Journal.open(folder.journal, waits=waits)
    closing.callback(journal.close)
    events = SupervisionCallbacks(
        waits=waits,
        note=notes.add,
        log=partial(append_to_log, folder.logs),
        confirmed=partial(journal.record_confirmed, "engine"),
        replaced=journal.record_published,
    )
    return Foundation(notes=notes, waits=waits, journal=journal, events=events)
