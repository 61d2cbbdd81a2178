"""`penstock runs`: a line for every run in a folder: how far it is, what it reached, whether something is wrong."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.data.identity import TOTAL_STEPS
from penstock.errors import PenstockError, UserError
from penstock.inspection.findings.observed import Row
from penstock.inspection.track.console import sparkline
from penstock.inspection.track.logs import read_metrics
from penstock.rollout.evaluation.evaluate import read_summaries
from penstock.store.run_folder import CONFIG, JOURNAL, Owner, RunFolder
from penstock.store.space import folder_bytes, size_text


@dataclass(slots=True, kw_only=True)
class RunLine:
    """One run."""

    name: str
    state: str  # training | finished | stopped | killed | damaged
    steps: int = 0
    total_steps: int | None = None
    reward: float | None = None  # of the newest step
    rewards: tuple[float, ...] = ()
    held_out: str = ""  # "heldout accuracy 0.344 -> 0.977"
    findings: int = 0
    changed_at: float = 0.0  # seconds since 1970
    size_bytes: int = 0  # of all its files
    note: str = ""  # why its files cannot be read


def list_runs(folder: Path) -> list[RunLine]:
    """The runs of a folder, the newest first."""
    if not folder.is_dir():
        raise UserError(f"runs: got {str(folder)!r}, allowed: a folder with runs in it")
    found = [
        path for path in folder.iterdir() if (path / CONFIG).is_file() or (path / JOURNAL).is_file()
    ]
    lines = [read_line(RunFolder(path)) for path in found]
    for path, line in zip(found, lines, strict=True):
        line.size_bytes = folder_bytes(path)
    return sorted(lines, key=lambda run: -run.changed_at)


def read_line(folder: RunFolder) -> RunLine:
    """The line of one run; what cannot be read is left out."""
    changed = folder.path.stat().st_mtime
    if folder.metrics.exists():
        changed = max(changed, folder.metrics.stat().st_mtime)
    line = RunLine(name=folder.name, state="stopped", changed_at=changed)
    try:
        _fill(line, folder)
    except (ValueError, TypeError, ArithmeticError) as error:
        # damage can put anything anywhere: one such run must not end the look at the others
        line.state = "damaged"
        line.note = f"its files cannot be read: {type(error).__name__}: {error}"
    return line


def _fill(line: RunLine, folder: RunFolder) -> None:
    rows = list(read_metrics(folder.metrics).values())
    line.steps = int(rows[-1]["step"]) if rows else 0
    line.rewards = tuple(_numbers(rows, "reward/mean"))
    line.reward = line.rewards[-1] if line.rewards else None
    line.findings = int(sum(_numbers(rows[-1:], "findings/open")))
    line.held_out = _held_out(folder)
    try:
        total = folder.record().get(TOTAL_STEPS)
        line.total_steps = int(total) if total else folder.config().train.steps
    except (PenstockError, ValueError):
        line.state = "damaged"
    if line.total_steps and line.steps >= line.total_steps:
        line.state = "finished"
    owner = folder.owner()
    if owner is Owner.ALIVE:
        line.state = "training"
    elif owner is Owner.KILLED and line.state == "stopped":
        line.state = "killed"


def _numbers(rows: Sequence[Row], name: str) -> list[float]:
    values = (row.get(name) for row in rows)
    return [value for value in values if isinstance(value, int | float) and math.isfinite(value)]


def _held_out(folder: RunFolder) -> str:
    """The first evaluation task's score, at its first evaluation and, if it has two, its newest."""
    rows = read_summaries(folder.evaluations)
    if not rows:
        return ""
    task = rows[0]["task"]
    measure = "accuracy" if rows[0].get("accuracy") is not None else "reward"
    scores = _numbers([row for row in rows if row["task"] == task], measure)
    if not scores:
        return ""
    newest = f" -> {scores[-1]:.3f}" if len(scores) > 1 else ""
    return f"{task} {measure} {scores[0]:.3f}{newest}"


def print_runs(lines: Sequence[RunLine], console: Console, *, as_json: bool = False) -> None:
    """Print a table, or one JSON list."""
    if as_json:
        console.file.write(json.dumps([asdict(line) for line in lines]) + "\n")
        return
    is_narrow = console.width < _WIDE
    table = Table(
        box=None,
        padding=(0, 1),
        pad_edge=False,
        collapse_padding=is_narrow,
        header_style="dim",
    )
    for name, justify in (
        ("run", "left"),
        ("state", "left"),
        ("steps", "right"),
        ("reward", "right"),
    ):
        table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    if not is_narrow:
        table.add_column("")
    for name in ("held out", "findings", *([] if is_narrow else ["size"]), "changed"):
        table.add_column(name, no_wrap=True)
    for line in lines:
        steps = f"{line.steps}/{line.total_steps}" if line.total_steps else str(line.steps)
        curve = [Text(sparkline(console, line.rewards, width=16), style="cyan")]
        if is_narrow:
            curve = []
        table.add_row(
            Text(line.name, style="bold"),
            Text(line.state, style=_STYLES[line.state]),
            steps,
            "" if line.reward is None else f"{line.reward:.3f}",
            *curve,
            Text(line.held_out.rpartition(" ")[2] if is_narrow else line.held_out),
            Text(str(line.findings) if line.findings else "", style="yellow"),
            *([] if is_narrow else [size_text(line.size_bytes)]),
            _ago(time.time() - line.changed_at),
        )
    console.print(table, highlight=False)


def html_table(line: RunLine, findings: Sequence[Mapping[str, Any]], path: Path) -> str:
    """A run as a small table, which a notebook shows."""
    rewards = [f"{value:.3f}" for value in line.rewards]
    rows = {
        "state": f"{line.state}, step {line.steps} of {line.total_steps}",
        "reward": " -> ".join([*rewards[:1], *rewards[1:][-1:]]),
        "held out": line.held_out,
        "findings": ", ".join(finding["what"] for finding in findings),
        "folder": str(path),
    }
    cells = "".join(
        f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>"
        for name, value in rows.items()
        if value
    )
    return f"<table><caption>{escape(line.name)}</caption>{cells}</table>"


_WIDE = 120  # columns of a terminal from which a line shows curves and whole scores
_STYLES = {
    "training": "green",
    "finished": "",
    "stopped": "dim",
    "killed": "yellow",
    "damaged": "red",
}


def _ago(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return "now"
