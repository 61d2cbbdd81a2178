"""What a run folder holds, as one plain record with its key figures: for the page and the closing summary.

What is missing, cut off or damaged becomes a sentence in `missing`, never an exception, because a look
is needed most when a run went wrong. Samples are read by the page's views.
"""

from __future__ import annotations

import json
import math
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.config.source import to_toml
from penstock.data.identity import TOTAL_STEPS
from penstock.errors import PenstockError, RunError, UserError
from penstock.files import read_rows
from penstock.inspection.findings import find
from penstock.inspection.findings.observed import Row, read_observed
from penstock.inspection.track.console import LOSS, sparkline, task_figures
from penstock.inspection.track.logs import Finding, read_metrics
from penstock.rollout.evaluation.evaluate import read_summaries
from penstock.store.command_log import FILE as COMMANDS
from penstock.store.command_log import CommandLog
from penstock.store.journal import Journal
from penstock.store.run_folder import CONFIG, JOURNAL, Owner, RunFolder
from penstock.store.space import folder_bytes, size_text

CURVES = (
    "reward/mean",
    "accuracy/mean",
    "response_length/mean",
    "staleness/mean",
    "staleness/max",
    "loss/policy",
    LOSS,
    "kl/mean",
    "entropy/mean",
    "clip/fraction",
    "grad_norm",
    "mismatch/kl",
    "groups/zero_variance",
    "prompts/solved",
    "prompts/useful",
    "prompts/hopeless",
    "tokens/generated",
    "time/step_s",
    "time/consumer_wait_s",
    "time/producer_wait_s",
)
MAX_LENGTH_BINS = 400
_OVER_STEPS: dict[str, Callable[[list[float]], float]] = {  # figures of a task that are no counts
    "temperature": lambda values: values[-1],
    "prompts_skipped_long": max,
    "group_time_p50_s": median,
    "group_time_p99_s": max,
}


@dataclass(slots=True, kw_only=True)
class RunRecord:
    """What the page shows of a run, in plain values."""

    name: str
    path: str
    config: str = ""  # the resolved TOML
    settings: dict[str, str] = field(default_factory=dict)  # shown at the top of the page
    planned_steps: int | None = None
    missing: list[str] = field(default_factory=list)  # a sentence for each thing not read
    steps: list[int] = field(default_factory=list)
    curves: dict[str, list[float | None]] = field(default_factory=dict)  # metric -> value per step
    evaluations: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # by task name
    staleness: dict[int, int] = field(default_factory=dict)  # staleness -> trained groups
    length_bin: int = 1  # tokens in one bin of `lengths`
    lengths: list[tuple[int, int, int]] = field(default_factory=list)  # (start, finished, trained)
    groups: dict[str, int] = field(default_factory=dict)  # state -> groups
    drops: dict[str, int] = field(default_factory=dict)  # reason -> groups
    accounts: dict[str, dict[str, float]] = field(default_factory=dict)  # task -> figure -> value
    findings: list[Finding] = field(default_factory=list)


def read_run(folder: RunFolder) -> RunRecord:
    """The record of everything that the folder has."""
    record = RunRecord(name=folder.path.resolve().name, path=str(folder.path))
    config = _read_config(folder, record)
    rows = _read_lines(folder.metrics, record, "no step was logged")
    by_step = {row["step"]: row for row in rows if isinstance(row.get("step"), int)}
    record.steps = sorted(by_step)
    for name in CURVES:
        values = [as_number(by_step[step].get(name)) for step in record.steps]
        if any(value is not None for value in values):
            record.curves[name] = values
    produced: dict[str, dict[str, list[float]]] = {}  # by task, then by figure
    for step in record.steps:
        for task, figures in task_figures(by_step[step]).items():
            for name, value in figures.items():
                if (number := as_number(value)) is not None:
                    produced.setdefault(task, {}).setdefault(name, []).append(number)
    record.accounts = {
        task: {
            name: (fmean if name.startswith("part/") else _OVER_STEPS.get(name, sum))(numbers)
            for name, numbers in by_name.items()
        }
        for task, by_name in produced.items()
    }
    if _at(config, "eval", "tasks") != {} or (folder.evaluations / "summary.jsonl").exists():
        _read_evaluations(folder, record)
    _read_journal(folder, record)
    if config and record.steps:
        record.findings = find(read_observed(folder))
    return record


def _read_config(folder: RunFolder, record: RunRecord) -> dict[str, Any]:
    try:
        record.config = to_toml(folder.config())
        tree = tomllib.loads(record.config)
    except (OSError, ValueError, RunError) as error:
        record.missing.append(f"config cannot be read: {_reason(error)}")
        return {}
    steps, tasks = _at(tree, "train", "steps"), _at(tree, "tasks")
    record.planned_steps = steps if isinstance(steps, int) else None
    named = {
        "model": _at(tree, "model", "path"),
        "task": ", ".join(tasks) if isinstance(tasks, dict) else None,
        "algorithm": _at(tree, "algorithm", "name"),
        "seed": _at(tree, "seed"),
        "staleness bound": _at(tree, "produce", "max_staleness"),
        "groups per step": _at(tree, "train", "groups_per_step"),
        "responses per group": _at(tree, "sampling", "num_generations"),
        "learning rate": _at(tree, "train", "lr"),
        "launch": _at(tree, "launch", "kind"),
    }
    record.settings = {name: str(value) for name, value in named.items() if value not in (None, "")}
    return tree


def _at(tree: Any, *keys: str) -> Any:
    for key in keys:
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree


def _read_evaluations(folder: RunFolder, record: RunRecord) -> None:
    path = folder.evaluations / "summary.jsonl"
    # a resumed run may repeat an evaluation: the last counts
    by_step: dict[tuple[str, int], dict[str, Any]] = {}
    for row in _read_lines(path, record, "no evaluation was done"):
        scores = {name: as_number(row.get(name)) for name in ("accuracy", "low", "high", "reward")}
        known = scores["accuracy"] is not None or scores["reward"] is not None
        if isinstance(row.get("task"), str) and isinstance(row.get("step"), int) and known:
            by_step[row["task"], row["step"]] = {"step": row["step"], **scores}
    for (task, _), row in sorted(by_step.items()):
        record.evaluations.setdefault(task, []).append(row)


def _read_journal(folder: RunFolder, record: RunRecord) -> None:
    """What happened to the groups, the staleness of trained ones, and the lengths of responses."""
    if not folder.journal.is_file():
        record.missing.append(
            f"{folder.journal.name} is not there: no histograms, no drops, no samples"
        )
        return
    try:
        with closing(Journal.look(folder.journal)) as journal:
            record.groups = dict(journal.query("SELECT state, COUNT(*) FROM groups GROUP BY state"))
            record.drops = {
                str(reason): count
                for reason, count in journal.query(
                    "SELECT drop_reason, COUNT(*) FROM groups WHERE state = 'dropped' GROUP BY 1 ORDER BY 2 DESC"
                )
            }
            record.staleness = dict(
                journal.query(
                    "SELECT staleness, COUNT(*) FROM groups WHERE state = 'trained' AND staleness IS NOT NULL"
                    " GROUP BY staleness ORDER BY staleness"
                )
            )
            longest = journal.query("SELECT MAX(num_tokens) FROM rollouts")[0][0] or 0
            record.length_bin = max(1, math.ceil((longest + 1) / MAX_LENGTH_BINS))
            record.lengths = journal.query(
                "SELECT num_tokens / ? * ?, COUNT(*), COUNT(step) FROM rollouts"
                " WHERE finish_reason IN ('stop', 'length') GROUP BY 1 ORDER BY 1",
                (record.length_bin, record.length_bin),
            )
    except (PenstockError, TypeError, ValueError) as error:  # damage can put any type anywhere
        record.missing.append(f"{folder.journal.name} could not be read to its end: {error}")


def _read_lines(path: Path, record: RunRecord, absence: str) -> list[dict[str, Any]]:
    """The objects in a file of JSON lines; what is missing or damaged becomes a sentence."""
    name = path.relative_to(record.path)
    try:
        rows, damaged = read_rows(path)
    except FileNotFoundError:
        record.missing.append(f"{name} is not there: {absence}")
        return []
    except OSError as error:
        record.missing.append(f"{name} cannot be read: {_reason(error)}")
        return []
    if damaged == [len(rows) + 1]:
        record.missing.append(f"{name}: the last line is cut off and was left out")
    elif damaged:
        record.missing.append(
            f"{name}: {len(damaged)} lines are damaged, the first is line {damaged[0]}"
        )
    if not rows and not damaged:
        record.missing.append(f"{name} is empty: {absence}")
    return rows


_LARGEST = 1e300  # a sum of such numbers is finite


def as_number(value: Any) -> float | None:
    """A finite number at the precision of a plot, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < _LARGEST:
        return None
    return float(f"{value:.7g}")


def _reason(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error)


# -- key figures -------------------------------------------------------------------------------


@dataclass(slots=True, frozen=True, kw_only=True)
class FigureChange:
    """A figure at the first and at the last step that has it."""

    first: float
    last: float


@dataclass(slots=True, frozen=True, kw_only=True)
class Figures:
    """Key figures; None where the run folder does not hold the value."""

    steps: int
    planned_steps: int | None
    seconds: float | None  # time of all steps together
    held_out: dict[str, FigureChange]  # by evaluation task
    measures: dict[str, str]  # what it is by evaluation task: accuracy; reward if none was judged
    reward: FigureChange | None
    accuracy: FigureChange | None
    loss: FigureChange | None  # of demonstrations
    tokens_per_s: float | None  # generated tokens per second of training time
    largest_staleness: int | None
    trainer_waited: float | None  # share of the time, 0 to 1
    producer_waited: float | None
    drawn: int | None  # number of groups
    trained: int | None
    dropped: int | None


def take_figures(record: RunRecord) -> Figures:
    """The key figures of a run."""
    curves = record.curves
    seconds = _total(curves.get("time/step_s"))
    tokens = _total(curves.get("tokens/generated"))
    largest = max((v for v in curves.get("staleness/max", ()) if v is not None), default=None)
    known = bool(record.groups)
    measures = {
        task: "reward" if any(row["accuracy"] is None for row in rows) else "accuracy"
        for task, rows in record.evaluations.items()
    }
    return Figures(
        steps=len(record.steps),
        planned_steps=record.planned_steps,
        seconds=seconds,
        held_out={
            task: FigureChange(first=rows[0][measures[task]], last=rows[-1][measures[task]])
            for task, rows in record.evaluations.items()
        },
        measures=measures,
        reward=_change(curves.get("reward/mean")),
        accuracy=_change(curves.get("accuracy/mean")),
        loss=_change(curves.get(LOSS)),
        tokens_per_s=tokens / seconds if tokens is not None and seconds else None,
        largest_staleness=None if largest is None else round(largest),
        trainer_waited=_share(_total(curves.get("time/consumer_wait_s")), seconds),
        producer_waited=_share(_total(curves.get("time/producer_wait_s")), seconds),
        drawn=sum(record.groups.values()) if known else None,
        trained=record.groups.get("trained", 0) if known else None,
        dropped=record.groups.get("dropped", 0) if known else None,
    )


def _change(values: Sequence[float | None] | None) -> FigureChange | None:
    present = [value for value in values or () if value is not None]
    return FigureChange(first=present[0], last=present[-1]) if present else None


def _total(values: Sequence[float | None] | None) -> float | None:
    return None if values is None else sum(value for value in values if value is not None)


def _share(part: float | None, whole: float | None) -> float | None:
    """Part / whole, at most 1: a wait may begin before the step that it is counted in."""
    return min(1.0, part / whole) if part is not None and whole else None


# -- a line for every run of a folder -----------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class RunLine:
    """One run."""

    name: str
    state: str  # training | serving | finished | stopped | killed | damaged
    steps: int = 0
    total_steps: int | None = None
    reward: float | None = None  # of the newest step
    rewards: tuple[float, ...] = ()
    held_out: str = ""  # "heldout accuracy 0.344 -> 0.977"
    findings: int = 0
    changed_at: float = 0.0  # seconds since 1970
    size_bytes: int = 0  # of all its files
    note: str = ""  # why its files cannot be read
    service: ServiceLine | None = None  # of a service's folder, which has no steps and no rewards


@dataclass(slots=True, kw_only=True)
class ServiceLine:
    """What a service's folder has in the list."""

    model: str
    models: int
    waiting: int  # commands
    last: str  # kind of the newest command

    @property
    def brief(self) -> str:
        return f"{self.models} {'model' if self.models == 1 else 'models'}"

    def __str__(self) -> str:
        last = f", last {self.last}" if self.last else ""
        return f"{self.brief} of {self.model}, {self.waiting} waiting{last}"


CREATED = "kind = 'create_model' AND outcome = 'done'"  # of the log's commands
_MOST_KIND, _MOST_PATH = 40, 200  # characters
_MODEL = f"""SELECT json_extract(value, '$.model.path') FROM facts
    WHERE name = 'config' AND length(value) < {1 << 20}"""


def list_runs(folder: Path) -> list[RunLine]:
    """The runs of a folder, the newest first."""
    if not folder.is_dir():
        raise UserError(f"runs: got {str(folder)!r}, allowed: a folder with runs in it")
    names = (CONFIG, JOURNAL, COMMANDS)
    found = [path for path in folder.iterdir() if any((path / name).is_file() for name in names)]
    lines = [read_line(RunFolder(path)) for path in found]
    for path, line in zip(found, lines, strict=True):
        line.size_bytes = folder_bytes(path)
    return sorted(lines, key=lambda run: -run.changed_at)


def read_line(folder: RunFolder) -> RunLine:
    """The line of one run; what cannot be read is left out."""
    changed, log = folder.path.stat().st_mtime, folder.commands
    for path in (folder.metrics, log, log.with_name(f"{log.name}-wal")):
        with suppress(FileNotFoundError):
            changed = max(changed, path.stat().st_mtime)
    line = RunLine(name=folder.name, state="stopped", changed_at=changed)
    try:
        if log.is_file():
            _fill_state(line, folder, "serving")
            try:
                with CommandLog.look(log) as commands:
                    ((models, waiting, newest),) = commands.query(
                        f"SELECT COUNT(*) FILTER (WHERE {CREATED}), COUNT(*) FILTER (WHERE outcome IS NULL), "
                        "MAX(number) FROM commands"
                    )
                    last = commands.query("SELECT kind FROM commands WHERE number = ?", (newest,))
                    line.service = ServiceLine(
                        model=model_of(commands),
                        models=models,
                        waiting=waiting,
                        last=str(last[0][0])[:_MOST_KIND] if last else "",
                    )
            except PenstockError as error:
                line.state, line.note = "damaged", str(error)
        else:
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
            _fill_state(line, folder, "training")
    except (ValueError, TypeError, ArithmeticError) as error:
        # damage can put anything anywhere: one such run must not end the look at the others
        line.state = "damaged"
        line.note = f"its files cannot be read: {type(error).__name__}: {error}"
    return line


def _fill_state(line: RunLine, folder: RunFolder, alive: str) -> None:
    owner = folder.owner()
    if owner is Owner.ALIVE:
        line.state = alive
    elif owner is Owner.KILLED and line.state == "stopped":
        line.state = "killed"


def model_of(log: CommandLog) -> str:
    """The base model of a service."""
    rows = log.query(_MODEL)
    return str(rows[0][0])[:_MOST_PATH] if rows else ""


def _numbers(rows: Sequence[Row], name: str) -> list[float]:
    values = (row.get(name) for row in rows)
    return [v for v in values if isinstance(v, int | float) and abs(v) < _LARGEST]


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
    for name in ("run", "state"):
        table.add_column(name, no_wrap=True)
    for name in ("steps", "reward"):
        table.add_column(name, justify="right", no_wrap=True)
    if not is_narrow:
        table.add_column("")
    for name in ("eval" if is_narrow else "held out", "findings", "size", "changed"):
        table.add_column(name, no_wrap=True)
    for line in lines:
        steps = f"{line.steps}/{line.total_steps}" if line.total_steps else str(line.steps)
        held_out = line.held_out.rpartition(" ")[2] if is_narrow else line.held_out
        if line.service is not None:
            steps, held_out = "", line.service.brief if is_narrow else str(line.service)
        curve = Text(sparkline(console, line.rewards, width=16), style="cyan")
        table.add_row(
            Text(line.name, style="bold"),
            Text(line.state, style=_STYLES[line.state]),
            steps,
            "" if line.reward is None else f"{line.reward:.3f}",
            *([] if is_narrow else [curve]),
            Text(held_out),
            Text(str(line.findings) if line.findings else "", style="yellow"),
            size_text(line.size_bytes),
            _since(time.time() - line.changed_at),
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
    "serving": "green",
    "finished": "",
    "stopped": "dim",
    "killed": "yellow",
    "damaged": "red",
}


def _since(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return "now"
