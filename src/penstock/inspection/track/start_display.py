"""What a starting run does, and for how long: a line on a terminal that goes away when the panel comes.

Keeps the stages of every worker, for logs/run.log.
"""

from __future__ import annotations

import time
from itertools import pairwise
from typing import ClassVar, Self

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from penstock import files

READY = "ready"


class StartDisplay:
    """Shows one stage at a time, or those of the workers; nothing where stderr is no terminal."""

    _shown: ClassVar[StartDisplay | None] = None

    def __init__(self, stage: str) -> None:
        console = files.console(stderr=True)
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", style="dim", markup=False),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self._line = self._progress.add_task(stage, total=None)
        self._stages: dict[str, list[tuple[float, str]]] = {}  # of each worker: since when, what

    def __enter__(self) -> Self:
        self._progress.start()
        StartDisplay._shown = self
        return self

    def __exit__(self, *_: object) -> None:
        StartDisplay._shown = None
        self._progress.stop()

    def tell(self, stage: str) -> None:
        self._progress.update(self._line, description=stage)

    @classmethod
    def worker_stage(cls, worker: str, stage: str, since: float) -> None:
        """Show and keep what a worker does since a moment (`time.time()`), if a start is shown."""
        if cls._shown is not None:
            cls._shown._stages.setdefault(worker, []).append((since, stage))
            cls._shown.tell(cls._shown._workers_line())

    def _workers_line(self) -> str:
        """Return what the workers do now; workers that do the same are named together."""
        by_stage: dict[str, list[str]] = {}
        for worker, stages in self._stages.items():
            if stages[-1][1] != READY:
                by_stage.setdefault(stages[-1][1], []).append(worker)
        parts = (f"{_names(workers)}: {stage}" for stage, workers in by_stage.items())
        return "; ".join(parts) or "all workers are ready"

    def report(self) -> list[str]:
        """Return a line for each worker: its stages, the seconds of each, and of all."""
        lines = []
        for worker, stages in self._stages.items():
            spent = (f"{what} {end - at:.2f} s" for (at, what), (end, _) in pairwise(stages))
            total = stages[-1][0] - stages[0][0]
            first = stages[0][0]
            began = time.strftime("%H:%M:%S", time.localtime(first)) + f"{first % 1:.2f}"[1:]
            lines.append(
                f"start of {worker}: {', '.join(spent)}; {total:.2f} s in all since {began}"
            )
        return lines

    @classmethod
    def console(cls) -> Console:
        """Return the console for lines of a run: while a start is shown, they appear above it."""
        return cls._shown._progress.console if cls._shown else files.console(stderr=True)


def _names(workers: list[str]) -> str:
    more = f" and {len(workers) - 2} more" if len(workers) > 2 else ""
    return ", ".join(workers[:2]) + more
