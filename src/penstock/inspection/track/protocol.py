"""The protocol of trackers. A tracker shows metrics; its faults never stop a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from penstock.config import Config
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
