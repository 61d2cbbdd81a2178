"""Writes closed waits to RUN/timeline/events.jsonl: which worker did what, from when to when.

Lines are collected in memory and written in batches. Times are seconds since the epoch, by the
driver's clock.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from penstock.watch.waits import OpenWait, Waits

FILE = "events.jsonl"
_BATCH = 512


class TimelineLog:
    """Consumes closed waits, produces lines."""

    def __init__(self, folder: Path, waits: Waits) -> None:
        self._path = folder / FILE
        self._epoch = time.time() - waits.clock()
        self._lines: list[tuple[str, str, str, float, float]] = []
        waits.on_close = self.add

    def add(self, wait: OpenWait) -> None:
        assert wait.until is not None
        start, end = self._epoch + wait.since, self._epoch + wait.until
        self._lines.append((wait.lane, wait.what, wait.detail, start, end))
        if len(self._lines) >= _BATCH:
            self.flush()

    def flush(self) -> None:
        lines, self._lines = self._lines, []
        if not lines:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            for lane, what, detail, start, end in lines:
                event = {"lane": lane, "what": what, "start": round(start, 6), "end": round(end, 6)}
                file.write(json.dumps({**event, "detail": detail} if detail else event) + "\n")
