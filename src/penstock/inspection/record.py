"""What a run folder holds, as one plain record with its key figures: for the page and the closing summary.

What is missing, cut off or damaged becomes a sentence in `missing`, never an exception, because a look
is needed most when a run went wrong. Samples are read by the page's views.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

from penstock.config.source import to_toml
from penstock.errors import PenstockError, RunError
from penstock.files import read_rows
from penstock.inspection.findings import find
from penstock.inspection.findings.observed import read_observed
from penstock.inspection.track.console import LOSS, task_figures
from penstock.inspection.track.logs import Finding
from penstock.store.journal import Journal
from penstock.store.run_folder import RunFolder

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
    _read_metrics(folder, record)
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


def _read_metrics(folder: RunFolder, record: RunRecord) -> None:
    rows = _read_lines(folder.metrics, record, "no step was logged")
    by_step = {row["step"]: row for row in rows if isinstance(row.get("step"), int)}
    record.steps = sorted(by_step)
    for name in CURVES:
        values = [_number(by_step[step].get(name)) for step in record.steps]
        if any(value is not None for value in values):
            record.curves[name] = values
    record.accounts = _accounts([by_step[step] for step in record.steps])


def _accounts(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """What each task produced over the run: counts summed, times and means by `_OVER_STEPS`."""
    values: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        for task, figures in task_figures(row).items():
            for name, value in figures.items():
                if (number := _number(value)) is not None:
                    values.setdefault(task, {}).setdefault(name, []).append(number)
    return {
        task: {name: _over_steps(name)(numbers) for name, numbers in by_name.items()}
        for task, by_name in values.items()
    }


def _over_steps(name: str) -> Callable[[list[float]], float]:
    if name.startswith("part/"):
        return fmean
    return _OVER_STEPS.get(name, sum)


def _read_evaluations(folder: RunFolder, record: RunRecord) -> None:
    path = folder.evaluations / "summary.jsonl"
    # a resumed run may repeat an evaluation: the last counts
    by_step: dict[tuple[str, int], dict[str, Any]] = {}
    for row in _read_lines(path, record, "no evaluation was done"):
        scores = {name: _number(row.get(name)) for name in ("accuracy", "low", "high", "reward")}
        known = scores["accuracy"] is not None or scores["reward"] is not None
        if isinstance(row.get("task"), str) and isinstance(row.get("step"), int) and known:
            by_step[row["task"], row["step"]] = {"step": row["step"], **scores}
    for (task, _), row in sorted(by_step.items()):
        record.evaluations.setdefault(task, []).append(row)


def _read_journal(folder: RunFolder, record: RunRecord) -> None:
    if not folder.journal.is_file():
        record.missing.append(
            f"{folder.journal.name} is not there: no histograms, no drops, no samples"
        )
        return
    try:
        with closing(Journal.look(folder.journal)) as journal:
            _read_histograms(journal, record)
    except (PenstockError, TypeError, ValueError) as error:  # damage can put any type anywhere
        record.missing.append(f"{folder.journal.name} could not be read to its end: {error}")


def _read_histograms(journal: Journal, record: RunRecord) -> None:
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


def _number(value: Any) -> float | None:
    """A finite number at the precision of a plot, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
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
