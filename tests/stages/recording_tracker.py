"""A tracker that keeps what it got, and what the live panel showed at each step, for inline runs."""

from __future__ import annotations

import io
from typing import ClassVar

from rich.console import Console

from penstock.inspection.track.console import ConsoleTracker
from penstock.inspection.track.logs import RunInfo

RECORDER = "stages.recording_tracker:Recorder"  # as a config names it


class Recorder:
    """A tracker that keeps what it got, and what the live panel showed at each step."""

    steps: ClassVar[list[dict[str, float]]] = []
    panels: ClassVar[list[str]] = []

    def __init__(self, info: RunInfo) -> None:
        self.steps.clear()
        self.panels.clear()
        self._out = io.StringIO()
        console = Console(file=self._out, width=300, force_terminal=True)
        self._panel = ConsoleTracker(info, console)

    def log_step(self, step: int, metrics: dict[str, float]) -> None:
        self.steps.append(dict(metrics))
        self._panel.log_step(step, metrics)
        plain = Console(file=io.StringIO(), width=300, record=True)
        plain.print(self._panel._render())
        self.panels.append(plain.export_text())

    def log_eval(self, step: int, metrics: dict[str, float]) -> None: ...

    def note(self, text: str) -> None: ...

    def close(self) -> None:
        self._panel.close()
