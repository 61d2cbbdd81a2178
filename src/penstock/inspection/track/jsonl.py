"""metrics.jsonl: one line per step, always written; a resumed run restores lost lines from the journal."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Sequence
from pathlib import Path

from penstock.files import write_whole
from penstock.inspection.track.line_file import LineFile, Note, print_note
from penstock.types import StepReport


class JsonlTracker:
    """Appends one line per step; each line is whole or absent."""

    def __init__(self, path: Path, note: Note = print_note) -> None:
        self._file = LineFile(path, note)

    def log_step(self, step: int, metrics: dict[str, float]) -> None:
        finite = {k: v if math.isfinite(v) else None for k, v in metrics.items()}
        self._file.append([json.dumps({"step": step, **finite})])

    def log_eval(self, step: int, metrics: dict[str, float]) -> None:
        """Do nothing: evaluations are written to eval/summary.jsonl."""

    def note(self, text: str) -> None:
        """Leave notes out."""

    def close(self) -> None:
        self._file.tell_loss()


def last_step_told(path: Path) -> int:
    """Return the newest step with a whole line in the file; 0 if there is none."""
    return max(_lines_by_step(path), default=0)


def _lines_by_step(path: Path) -> dict[int, str]:
    lines: dict[int, str] = {}
    if path.exists():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):
                lines[int(json.loads(line)["step"])] = line
    return lines


def restore_metrics(path: Path, reports: Sequence[StepReport]) -> None:
    """Rewrite the file with one line per step: the old line if it is whole, else the journal's metrics.

    Torn lines and lines of steps that were lost are removed. A crash leaves the old or the new file."""
    lines = _lines_by_step(path)
    kept = [
        lines.get(report.step) or json.dumps({"step": report.step, **report.metrics})
        for report in reports
    ]
    write_whole(path, "".join(f"{line}\n" for line in kept))
