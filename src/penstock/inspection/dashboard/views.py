"""What each view of the dashboard shows of one run, as plain JSON values.

Long curves are thinned here: a point stands for a stretch of steps, with their mean, smallest and
largest value. Journals are read in one snapshot each, through their public views.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from penstock.config.changes import flat
from penstock.errors import PenstockError, RunError, UserError
from penstock.inspection.compare import compare
from penstock.inspection.dashboard import pairs
from penstock.inspection.dashboard.shown_run import ShownRun
from penstock.inspection.report.data import RunRecord, clip, clip_turns, read_run
from penstock.inspection.report.figures import take_figures
from penstock.inspection.rollout_viewer import message_text, views_of_group
from penstock.inspection.timeline import Event, lanes, read_events, sessions, split_waits
from penstock.inspection.track.logs import SESSION
from penstock.store.journal import Journal
from penstock.store.run_folder import RunFolder

MOST_POINTS = 400  # of one curve
GROUPS_AT_ONCE = 8
MOST_COMPARED = 8  # the colours of the charts
_SLOTS = 480  # of the timeline
_NEWEST_EVENTS = 40
_ORDERS = {
    "newest": "step IS NULL, step DESC, position",
    "oldest": "step IS NULL, step, position",
    "best": "reward DESC, step DESC",
    "worst": "reward IS NULL, reward, step DESC",
}
_STATES = ("trained", "taken", "buffered", "dropped")


def overview(folder: RunFolder) -> dict[str, Any]:
    """Return the record of the report without samples, with thinned curves and the key figures."""
    record = read_run(folder, samples=False)
    figures = asdict(take_figures(record))
    shown = asdict(record) | {"figures": figures}
    shown["steps"], shown["curves"], shown["spread"] = thin(record)
    return shown


def thin(
    record: RunRecord, most: int = MOST_POINTS
) -> tuple[list[int], dict[str, list[float | None]], dict[str, list[list[float | None]]]]:
    """Return steps, means and (smallest, largest) values of at most `most` stretches of steps.

    A run with fewer steps is returned as it is, without smallest and largest values.
    """
    count = len(record.steps)
    if count <= most:
        return record.steps, record.curves, {}
    edges = [i * count // most for i in range(most + 1)]
    stretches = list(pairwise(edges))
    steps = [record.steps[end - 1] for _, end in stretches]
    means: dict[str, list[float | None]] = {}
    spread: dict[str, list[list[float | None]]] = {}
    for name, values in record.curves.items():
        known = [[v for v in values[a:b] if v is not None] for a, b in stretches]
        means[name] = [_short(sum(one) / len(one)) if one else None for one in known]
        spread[name] = [
            [min(one, default=None) for one in known],
            [max(one, default=None) for one in known],
        ]
    return steps, means, spread


def _short(value: float) -> float:
    return float(f"{value:.5g}")


# -- samples -----------------------------------------------------------------------------------


def groups(folder: RunFolder, asked: Mapping[str, str]) -> dict[str, Any]:
    """Return some groups with their answers, the best answer first; `asked` chooses and orders them."""
    where, values = _conditions(asked)
    order = _ORDERS.get(asked.get("order", ""), _ORDERS["newest"])
    offset = _whole(asked.get("offset")) or 0
    with closing(Journal.look(folder.journal)) as journal, journal.snapshot():
        rows = journal.query(
            f"SELECT group_id FROM groups AS g WHERE {where} ORDER BY {order} LIMIT ? OFFSET ?",
            [*values, GROUPS_AT_ONCE + 1, offset],
        )
        (last,) = journal.query("SELECT MAX(step) FROM groups WHERE state = 'trained'")[0]
        tasks = [name for (name,) in journal.query("SELECT DISTINCT task FROM groups")]
        found, damaged = [], []
        for (group_id,) in rows[:GROUPS_AT_ONCE]:
            try:
                found.append(_group(journal, group_id))
            except RunError as error:
                damaged.append(str(error))
    return {
        "groups": found,
        "damaged": damaged,
        "more": len(rows) > GROUPS_AT_ONCE,
        "last_step": last,
        "tasks": sorted(tasks),
    }


def _conditions(asked: Mapping[str, str]) -> tuple[str, list[object]]:
    state = asked.get("state", "")
    conditions = ["num_tokens IS NOT NULL", f"state = '{state if state in _STATES else 'trained'}'"]
    values: list[object] = []
    if (step := _whole(asked.get("step"))) is not None:
        conditions.append("step = ?")
        values.append(step)
    if task := asked.get("task"):
        conditions.append("task = ?")
        values.append(task)
    if words := asked.get("words"):
        conditions.append(
            "EXISTS(SELECT 1 FROM rollouts AS r WHERE r.group_id = g.group_id"
            " AND instr(lower(r.text), ?))"
        )
        values.append(words.lower())
    return " AND ".join(conditions), values


def _group(journal: Journal, group_id: str) -> dict[str, Any]:
    samples = sorted(
        views_of_group(journal, group_id),
        key=lambda one: math.inf if one.reward is None else -one.reward,
    )
    answers = []
    for sample in samples:
        row = sample.plain()
        row |= {"fate": sample.fate, "response": clip(sample.response)}
        row["prompt"] = clip("\n".join(message_text(message) for message in sample.prompt))
        clip_turns(row)
        answers.append(row)
    return {"group_id": group_id, "answers": answers}


def _whole(text: str | None) -> int | None:
    return int(text) if text and text.isdecimal() and len(text) < 10 else None


# -- journal -----------------------------------------------------------------------------------


def journal_state(folder: RunFolder) -> dict[str, Any]:
    """Return where the groups are now, the newest events, and which weights each engine confirmed."""
    with closing(Journal.look(folder.journal)) as journal, journal.snapshot():
        events = journal.query(
            "SELECT at, group_id, kind, status, tries, reason, reward, step FROM events"
            f" ORDER BY at DESC LIMIT {_NEWEST_EVENTS}"
        )
        weights = journal.query(
            "SELECT kind, engine, MAX(version), MAX(at) FROM weights GROUP BY kind, engine ORDER BY 1, 2"
        )
        names = ("at", "group_id", "kind", "status", "tries", "reason", "reward", "step")
        return {
            "counts": journal.counts(),
            "drops": journal.drops(),
            "events": [dict(zip(names, row, strict=True)) for row in events],
            "weights": [
                dict(zip(("kind", "engine", "version", "at"), w, strict=True)) for w in weights
            ],
        }


# -- timeline ----------------------------------------------------------------------------------


@dataclass(slots=True, frozen=True)
class WorkedLane:
    """When one worker or part was busy, and when it waited."""

    name: str
    verdict: str
    busy: list[tuple[float, float]]
    waiting: list[tuple[float, float]]


@dataclass(slots=True, frozen=True)
class Worked:
    """The whole timeline of a run; times in seconds since 1970."""

    sessions: list[tuple[float, float]]
    lanes: list[WorkedLane]


def read_worked(folder: RunFolder) -> Worked:
    """Return the timeline of a run; an empty one if it has none."""
    try:
        events = read_events(folder)
    except (UserError, ValueError):  # no file, or bytes that are no text
        events = []
    by_lane: dict[str, list[Event]] = {}
    for event in events:
        if event.what != SESSION:
            by_lane.setdefault(event.lane, []).append(event)
    found = [
        WorkedLane(lane.name, lane.verdict, *split_waits(by_lane[lane.name]))
        for lane in lanes(events)
    ]
    return Worked(sessions(events), found)


def timeline(worked: Worked, start: float, end: float) -> dict[str, Any]:
    """Return, for each lane, the busy and the waiting share of every slot between two moments.

    Moments are seconds since the first event; `end` 0: the last one.
    """
    known = worked.sessions
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
        for lane in worked.lanes
    ]
    return {"start": start, "end": end, "total": total, "lanes": shown, "sessions": len(known)}


def _fill(intervals: Sequence[tuple[float, float]], origin: float, size: float) -> list[int]:
    """Return the covered share of each slot, in percent."""
    covered = [0.0] * _SLOTS
    for begin, end in intervals:
        low, high = (begin - origin) / size, (end - origin) / size
        first, last = max(0, math.floor(low)), min(_SLOTS, math.ceil(high))
        for slot in range(first, last):
            covered[slot] += max(0.0, min(high, slot + 1) - max(low, slot))
    return [round(100 * min(1.0, share)) for share in covered]


# -- settings ----------------------------------------------------------------------------------


def differing_settings(folders: Sequence[RunFolder]) -> list[dict[str, Any]]:
    """Return the settings that are not the same in all runs: key, and the value in each run."""
    trees = []
    for folder in folders:
        try:
            trees.append(flat(folder.config().model_dump(mode="json")))
        except (PenstockError, OSError, ValueError):
            trees.append({})
    keys = sorted({key for tree in trees for key in tree if not key.startswith("run.")})
    rows = []
    for key in keys:
        values = [_said(tree[key]) if key in tree else "" for tree in trees]
        if len(set(values)) > 1:
            rows.append({"key": key, "values": values})
    return rows


def _said(value: object) -> str:
    """Return a value as a config would have it; nothing for one that is not set."""
    return value if isinstance(value, str) else "" if value is None else json.dumps(value)


_COMPARED = (
    *("task", "measure", "steps", "pairs", "first", "second"),
    *("difference", "low", "high", "first_wins", "second_wins"),
)


def comparison(folders: Sequence[RunFolder]) -> dict[str, Any]:
    """The settings that differ among runs, and the first run against each other one."""
    folders = folders[:MOST_COMPARED]
    rows: list[dict[str, Any]] = []
    for number, other in enumerate(folders[1:], start=1):
        try:
            results = compare(folders[0], other)
        except PenstockError:
            continue  # no prompt in common
        for result in results:
            row = {"run": number, "verdict": result.verdict}
            row |= {name: getattr(result, name) for name in _COMPARED}
            row["examples"] = [
                [{"prompt": a.prompt, "response": a.response, "score": a.score} for a in pair]
                for pair in result.examples
            ]
            rows.append(row)
    return {"settings": differing_settings(folders), "comparisons": rows}


def _shown_overview(run: ShownRun, query: dict[str, str]) -> dict[str, Any]:
    value, wait = run.value("overview", overview)
    return {**value, "id": run.id, "again_in_s": wait}


def _shown_samples(run: ShownRun, query: dict[str, str]) -> dict[str, Any]:
    return groups(run.folder, query)


def _shown_pairs(run: ShownRun, query: dict[str, str]) -> dict[str, Any]:
    names = pairs.sources(run.folder)
    source = query.get("source") if query.get("source") in names else names[0]
    assert source is not None
    value, wait = run.value(f"pairs {source}", lambda folder: pairs.read_pairs(folder, source))
    offset = query.get("offset", "0")
    page = pairs.page_of(value, query.get("order", "better"), int(offset[:9] or 0))
    return {**page, "source": source, "sources": names, "again_in_s": wait}


def _shown_journal(run: ShownRun, query: dict[str, str]) -> dict[str, Any]:
    value, wait = run.value("journal", journal_state)
    return {**value, "again_in_s": wait}


def _shown_timeline(run: ShownRun, query: dict[str, str]) -> dict[str, Any]:
    worked, wait = run.value("worked", read_worked)
    start, end = (float(query.get(name) or 0) for name in ("from", "to"))
    return {**timeline(worked, start, end), "again_in_s": wait}


VIEWS: dict[str, Callable[[ShownRun, dict[str, str]], dict[str, Any]]] = {
    "overview": _shown_overview,
    "samples": _shown_samples,
    "pairs": _shown_pairs,
    "journal": _shown_journal,
    "timeline": _shown_timeline,
}
