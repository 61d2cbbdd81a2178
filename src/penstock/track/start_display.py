"""What a starting run does, and for how long: a line on a terminal that goes away when the panel comes."""

from __future__ import annotations

from typing import ClassVar, Self

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from penstock import terminal


class StartDisplay:
    """Shows one stage at a time; nothing where stderr is no terminal."""

    _shown: ClassVar[StartDisplay | None] = None

    def __init__(self, stage: str) -> None:
        console = terminal.console(stderr=True)
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", style="dim", markup=False),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self._line = self._progress.add_task(stage, total=None)

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
    def console(cls) -> Console:
        """Return the console for lines of a run: while a start is shown, they appear above it."""
        return cls._shown._progress.console if cls._shown else terminal.console(stderr=True)
