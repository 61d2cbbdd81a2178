"""Trackers: where the metrics and notes of a run go, besides the files that every run writes.

A tracker shows metrics; its faults never stop a run. A package that a tracker needs is imported only
when the config names the tracker.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from penstock.config import Config
from penstock.config.plugins import load
from penstock.errors import UserError
from penstock.files import say
from penstock.inspection.track import TRACKERS
from penstock.inspection.track.logs import JsonlTracker, NoteLog
from penstock.types import Batch, Finding


@dataclass(slots=True, frozen=True, kw_only=True)
class RunInfo:
    """What a tracker receives when it is created."""

    config: Config
    folder: Path
    name: str
    total_steps: int
    first_step: int  # 0 for a new run, the last finished step after a resume
    live: Callable[[], str]  # returns the open waits, then a line per task
    findings: Callable[[], Sequence[Finding]] = tuple  # returns what is wrong with the run now
    batch: Callable[[], Batch | None] = lambda: None  # returns the newest batch that was trained
    next_batch: Callable[[], tuple[int, int]] = lambda: (0, 0)  # returns its groups: ready, wanted


class Tracker(Protocol):
    """Consumes metrics and notes."""

    def log_step(self, step: int, metrics: dict[str, float]) -> None:
        """Show the metrics of one update."""

    def log_eval(self, step: int, metrics: dict[str, float]) -> None:
        """Show the metrics of one evaluation."""

    def note(self, text: str) -> None:
        """Show a line that the user should read."""

    def close(self) -> None:
        """Release files and connections; nothing is logged afterwards."""


class Fanout:
    """Hands each metric to every tracker; a tracker that fails is dropped with a note."""

    def __init__(self, trackers: dict[str, Tracker]) -> None:
        self._trackers = trackers

    @classmethod
    def from_info(cls, info: RunInfo) -> Fanout:
        """Make metrics.jsonl, logs/run.log and the config's trackers; note one that cannot start."""
        fanout = cls({})
        fanout._trackers["jsonl"] = JsonlTracker(info.folder / "metrics.jsonl", fanout.note)
        fanout._trackers["log"] = NoteLog(info.folder / "logs" / "run.log")
        for name in info.config.track.trackers:
            make = load("track.trackers", name, TRACKERS)
            try:
                fanout._trackers[name] = make(info)
            except Exception as error:  # tracker fan-out: never fatal
                fanout.note(f"tracker {name} could not start: {type(error).__name__}: {error}")
        return fanout

    def log_step(self, step: int, metrics: dict[str, float]) -> None:
        self._each(lambda tracker: tracker.log_step(step, metrics))

    def log_eval(self, step: int, metrics: dict[str, float]) -> None:
        self._each(lambda tracker: tracker.log_eval(step, metrics))

    def note(self, text: str) -> None:
        self._each(lambda tracker: tracker.note(text))
        if "console" not in self._trackers:
            say(text, error=True)

    def close(self) -> None:
        self._each(lambda tracker: tracker.close())

    def _each(self, act: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                act(tracker)
            except Exception as error:  # tracker fan-out: never fatal
                del self._trackers[name]
                self.note(f"tracker {name} failed and is off: {type(error).__name__}: {error}")


class TensorBoardTracker:
    """TensorBoard event files in RUN/tensorboard: every metric as a scalar."""

    def __init__(self, info: RunInfo) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UserError(
                "track.trackers: got 'tensorboard', which is not installed; "
                "install it with: pip install 'penstock[tensorboard]'"
            ) from None
        self._writer = SummaryWriter(
            str(info.folder / "tensorboard"), purge_step=info.first_step + 1
        )

    def log_step(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def log_eval(self, step: int, metrics: dict[str, float]) -> None:
        self.log_step(step, metrics)

    def note(self, text: str) -> None:
        """Leave notes out."""

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
    """Sends every metric to one W&B run; WANDB_MODE=offline works without a network.

    The run's id is kept in RUN/wandb-id, so that a resumed run continues the same W&B run."""

    def __init__(self, info: RunInfo) -> None:
        try:
            import wandb
        except ImportError:
            raise UserError(
                "track.trackers: got 'wandb', which is not installed; "
                "install it with: pip install 'penstock[wandb]'"
            ) from None
        id_file = info.folder / "wandb-id"
        if not id_file.exists():
            id_file.write_text(uuid.uuid4().hex[:12])
        arguments = {
            "project": os.environ.get("WANDB_PROJECT", "penstock"),
            "name": info.name,
            **info.config.track.wandb,
            "id": id_file.read_text(),
            "resume": "allow",
            "dir": str(info.folder),
            "config": info.config.model_dump(),
        }
        try:
            self._run = wandb.init(**arguments)
        except TypeError as error:
            raise UserError(
                f"track.wandb: got {info.config.track.wandb}, allowed: arguments of wandb.init ({error})"
            ) from None
        # An evaluation may end after the next step; W&B's own step only goes up.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log_step(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log({**metrics, "step": step})

    def log_eval(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log({**metrics, "step": step})

    def note(self, text: str) -> None:
        """Leave notes out."""

    def close(self) -> None:
        self._run.finish()
