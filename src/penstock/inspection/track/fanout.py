"""Hands each metric to several trackers; a tracker that fails is dropped with a note."""

from __future__ import annotations

from collections.abc import Callable

from penstock.config.plugins import load
from penstock.files import say
from penstock.inspection.track import TRACKERS
from penstock.inspection.track.jsonl import JsonlTracker
from penstock.inspection.track.note_log import NoteLog
from penstock.inspection.track.protocol import RunInfo, Tracker


class Fanout:
    """Consumes metrics and hands them to every tracker that still works."""

    def __init__(self, trackers: dict[str, Tracker]) -> None:
        self._trackers = trackers

    @classmethod
    def from_info(cls, info: RunInfo) -> Fanout:
        """Make metrics.jsonl, logs/run.log and the config's trackers; note one that cannot start."""
        fanout = cls({})
        fanout._trackers["jsonl"] = JsonlTracker(info.folder / "metrics.jsonl", fanout.note)
        fanout._trackers["log"] = NoteLog(info.folder / "logs" / "run.log")
        for name in info.config.track.trackers:
            make = load("track.trackers", name, TRACKERS)
            try:
                fanout._trackers[name] = make(info)
            except Exception as error:  # tracker fan-out: never fatal
                fanout.note(f"tracker {name} could not start: {type(error).__name__}: {error}")
        return fanout

    def log_step(self, step: int, metrics: dict[str, float]) -> None:
        self._each(lambda tracker: tracker.log_step(step, metrics))

    def log_eval(self, step: int, metrics: dict[str, float]) -> None:
        self._each(lambda tracker: tracker.log_eval(step, metrics))

    def note(self, text: str) -> None:
        self._each(lambda tracker: tracker.note(text))
        if "console" not in self._trackers:
            say(text, error=True)

    def close(self) -> None:
        self._each(lambda tracker: tracker.close())

    def _each(self, act: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                act(tracker)
            except Exception as error:  # tracker fan-out: never fatal
                del self._trackers[name]
                self.note(f"tracker {name} failed and is off: {type(error).__name__}: {error}")
