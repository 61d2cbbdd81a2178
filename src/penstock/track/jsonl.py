"""metrics.jsonl: one line a step, always on. Layer 1."""

from __future__ import annotations

import json
import math
from pathlib import Path


class JsonlTracker:
    """Appends to a file, line by line; each line is whole or absent."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def log_step(self, step: int, metrics: dict[str, float]) -> None:
        finite = {k: v if math.isfinite(v) else None for k, v in metrics.items()}
        self._file.write(json.dumps({"step": step, **finite}) + "\n")
        self._file.flush()

    def log_eval(self, step: int, metrics: dict[str, float]) -> None:
        """Evaluations have a file of their own (eval/summary.jsonl)."""

    def note(self, text: str) -> None:
        """Notes are for people."""

    def close(self) -> None:
        self._file.close()


def drop_steps_after(path: Path, step: int) -> None:
    """Cut lines of steps that are about to be done again, and a last line that was torn."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line)
        except (ValueError, KeyError):
            continue
    path.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
