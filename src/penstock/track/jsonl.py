"""metrics.jsonl: one line per step, always written."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Sequence
from pathlib import Path

from penstock.disk import write_whole
from penstock.types import StepReport


class JsonlTracker:
    """Appends to a file, line by line; each line is whole or absent."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def log_step(self, step: int, metrics: dict[str, float]) -> None:
        finite = {k: v if math.isfinite(v) else None for k, v in metrics.items()}
        self._file.write(json.dumps({"step": step, **finite}) + "\n")
        self._file.flush()

    def log_eval(self, step: int, metrics: dict[str, float]) -> None:
        """Do nothing: evaluations are written to eval/summary.jsonl."""

    def note(self, text: str) -> None:
        """Leave notes out."""

    def close(self) -> None:
        self._file.close()


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

    Torn lines and lines of steps that were lost are removed."""
    lines = _lines_by_step(path)
    kept = [
        lines.get(report.step) or json.dumps({"step": report.step, **report.metrics})
        for report in reports
    ]
    write_whole(path, "".join(f"{line}\n" for line in kept))
