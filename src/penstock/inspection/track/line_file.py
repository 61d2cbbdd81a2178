"""A file of lines for people and plots: metrics, samples, the timeline.

The journal has the truth, so a full or failing disk under such a file does not stop the run. The first
failure is told, lost lines are counted, and every later write tries again. A line is whole or absent.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from penstock.files import say

Note = Callable[[str], None]


def print_note(text: str) -> None:
    say(text, error=True)


class LineFile:
    """Appends lines; tells the user once when it cannot, and how many lines are missing."""

    def __init__(self, path: Path, note: Note = print_note) -> None:
        self._path, self._note = path, note
        self._lost = 0  # lines since the last write that worked

    def append(self, lines: Sequence[str]) -> None:
        try:
            self._write("".join(f"{line}\n" for line in lines).encode())
        except OSError as error:
            if not self._lost:
                self._note(f"{self._path}: cannot write: {error.strerror}; the run continues")
            self._lost += len(lines)
        else:
            self.tell_loss()

    def tell_loss(self) -> None:
        """Tell how many lines are missing, if any are that were not told of."""
        if self._lost:
            self._note(f"{self._path}: {self._lost} lines could not be written")
        self._lost = 0

    def _write(self, data: bytes) -> None:
        if not os.path.isdir(self._path.parent):
            self._path.parent.mkdir(parents=True, exist_ok=True)
        with open(self._path, "ab", buffering=0) as file:
            end = file.seek(0, os.SEEK_END)
            try:
                if file.write(data) < len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                file.truncate(end)
                raise
