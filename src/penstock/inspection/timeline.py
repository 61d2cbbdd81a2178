"""`penstock timeline RUN`: who was busy when, as a Gantt page, a picture and a Chrome trace.

Reads RUN/timeline/events.jsonl (`timeline_log.py`). A lane is busy while at least one of its calls
is under way; its idle share is the rest of the run's time. The page needs nothing but a browser, the
picture needs Pillow; the trace opens in Perfetto (ui.perfetto.dev) or chrome://tracing.
"""

from __future__ import annotations

import html
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import UserError
from penstock.run_folder import RunFolder
from penstock.watch.timeline_log import FILE
from penstock.watch.waits import WaitKind

_WIDTH, _ROW, _LEFT, _TOP = 1200, 26, 190, 34
_MOST_BARS = 4000  # in a lane; closer ones are drawn as one
_COLOURS: dict[str, str] = {
    WaitKind.GENERATE: "#2a78b5",
    WaitKind.REWARD: "#3a8f5c",
    WaitKind.SEND: "#84a59d",
    WaitKind.WAIT: "#c9c9c9",
    WaitKind.JOURNAL: "#5b7f77",
    WaitKind.TRAIN: "#c2571a",
    WaitKind.PUBLISH: "#a3719f",
    WaitKind.OBJECT_STORE: "#8f5a8a",
    WaitKind.COLLECTIVE: "#9b6bb8",
    WaitKind.SYNC: "#7a4fa3",
    WaitKind.EVAL: "#b08b1e",
    WaitKind.CHECKPOINT: "#6b6b6b",
    WaitKind.WRITE_CHECKPOINT: "#9a9a9a",
    WaitKind.LOAD: "#7d6b58",
    WaitKind.PAUSE: "#8fb8d1",
    WaitKind.SLEEP: "#4c9fb0",
    WaitKind.WAKE: "#2f7f8f",
    WaitKind.ASK: "#444444",
    WaitKind.RESTART: "#c0392b",
}
_WAITING = (WaitKind.WAIT, WaitKind.RESTART)  # an open wait is not work


@dataclass(slots=True, frozen=True)
class Event:
    """One closed wait; seconds since the epoch."""

    lane: str
    what: str
    start: float
    end: float
    detail: str = ""


@dataclass(slots=True, frozen=True)
class Lane:
    """One side's time."""

    name: str
    busy_s: float
    waited_s: float
    total_s: float

    @property
    def idle_share(self) -> float:
        return 1.0 - self.busy_s / self.total_s if self.total_s else 0.0

    @property
    def verdict(self) -> str:
        """Its idle share; of a lane that mostly waits for others, how much of the time it did."""
        if self.waited_s > self.busy_s:
            return f"waits {self.waited_s / self.total_s:.1%}"
        return f"idle {self.idle_share:.1%}"


def read_events(folder: RunFolder) -> list[Event]:
    """The events of a run in time order; a last line that was cut off is left out."""
    path = folder.path / "timeline" / FILE
    if not path.exists():
        raise UserError(f"run {folder.path}: got no {path.name}, allowed: a run that wrote one")
    events = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            events.append(Event(**json.loads(line)))
        except (json.JSONDecodeError, TypeError):
            continue
    return sorted(events, key=lambda event: (event.start, -event.end))


def lanes(events: list[Event]) -> list[Lane]:
    """Busy and total time of every lane: trainer, engines, then the others."""
    if not events:
        return []
    total = max(event.end for event in events) - min(event.start for event in events)
    by_lane: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        by_lane[event.lane].append(event)
    found = [
        Lane(name, _covered(own, waiting=False), _covered(own, waiting=True), total)
        for name, own in by_lane.items()
    ]
    return sorted(found, key=lambda lane: (_rank(lane.name), lane.name))


def _covered(events: list[Event], *, waiting: bool) -> float:
    chosen = (event for event in events if (event.what in _WAITING) == waiting)
    return sum(end - start for start, end in merge(chosen))


def _rank(name: str) -> int:
    order = ("trainer", "engine", "rewards", "eval", "checkpoint", "journal", "loop", "produce")
    return next((n for n, start in enumerate(order) if name.startswith(start)), len(order))


def merge(events: Iterable[Event], gap_s: float = 0.0) -> list[tuple[float, float]]:
    """Intervals in which at least one event is open; closer than `gap_s` are one."""
    merged: list[tuple[float, float]] = []
    for event in sorted(events, key=lambda e: e.start):
        if merged and event.start <= merged[-1][1] + gap_s:
            merged[-1] = (merged[-1][0], max(merged[-1][1], event.end))
        else:
            merged.append((event.start, event.end))
    return merged


def chrome_trace(events: list[Event]) -> dict[str, object]:
    """The Trace Event Format: complete events, one thread for each lane and overlapping call."""
    begin = events[0].start if events else 0.0
    rows: dict[tuple[str, int], int] = {}
    free_at: dict[str, list[float]] = defaultdict(list)
    trace: list[dict[str, object]] = []
    for event in events:
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


def write_timeline(folder: RunFolder, out: Path | None = None) -> Path:
    """Write the page (RUN/timeline/timeline.html by default) and trace.json beside it."""
    events = read_events(folder)
    path = out or folder.path / "timeline" / "timeline.html"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render(folder.name, events), encoding="utf-8")
    path.with_name("trace.json").write_text(json.dumps(chrome_trace(events)), encoding="utf-8")
    return path


def summary_lines(folder: RunFolder) -> list[str]:
    """The idle share of every side, in words."""
    return [
        f"{lane.name:<20} busy {lane.busy_s:8.1f} s of {lane.total_s:.1f} s, {lane.verdict}"
        for lane in lanes(read_events(folder))
    ]


def write_png(folder: RunFolder, path: Path) -> Path | None:
    """The chart as a picture; None: Pillow is not installed."""
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ImportError:
        return None
    events = read_events(folder)
    sides, zoom = lanes(events), 2
    width, height = _LEFT + _WIDTH + 90, _TOP + _ROW * len(sides) + 46
    image = Image.new("RGB", (width * zoom, height * zoom), "white")
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(12 * zoom)

    def text(x: float, y: float, words: str, colour: str = "#222222") -> None:
        draw.text((x * zoom, y * zoom), words, fill=colour, font=font)

    for x, label in _ticks(_total(sides)):
        draw.line((x * zoom, (_TOP - 8) * zoom, x * zoom, (height - 40) * zoom), fill="#dddddd")
        text(x - 14, _TOP - 26, label)
    for row, lane in enumerate(sides):
        y = _TOP + _ROW * row
        text(0, y + 3, lane.name)
        for what, x, extent, _ in _bars(lane, events, sides):
            box = (x * zoom, (y + 3) * zoom, (x + extent) * zoom, (y + _ROW - 5) * zoom)
            draw.rectangle(box, fill=_COLOURS.get(what, "#444444"))
        text(_LEFT + _WIDTH + 8, y + 3, lane.verdict, "#777777")
    x = float(_LEFT)
    for what in _kinds(events):
        draw.rectangle(
            (x * zoom, (height - 24) * zoom, (x + 10) * zoom, (height - 14) * zoom),
            fill=_COLOURS.get(what, "#444444"),
        )
        text(x + 14, height - 27, what)
        x += 30 + font.getlength(what) / zoom
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path)
    return path


def render(name: str, events: list[Event]) -> str:
    """One HTML page with an SVG inside: no script, nothing fetched."""
    sides = lanes(events)
    height = _TOP + _ROW * len(sides) + 20
    body = [_axis(_total(sides), height)]
    body += [_row(row, lane, events, sides) for row, lane in enumerate(sides)]
    legend = " ".join(
        f'<span><i style="background:{_COLOURS.get(what, "#444444")}"></i>{html.escape(what)}</span>'
        for what in _kinds(events)
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{html.escape(name)}: timeline</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<style>
body {{ font: 14px/1.4 system-ui, sans-serif; margin: 24px; color: #222; background: #fff; }}
svg {{ width: 100%; height: auto; }} text {{ font: 12px system-ui, sans-serif; fill: #222; }}
.idle {{ fill: #777; }} span {{ margin-right: 14px; }}
i {{ display: inline-block; width: 10px; height: 10px; margin-right: 4px; }}
</style></head><body>
<h1>{html.escape(name)}: who was busy when</h1>
<p>{legend}</p>
<svg viewBox="0 0 {_LEFT + _WIDTH + 90} {height}" role="img" aria-label="Gantt chart of the run">
{"".join(body)}
</svg></body></html>
"""


def _kinds(events: list[Event]) -> list[str]:
    """What there is, in the order of the legend."""
    there = {event.what for event in events}
    return [*(what for what in _COLOURS if what in there), *sorted(there - _COLOURS.keys())]


def _total(sides: list[Lane]) -> float:
    return (sides[0].total_s if sides else 0.0) or 1.0


def _ticks(total: float) -> list[tuple[float, str]]:
    return [(_LEFT + _WIDTH * part / 5, f"{total * part / 5:.1f} s") for part in range(6)]


def _bars(
    lane: Lane, events: list[Event], sides: list[Lane]
) -> Iterator[tuple[str, float, float, float]]:
    """What, from where, how wide, how many seconds; waits come first, so that work lies on them."""
    begin, total = events[0].start, _total(sides)
    kinds: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        if event.lane == lane.name:
            kinds[event.what].append(event)
    for what in sorted(kinds, key=lambda what: what not in _WAITING):
        for start, end in merge(kinds[what], gap_s=total / _MOST_BARS):
            x = _LEFT + _WIDTH * (start - begin) / total
            yield what, x, max(0.4, _WIDTH * (end - start) / total), end - start


def _axis(total: float, height: int) -> str:
    return "".join(
        f'<line x1="{x:.0f}" x2="{x:.0f}" y1="{_TOP - 8}" y2="{height - 16}" stroke="#ddd"/>'
        f'<text x="{x:.0f}" y="{_TOP - 14}" text-anchor="middle">{label}</text>'
        for x, label in _ticks(total)
    )


def _row(row: int, lane: Lane, events: list[Event], sides: list[Lane]) -> str:
    y = _TOP + _ROW * row
    parts = [f'<text x="0" y="{y + 16}">{html.escape(lane.name)}</text>']
    for what, x, width, seconds in _bars(lane, events, sides):
        colour = _COLOURS.get(what, "#444444")
        parts.append(
            f'<rect x="{x:.2f}" y="{y + 3}" width="{width:.2f}" height="{_ROW - 8}" fill="{colour}">'
            f"<title>{html.escape(what)} {seconds:.2f} s</title></rect>"
        )
    right = _LEFT + _WIDTH + 8
    parts.append(f'<text class="idle" x="{right}" y="{y + 16}">{lane.verdict}</text>')
    return "".join(parts)
