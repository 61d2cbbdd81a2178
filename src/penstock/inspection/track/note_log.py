"""logs/run.log: the lines that the user was told, with their times; always written."""

from __future__ import annotations

import time
from pathlib import Path

from penstock.files import visible
from penstock.inspection.track.line_file import LineFile


class NoteLog:
    """See `Tracker`. Keeps notes, no metrics."""

    def __init__(self, path: Path) -> None:
        self._file = LineFile(path)

    def log_step(self, step: int, metrics: dict[str, float]) -> None:
        """Leave metrics out."""

    def log_eval(self, step: int, metrics: dict[str, float]) -> None:
        """Leave metrics out."""

    def note(self, text: str) -> None:
        self._file.append([f"{time.strftime('%Y-%m-%d %H:%M:%S')} {visible(text)}"])

    def close(self) -> None:
        self._file.tell_loss()
