"""Writes closed waits to RUN/timeline/events.jsonl: which worker did what, from when to when.

Lines are collected in memory and written in batches. Times are seconds since the epoch, by the
driver's clock. The first line of each session (a start or a resume of the run) marks when it began.
"""

from __future__ import annotations

import time
from json.encoder import encode_basestring_ascii as quoted
from pathlib import Path

from penstock.inspection.track.line_file import LineFile, Note, print_note
from penstock.waits import OpenWait, WaitKind, Waits

FILE = "events.jsonl"
SESSION = "session"  # the event that marks the beginning of a session
_BATCH = 512


class TimelineLog:
    """Consumes closed waits, produces lines."""

    def __init__(self, folder: Path, waits: Waits, note: Note = print_note) -> None:
        self._file = LineFile(folder / FILE, note)
        self._epoch = time.time() - waits.clock()
        self._lines: list[tuple[str, str, str, float, float]] = []
        self._rewards: list[float] = []  # seconds of each score of training since the last reading
        waits.on_close = self.add
        now = self._epoch + waits.clock()
        self._file.append([_line("run", SESSION, "", now, now)])

    def add(self, wait: OpenWait) -> None:
        assert wait.until is not None
        if wait.what == WaitKind.REWARD and not wait.lane.startswith("rewards of eval "):
            self._rewards.append(wait.until - wait.since)
        start, end = self._epoch + wait.since, self._epoch + wait.until
        self._lines.append((wait.lane, wait.what, wait.detail, start, end))
        if len(self._lines) >= _BATCH:
            self.flush()

    def read_metrics(self) -> dict[str, float]:
        """Return how long a response waited for its reward, on average since the last call."""
        seconds, self._rewards = self._rewards, []
        return {"time/reward_s": sum(seconds) / len(seconds)} if seconds else {}

    def flush(self) -> None:
        lines, self._lines = self._lines, []
        if lines:
            self._file.append([_line(*line) for line in lines])

    def close(self) -> None:
        self.flush()
        self._file.tell_loss()


def _line(lane: str, what: str, detail: str, start: float, end: float) -> str:
    """Return one event as JSON; written by hand, because a run has thousands in a minute."""
    more = f', "detail": {quoted(detail)}' if detail else ""
    times = f'"start": {start:.6f}, "end": {end:.6f}'
    return f'{{"lane": {quoted(lane)}, "what": {quoted(what)}, {times}{more}}}'
