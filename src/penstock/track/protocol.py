"""What every tracker does. A tracker shows; it never decides, and its faults never stop a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from penstock.config import Config


@dataclass(slots=True, frozen=True, kw_only=True)
class RunInfo:
    """What a tracker is told when it is made."""

    config: Config
    folder: Path
    name: str
    total_steps: int
    first_step: int  # 0 for a new run, the last finished step after a resume
    live: Callable[[], str]  # who waits for what now, then a line per task


class Tracker(Protocol):
    """Consumes figures."""

    def log_step(self, step: int, metrics: dict[str, float]) -> None:
        """One update was done."""

    def log_eval(self, step: int, metrics: dict[str, float]) -> None:
        """One evaluation was done."""

    def note(self, text: str) -> None:
        """Something a person should know."""

    def close(self) -> None:
        """No more will come."""
