"""`penstock timeline RUN`: the idle share of every worker, and a trace for Perfetto.

Reads RUN/timeline/events.jsonl (`track/logs.py`). A lane is one worker or one part of the driver; it is
busy while at least one of its calls is under way and idle for the rest of the run. The time between the
end of a session and the next resume belongs to no lane. The trace opens in Perfetto (ui.perfetto.dev)
or chrome://tracing. The report draws the pipeline step by step instead.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from penstock.errors import UserError
from penstock.files import read_rows, write_for
from penstock.inspection.track.logs import SESSION, TIMELINE_FILE
from penstock.store.run_folder import RunFolder
from penstock.waits import WaitKind

_WAITING = (WaitKind.WAIT, WaitKind.RESTART)  # calls in which a lane waits and does no work


Interval = tuple[float, float]


@dataclass(slots=True, frozen=True)
class Event:
    """One finished call; times in seconds since 1970."""

    lane: str
    what: str
    start: float
    end: float
    detail: str = ""


@dataclass(slots=True, frozen=True)
class Lane:
    """When one worker or part was busy and when it waited; times in seconds since 1970."""

    name: str
    busy: list[Interval]
    waiting: list[Interval]
    total_s: float

    @property
    def busy_s(self) -> float:
        return sum(end - start for start, end in self.busy)

    @property
    def waited_s(self) -> float:
        return sum(end - start for start, end in self.waiting)

    @property
    def idle_share(self) -> float:
        return 1.0 - self.busy_s / self.total_s if self.total_s else 0.0

    @property
    def verdict(self) -> str:
        """The idle share, or the share of time that a lane which mostly waits has waited."""
        if self.waited_s > self.busy_s:
            return f"waits {self.waited_s / self.total_s:.1%}"
        return f"idle {self.idle_share:.1%}"


def read_events(folder: RunFolder) -> list[Event]:
    """The events of a run in order of time; lines that are cut off or damaged are left out."""
    path = folder.path / "timeline" / TIMELINE_FILE
    if not path.is_file():
        raise UserError(f"run {folder.path}: got no {path.name}, allowed: a run that wrote one")
    events = []
    for row in read_rows(path)[0]:
        are_texts = all(isinstance(row.get(name), str) for name in ("lane", "what"))
        are_times = all(type(row.get(name)) in (int, float) for name in ("start", "end"))
        if are_texts and are_times and row.keys() <= {"lane", "what", "start", "end", "detail"}:
            events.append(Event(**row))
    return sorted(events, key=lambda event: (event.start, -event.end))


def lanes(events: list[Event]) -> list[Lane]:
    """Every lane: trainer, engines, then the others."""
    if not events:
        return []
    total = sum(end - start for start, end in sessions(events))
    by_lane: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        if event.what != SESSION:
            by_lane[event.lane].append(event)
    by_name = []
    for name, calls in by_lane.items():
        busy = _merge(call for call in calls if call.what not in _WAITING)
        waiting = _merge(call for call in calls if call.what in _WAITING)
        by_name.append(Lane(name, busy, waiting, total))
    order = ("trainer", "engine", "rewards", "eval", "checkpoint", "journal", "loop", "produce")

    def place(lane: Lane) -> tuple[int, str]:
        known = (n for n, start in enumerate(order) if lane.name.startswith(start))
        return next(known, len(order)), lane.name

    return sorted(by_name, key=place)


def by_session(events: list[Event]) -> list[list[Event]]:
    """The events of each session of the run, in their order; each begins with the session's mark.

    A call is written when it ends, so it belongs to the last session that was marked before its end.
    """
    marks = [event.start for event in events if event.what == SESSION]
    if events and (not marks or min(event.end for event in events) < marks[0]):
        marks.insert(0, min(event.end for event in events))  # a file whose first mark is lost
    calls = (
        [event for event in events if mark <= event.end < until]
        for mark, until in pairwise([*marks, float("inf")])
    )
    return list(filter(None, calls))  # one that was killed at its start may have nothing


def sessions(events: list[Event]) -> list[Interval]:
    """When each session of the run began and when its last call ended, in their order."""
    return [
        (min(event.start for event in calls), max(event.end for event in calls))
        for calls in by_session(events)
    ]


def work_clock(events: list[Event]) -> list[Event]:
    """The events without the pauses between sessions: each session begins when the one before ended."""
    moved, end = [], 0.0
    for number, calls in enumerate(by_session(events)):
        begin = min(event.start for event in calls)
        shift = end - begin if number else 0.0
        moved += [replace(e, start=e.start + shift, end=e.end + shift) for e in calls]
        end = max(event.end for event in calls) + shift
    return moved


def worked_s(folder: RunFolder) -> float | None:
    """The seconds of all sessions of a run together; None without a timeline."""
    try:
        return sum(end - start for start, end in sessions(read_events(folder)))
    except UserError:
        return None


def covered(events: Iterable[Event]) -> float:
    """The seconds in which at least one event is open."""
    return sum(end - start for start, end in _merge(events))


def _merge(events: Iterable[Event]) -> list[Interval]:
    """The intervals in which at least one event is open."""
    merged: list[Interval] = []
    for event in sorted(events, key=lambda e: e.start):
        if merged and event.start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], event.end))
        else:
            merged.append((event.start, event.end))
    return merged


def chrome_trace(events: list[Event]) -> dict[str, object]:
    """The events in the Trace Event Format; calls of a lane that overlap get a thread each."""
    begin = events[0].start if events else 0.0
    rows: dict[tuple[str, int], int] = {}
    free_at: dict[str, list[float]] = defaultdict(list)
    trace: list[dict[str, object]] = []
    known = sessions(events)
    pauses = [
        Event("run", "paused", end, start)
        for (_, end), (start, _) in pairwise(known)
        if start > end
    ]
    calls = [event for event in events if event.what != SESSION]
    for event in sorted([*calls, *pauses], key=lambda event: (event.start, -event.end)):
        ends = free_at[event.lane]
        depth = next((n for n, end in enumerate(ends) if end <= event.start), len(ends))
        ends[depth : depth + 1] = [event.end]
        row = rows.setdefault((event.lane, depth), len(rows) + 1)
        trace.append(
            {
                "name": event.what,
                "cat": event.lane,
                "ph": "X",
                "ts": round((event.start - begin) * 1e6),
                "dur": round((event.end - event.start) * 1e6),
                "pid": 1,
                "tid": row,
                "args": {"detail": event.detail},
            }
        )
    names = [
        {"name": "thread_name", "ph": "M", "pid": 1, "tid": row, "args": {"name": lane}}
        for (lane, _), row in rows.items()
    ]
    return {"traceEvents": [*names, *trace], "displayTimeUnit": "ms"}


def write_trace(folder: RunFolder, out: Path | None = None) -> Path:
    """Write the trace, by default to RUN/timeline/trace.json; return its path."""
    path = out or folder.path / "timeline" / "trace.json"
    if out is None:
        folder.check_inside(path)
    write_for("timeline", path, json.dumps(chrome_trace(read_events(folder))))
    return path


def summary_lines(folder: RunFolder) -> list[str]:
    """One line per lane: busy time and idle share."""
    return [
        f"{lane.name:<20} busy {lane.busy_s:8.1f} s of {lane.total_s:.1f} s, {lane.verdict}"
        for lane in lanes(read_events(folder))
    ]
