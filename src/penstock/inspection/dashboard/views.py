"""The runs of a folder, and what each view of a run's page shows, as plain JSON values.

A value that costs something to read is read again only when its run has changed, and only after a rest that is
many times longer than the reading took, so that looking at a run does not slow the machine that trains it. Long curves are thinned here: a point stands for a stretch of steps, with their mean, smallest and
largest value. Journals are read in one snapshot each, through their public views.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from penstock.config.changes import flat
from penstock.errors import PenstockError, RunError, UserError
from penstock.inspection.compare import Comparison, compare, first_and_last
from penstock.inspection.record import RunLine, RunRecord, read_line, read_run, take_figures
from penstock.inspection.rollout_viewer import message_text, views_of_group
from penstock.inspection.service import read_service
from penstock.inspection.timeline import Interval, Lane, lanes, read_events, sessions, work_clock
from penstock.inspection.track.console import stretches
from penstock.inspection.track.logs import TIMELINE_FILE
from penstock.rollout.evaluation.evaluate import SUMMARY
from penstock.store.command_log import FILE as COMMANDS
from penstock.store.journal import Journal
from penstock.store.run_folder import CONFIG, JOURNAL, METRICS, ORIGIN, RunFolder

V = TypeVar("V")

MOST_POINTS = 400  # of one curve
GROUPS_AT_ONCE = 8
MAX_TEXT = 6000  # characters of a prompt or a response
MAX_CONVERSATION = 30_000  # characters of an agent's conversation
_SPREAD_TRAINED, _SPREAD_DROPPED, _SPREAD_ANSWERS = 30, 8, 8  # groups in a report, answers of each
_SLOTS = 480  # of the timeline
_NEWEST_EVENTS = 40
_ORDERS = {
    "newest": "step IS NULL, step DESC, position",
    "oldest": "step IS NULL, step, position",
    "best": "reward DESC, step DESC",
    "worst": "reward IS NULL, reward, step DESC",
}
_STATES = ("trained", "taken", "buffered", "dropped")

# -- the runs of a folder -----------------------------------------------------------------------


_REST = 20.0  # a reading that took a second is repeated after 20 seconds at the earliest
_LOOK_S = 1.0  # in which a look reads new runs
_SPARKS = 60  # points of the small curve in the list
_DATABASES = [f"{name}{end}" for name in (JOURNAL, COMMANDS) for end in ("", "-wal", "-shm")]
_LINES = ("rollouts.jsonl", f"timeline/{TIMELINE_FILE}")
_FILES = (CONFIG, *_DATABASES, METRICS, ORIGIN, "lock", *_LINES)
_FOLDERS = ("configs", "eval", "timeline")


@dataclass(slots=True)
class _Value:
    version: str
    content: Any
    at: float  # when it was read
    cost: float  # CPU seconds


@dataclass(slots=True)
class ShownRun:
    """One run: its line in the list, and what was read of it."""

    id: str
    folder: RunFolder
    line: dict[str, Any] = field(default_factory=dict)
    _values: dict[str, _Value] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def value(self, name: str, read: Callable[[RunFolder], V]) -> tuple[V, float]:
        """What `read` finds, and the seconds after which to ask again (0: it is of now)."""
        with self._lock:
            version, old = self.version(), self._values.get(name)
            if old is not None and old.version == version:
                return old.content, 0.0
            if old is not None and (rest := old.at + _REST * old.cost - time.monotonic()) > 0:
                return old.content, rest
            began = time.thread_time()
            content = read(self.folder)
            cost = time.thread_time() - began
            self._values[name] = _Value(version, content, time.monotonic(), cost)
            return content, 0.0

    def version(self) -> str:
        """A text that changes with every step and every evaluation of a run, every command of a service."""
        names = (CONFIG, METRICS, f"eval/{SUMMARY}", COMMANDS, f"{COMMANDS}-wal")
        files = [self.folder.path / name for name in names]
        marks = [os.lstat(file) for file in files if os.path.lexists(file)]
        parts = [f"{mark.st_mtime_ns}.{mark.st_size}" for mark in marks]
        return "-".join([*parts, self.folder.owner()])

    def renew(self) -> None:
        """Read the line of the list again if the run has changed."""
        if odd := odd_file(self.folder.path):
            line = RunLine(name=self.folder.name, state="refused", note=odd)
            self.line = self.line_of(line) | {"version": ""}
            return
        line, wait = self.value("line", read_line)
        if not wait or not self.line:
            self.line = self.line_of(line) | {"version": self.version()}

    def line_of(self, line: RunLine) -> dict[str, Any]:
        """A run's line as the page shows it, with a short curve."""
        parts = stretches(len(line.rewards), _SPARKS)
        means = [round(fmean(line.rewards[first:end]), 4) for first, end in parts]
        return {**asdict(line), "id": self.id, "rewards": means}


class ShownRuns:
    """The runs of one folder, or the one run that the folder is."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._runs: dict[str, ShownRun] = {}
        self._looking = threading.Lock()

    def find(self, run_id: str) -> ShownRun:
        """The run with this id; raise KeyError if there is none, or if it is refused."""
        known = self._runs.get(run_id)
        if known is None:  # an address that was kept, before the list is read
            path = self._paths()[run_id]
            known = self._runs.setdefault(run_id, ShownRun(run_id, RunFolder(path)))
        if odd_file(known.folder.path):
            raise KeyError(run_id)
        return known

    def look(self) -> dict[str, Any]:
        """The line of every run, the newest first; after a second, runs that are new wait for the next look."""
        until, complete = time.monotonic() + _LOOK_S, True
        with self._looking:
            paths = self._paths()
            for run_id in list(self._runs):  # at once: `find` adds runs in other threads
                if run_id not in paths:
                    del self._runs[run_id]
            for run_id, path in paths.items():
                run = self._runs.setdefault(run_id, ShownRun(run_id, RunFolder(path)))
                if not run.line and time.monotonic() > until:
                    complete = False
                    continue
                with suppress(OSError, PenstockError):  # removed or replaced during the look
                    run.renew()
            shown = [run.line for run in list(self._runs.values()) if run.line]
        there = [line for line in shown if _is_run(paths[line["id"]])]  # not removed meanwhile
        return {
            "runs": sorted(there, key=lambda line: -line["changed_at"]),
            "complete": complete,
        }

    def _paths(self) -> dict[str, Path]:
        """The run folders by their ids, the newest first. Links are not followed."""
        folders = [self.folder]
        if not _is_run(self.folder):
            with os.scandir(self.folder) as entries:
                inside = [Path(e.path) for e in entries if e.is_dir(follow_symlinks=False)]
            times = {path: os.lstat(path).st_mtime for path in inside if _is_run(path)}
            folders = sorted(times, key=lambda path: -times[path])
        return {hashlib.sha256(os.fsencode(path)).hexdigest()[:12]: path for path in folders}


def _is_run(path: Path) -> bool:
    return any(os.path.lexists(path / name) for name in (CONFIG, JOURNAL, COMMANDS))


def odd_file(folder: Path) -> str:
    """A sentence about a link, pipe or device where a look would read; empty if there is none."""
    paths = [(folder / name, stat.S_ISREG) for name in _FILES]
    paths += [(folder / name, stat.S_ISDIR) for name in _FOLDERS]
    for path, is_right in paths:
        try:
            mode = os.lstat(path).st_mode
        except (FileNotFoundError, NotADirectoryError):
            continue
        if not is_right(mode):
            what = "a link" if stat.S_ISLNK(mode) else "no plain file or folder"
            return f"{path.relative_to(folder)} is {what}; the dashboard does not read this run"
    for name in ("eval", "configs"):
        for entry in os.scandir(folder / name) if (folder / name).is_dir() else ():
            if not entry.is_file(follow_symlinks=False):
                return f"{name}/{entry.name} is no plain file; the dashboard does not read this run"
    return ""


# -- what a view shows --------------------------------------------------------------------------


def overview(folder: RunFolder) -> dict[str, Any]:
    """The record of a run, with thinned curves and the key figures; that of a service has its models' records."""
    if folder.commands.is_file():
        service = read_service(folder)
        for model in service["models"]:
            record = model.pop("record")
            model |= _shown(record) | {"id": record.name}
        return service
    record = read_run(folder)
    return _shown(record) | {"figures": asdict(take_figures(record))}


def _shown(record: RunRecord) -> dict[str, Any]:
    steps, curves, spread = thin(record)
    return asdict(record) | {"steps": steps, "curves": curves, "spread": spread}


def thin(
    record: RunRecord, most: int = MOST_POINTS
) -> tuple[list[int], dict[str, list[float | None]], dict[str, list[list[float | None]]]]:
    """Steps, means and (smallest, largest) values of at most `most` stretches of steps.

    A run with fewer steps is returned as it is, without smallest and largest values.
    """
    count = len(record.steps)
    if count <= most:
        return record.steps, record.curves, {}
    parts = stretches(count, most)
    steps = [record.steps[end - 1] for _, end in parts]
    means: dict[str, list[float | None]] = {}
    spread: dict[str, list[list[float | None]]] = {}
    for name, values in record.curves.items():
        known = [[v for v in values[a:b] if v is not None] for a, b in parts]
        means[name] = [float(f"{fmean(part):.5g}") if part else None for part in known]
        spread[name] = [
            [min(part, default=None) for part in known],
            [max(part, default=None) for part in known],
        ]
    return steps, means, spread


# -- samples -----------------------------------------------------------------------------------


def groups(folder: RunFolder, query: Mapping[str, str]) -> dict[str, Any]:
    """Some groups with their answers, the best answer first; `query` chooses and orders them."""
    where, values = _conditions(query)
    order = _ORDERS.get(query.get("order", ""), _ORDERS["newest"])
    offset = _whole(query.get("offset")) or 0
    with closing(Journal.look(folder.journal)) as journal, journal.snapshot():
        rows = journal.query(
            f"SELECT group_id FROM groups AS g WHERE {where} ORDER BY {order} LIMIT ? OFFSET ?",
            [*values, GROUPS_AT_ONCE + 1, offset],
        )
        shown = _groups(journal, rows[:GROUPS_AT_ONCE])
    return shown | {"more": len(rows) > GROUPS_AT_ONCE}


def spread_groups(folder: RunFolder) -> dict[str, Any]:
    """Groups at even distances over the whole run, dropped ones too: the samples of a report."""
    with closing(Journal.look(folder.journal)) as journal, journal.snapshot():
        trained = journal.query(
            "SELECT group_id FROM groups WHERE state = 'trained' ORDER BY step, position"
        )
        dropped = journal.query(
            "SELECT DISTINCT group_id FROM rollouts WHERE drop_reason IS NOT NULL ORDER BY group_id"
        )
        chosen = [*_spread(trained, _SPREAD_TRAINED), *_spread(dropped, _SPREAD_DROPPED)]
        shown = _groups(journal, chosen)
    for group in shown["groups"]:
        del group["answers"][_SPREAD_ANSWERS:]
    return shown | {"more": False}


def _spread(items: Sequence[tuple], count: int) -> Sequence[tuple]:
    """At most `count` items at even distances, with the first and the last."""
    if len(items) <= count:
        return items
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]


def _groups(journal: Journal, rows: Sequence[tuple]) -> dict[str, Any]:
    """Groups by their ids, and what a reader can choose from; a damaged group is a sentence."""
    (last,) = journal.query("SELECT MAX(step) FROM groups WHERE state = 'trained'")[0]
    tasks = [name for (name,) in journal.query("SELECT DISTINCT task FROM groups")]
    readable, damaged = [], []
    for (group_id,) in rows:
        try:
            samples = sorted(
                views_of_group(journal, group_id),
                key=lambda sample: math.inf if sample.reward is None else -sample.reward,
            )
            answers = []
            for sample in samples:
                row = sample.plain()
                row |= {"fate": sample.fate, "response": clip(sample.response)}
                row["prompt"] = clip("\n".join(map(message_text, sample.prompt)))
                _clip_turns(row)
                answers.append(row)
            readable.append({"group_id": group_id, "answers": answers})
        except RunError as error:
            damaged.append(str(error))
    return {"groups": readable, "damaged": damaged, "last_step": last, "tasks": sorted(tasks)}


def _conditions(query: Mapping[str, str]) -> tuple[str, list[object]]:
    state = query.get("state", "")
    conditions = ["num_tokens IS NOT NULL", f"state = '{state if state in _STATES else 'trained'}'"]
    values: list[object] = []
    if (step := _whole(query.get("step"))) is not None:
        conditions.append("step = ?")
        values.append(step)
    if task := query.get("task"):
        conditions.append("task = ?")
        values.append(task)
    if words := query.get("words"):
        conditions.append(
            "EXISTS(SELECT 1 FROM rollouts AS r WHERE r.group_id = g.group_id"
            " AND instr(lower(r.text), ?))"
        )
        values.append(words.lower())
    return " AND ".join(conditions), values


def clip(text: str) -> str:
    """A text as long as a page may hold."""
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}\n[cut: {len(text)} characters]"


def _clip_turns(row: dict[str, Any]) -> None:
    """Shorten the conversation of a sample to what a page may hold; the last turn says what was left out."""
    turns, left = row["turns"], MAX_CONVERSATION
    for number, turn in enumerate(turns):
        turn["text"] = clip(turn["text"])
        for tool in turn["tools"]:
            tool["name"], tool["arguments"] = clip(tool["name"]), clip(tool["arguments"])
        left -= len(turn["text"]) + sum(
            len(text) for tool in turn["tools"] for text in tool.values()
        )
        if left < 0:
            words = f"[cut: {len(turns) - number - 1} further messages]"
            row["turns"] = [*turns[: number + 1], {**turn, "text": words, "tools": []}]
            return


def _whole(text: str | None) -> int | None:
    return int(text) if text and text.isdecimal() and len(text) < 10 else None


# -- journal -----------------------------------------------------------------------------------


def journal_state(folder: RunFolder) -> dict[str, Any]:
    """Where the groups are now, the newest events, and which weights each engine confirmed."""
    of_events = ("at", "group_id", "kind", "status", "tries", "reason", "reward", "step")
    of_weights = ("kind", "engine", "version", "at")
    with closing(Journal.look(folder.journal)) as journal, journal.snapshot():
        events = journal.query(
            f"SELECT {', '.join(of_events)} FROM events ORDER BY at DESC LIMIT {_NEWEST_EVENTS}"
        )
        weights = journal.query(
            "SELECT kind, engine, MAX(version), MAX(at) FROM weights GROUP BY kind, engine ORDER BY 1, 2"
        )
        return {
            "counts": journal.counts(),
            "drops": journal.drops(),
            "events": [dict(zip(of_events, row, strict=True)) for row in events],
            "weights": [dict(zip(of_weights, row, strict=True)) for row in weights],
        }


# -- timeline ----------------------------------------------------------------------------------


def read_lanes(folder: RunFolder) -> tuple[list[Interval], list[Lane]]:
    """When the sessions of a run were, and what each lane did, both without the pauses between sessions.

    Both are empty if there is no timeline.
    """
    try:
        events = work_clock(read_events(folder))
    except UserError:
        return [], []
    return sessions(events), lanes(events)


def timeline(
    known: Sequence[Interval], shown_lanes: Sequence[Lane], start: float, end: float
) -> dict[str, Any]:
    """For each lane, the busy and the waiting share of every slot between two moments.

    Moments are seconds since the first event; `end` 0: the last one.
    """
    if not known:
        return {"lanes": []}
    first, total = known[0][0], max(until for _, until in known) - known[0][0]
    end = total if end <= start else min(end, total)
    start = max(0.0, min(start, end))
    size = (end - start) / _SLOTS or 1.0
    shown = [
        {
            "name": lane.name,
            "verdict": lane.verdict,
            "busy": _fill(lane.busy, first + start, size),
            "waiting": _fill(lane.waiting, first + start, size),
        }
        for lane in shown_lanes
    ]
    return {"start": start, "end": end, "total": total, "lanes": shown, "sessions": len(known)}


def _fill(intervals: Sequence[Interval], origin: float, size: float) -> list[int]:
    """The covered share of each slot, in percent."""
    covered = [0.0] * _SLOTS
    for begin, end in intervals:
        low, high = (begin - origin) / size, (end - origin) / size
        first, last = max(0, math.floor(low)), min(_SLOTS, math.ceil(high))
        for slot in range(first, last):
            covered[slot] += max(0.0, min(high, slot + 1) - max(low, slot))
    return [round(100 * min(1.0, share)) for share in covered]


# -- settings ----------------------------------------------------------------------------------


def differing_settings(folders: Sequence[RunFolder]) -> list[dict[str, Any]]:
    """The settings that are not the same in all runs: key, and the value in each run."""
    trees = []
    for folder in folders:
        try:
            trees.append(flat(folder.config().model_dump(mode="json")))
        except (PenstockError, OSError, ValueError):
            trees.append({})
    keys = sorted({key for tree in trees for key in tree if not key.startswith("run.")})
    rows = []
    for key in keys:
        known = [tree.get(key) for tree in trees]
        values = ["" if v is None else v if isinstance(v, str) else json.dumps(v) for v in known]
        if len(set(values)) > 1:
            rows.append({"key": key, "values": values})
    return rows


def comparison(folders: Sequence[RunFolder]) -> dict[str, Any]:
    """The settings that differ among runs, and the first run against each other one."""
    rows: list[dict[str, Any]] = []
    for number, other in enumerate(folders[1:], start=1):
        try:
            results = compare(folders[0], other)
        except PenstockError:
            continue  # no prompt in common
        rows += [_compared(result) | {"run": number} for result in results]
    return {"settings": differing_settings(folders), "comparisons": rows}


def _compared(result: Comparison) -> dict[str, Any]:
    row = asdict(result) | {"verdict": result.verdict}
    for pair in row["examples"]:
        for answer in pair:
            answer |= {name: clip(answer[name]) for name in ("prompt", "response")}
    return row


# -- the views by their names ------------------------------------------------------------------


def _kept(
    run: ShownRun, name: str, read: Callable[[RunFolder], V], show: Callable[[V], dict[str, Any]]
) -> dict[str, Any]:
    """What a view shows of a value that costs something to read, and when to ask again."""
    value, wait = run.value(name, read)
    return {**show(value), "again_in_s": wait}


View = Callable[[ShownRun, Mapping[str, str]], dict[str, Any]]

VIEWS: dict[str, View] = {
    "overview": lambda run, _: _kept(run, "overview", overview, dict) | {"id": run.id},
    "samples": lambda run, query: groups(run.folder, query),
    "pairs": lambda run, _: _kept(
        run, "pairs", first_and_last, lambda pairs: {"comparisons": list(map(_compared, pairs))}
    ),
    "journal": lambda run, _: _kept(run, "journal", journal_state, dict),
    "timeline": lambda run, query: _kept(
        run,
        "lanes",
        read_lanes,
        lambda read: timeline(*read, float(query.get("from") or 0), float(query.get("to") or 0)),
    ),
}
