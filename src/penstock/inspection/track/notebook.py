"""The display of a run: a plot that grows in a notebook's cell; elsewhere the console's panel.

The plot shows the reward of each step as a line and the accuracy of each evaluation as dots (`plot.py`). It
begins with the steps that a resumed run has behind it.
"""

from __future__ import annotations

import html
import json
import sys
import time
from typing import Any

from penstock.files import say
from penstock.inspection.track.console import ConsoleTracker
from penstock.inspection.track.plot import Point, draw_curves
from penstock.inspection.track.protocol import RunInfo, Tracker

_INTERVAL_S = 0.5  # least time between two drawings


def in_notebook() -> bool:
    """Return whether this process is a notebook's kernel, which can show pictures."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None


def make_display(info: RunInfo) -> Tracker:
    """Return the display that this process can show."""
    return NotebookTracker(info) if in_notebook() else ConsoleTracker(info)


class NotebookTracker:
    """Consumes metrics, draws them in the output of the cell that runs."""

    def __init__(self, info: RunInfo) -> None:
        from IPython.display import HTML, display

        self._html: Any = HTML
        self._info = info
        self._reward: list[Point] = _earlier(info)
        self._held_out: dict[str, list[Point]] = {}
        self._drawn_at = 0.0
        self._handle: Any = display(HTML(self._page()), display_id=True)

    def log_step(self, step: int, metrics: dict[str, float]) -> None:
        if "reward/mean" in metrics:
            self._reward.append((step, metrics["reward/mean"]))
        if step == self._info.total_steps or time.monotonic() - self._drawn_at > _INTERVAL_S:
            self._draw()

    def log_eval(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            _, task, measure = name.split("/", 2)
            judged = f"eval/{task}/accuracy" in metrics
            if measure == ("accuracy" if judged else "reward"):
                self._held_out.setdefault(f"{task} {measure}", []).append((step, value))
        self._draw()

    def note(self, text: str) -> None:
        say(text)

    def close(self) -> None:
        self._draw()

    def _draw(self) -> None:
        self._drawn_at = time.monotonic()
        self._handle.update(self._html(self._page()))

    def _page(self) -> str:
        step = self._reward[-1][0] if self._reward else self._info.first_step
        title = f"{self._info.name}: step {step} of {self._info.total_steps}"
        if self._reward:
            title += f", reward {self._reward[0][1]:.3f} → {self._reward[-1][1]:.3f}"
        curves = {"reward": self._reward, **self._held_out}
        return f"<p>{html.escape(title)}</p>{draw_curves(curves, self._info.total_steps)}"


def _earlier(info: RunInfo) -> list[Point]:
    """Return the rewards of the steps before a resume."""
    path = info.folder / "metrics.jsonl"
    if not info.first_step or not path.is_file():
        return []
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    return [(row["step"], row["reward/mean"]) for row in rows if row.get("reward/mean") is not None]
