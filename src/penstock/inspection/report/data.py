"""Read a run folder into one plain record: what the report and the closing summary show.

What is missing, cut off or damaged becomes a sentence in `missing`, never an exception, because a report
is needed most when a run went wrong. Computes no figures (`figures.py`) and no page (`page.py`).
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

from penstock.config.source import to_toml
from penstock.errors import PenstockError, RunError
from penstock.inspection.findings import find
from penstock.inspection.findings.observed import read_observed
from penstock.inspection.rollout_viewer import message_text, views_of_group
from penstock.store.journal import Journal
from penstock.store.run_folder import RunFolder
from penstock.types import Finding

CURVES = (
    "reward/mean",
    "accuracy/mean",
    "response_length/mean",
    "staleness/mean",
    "staleness/max",
    "loss/policy",
    "kl/mean",
    "entropy/mean",
    "clip/fraction",
    "grad_norm",
    "mismatch/kl",
    "groups/zero_variance",
    "tokens/generated",
    "time/step_s",
    "time/consumer_wait_s",
    "time/producer_wait_s",
)
MAX_TRAINED_GROUPS = 30
MAX_DROPPED_GROUPS = 8
MAX_PER_GROUP = 8
MAX_TEXT = 6000  # characters of a prompt or a response that are embedded
MAX_CONVERSATION = 30_000  # characters of an agent's conversation
MAX_LENGTH_BINS = 400
_OVER_STEPS: dict[str, Callable[[list[float]], float]] = {  # figures of a task that are no counts
    "temperature": lambda values: values[-1],
    "prompts_skipped_long": max,
    "group_time_p50_s": median,
    "group_time_p99_s": max,
}


@dataclass(slots=True, kw_only=True)
class RunRecord:
    """What the report shows of a run, in plain values."""

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
    samples: list[dict[str, Any]] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)


def read_run(folder: RunFolder, *, samples: bool = True) -> RunRecord:
    """Read everything that the folder has, or all but the samples; return the record."""
    record = RunRecord(name=folder.path.resolve().name, path=str(folder.path))
    config = _read_config(folder, record)
    _read_metrics(folder, record)
    if _at(config, "eval", "tasks") != {} or (folder.evaluations / "summary.jsonl").exists():
        _read_evaluations(folder, record)
    _read_journal(folder, record, samples)
    if samples and not record.samples:
        _read_rollout_log(folder, record)
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
    """Return what each task produced over the run: counts summed, times and means by `_OVER_STEPS`."""
    found: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        for key, given in row.items():
            words, value = key.split("/", 2), _number(given)
            if len(words) == 3 and words[0] == "tasks" and value is not None:
                found.setdefault(words[1], {}).setdefault(words[2], []).append(value)
    return {
        task: {name: _over_steps(name)(values) for name, values in figures.items()}
        for task, figures in found.items()
    }


def _over_steps(name: str) -> Callable[[list[float]], float]:
    if name.startswith("part/"):
        return fmean
    return _OVER_STEPS.get(name, sum)


def _read_evaluations(folder: RunFolder, record: RunRecord) -> None:
    path = folder.evaluations / "summary.jsonl"
    found: dict[
        tuple[str, int], dict[str, Any]
    ] = {}  # a resumed run may repeat one: the last counts
    for row in _read_lines(path, record, "no evaluation was done"):
        scores = {name: _number(row.get(name)) for name in ("accuracy", "low", "high", "reward")}
        known = scores["accuracy"] is not None or scores["reward"] is not None
        if isinstance(row.get("task"), str) and isinstance(row.get("step"), int) and known:
            found[row["task"], row["step"]] = {"step": row["step"], **scores}
    for (task, _), row in sorted(found.items()):
        record.evaluations.setdefault(task, []).append(row)


def _read_journal(folder: RunFolder, record: RunRecord, samples: bool) -> None:
    if not folder.journal.is_file():
        record.missing.append(
            f"{folder.journal.name} is not there: no histograms, no drops, fewer samples"
        )
        return
    try:
        with closing(Journal.look(folder.journal)) as journal:
            _read_histograms(journal, record)
            if samples:
                _read_samples(journal, record)
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


def _read_samples(journal: Journal, record: RunRecord) -> None:
    """Add samples: whole groups spread evenly over the steps, and dropped groups."""
    trained = journal.query(
        "SELECT group_id FROM groups WHERE state = 'trained' ORDER BY step, position"
    )
    dropped = journal.query(
        "SELECT DISTINCT group_id FROM rollouts WHERE drop_reason IS NOT NULL ORDER BY group_id"
    )
    chosen = _spread(trained, MAX_TRAINED_GROUPS) + _spread(dropped, MAX_DROPPED_GROUPS)
    damaged = []
    for (group_id,) in chosen:
        try:
            samples = views_of_group(journal, group_id)[:MAX_PER_GROUP]
        except RunError as error:
            damaged.append(str(error))
            continue
        for sample in samples:
            row = sample.plain() | {"fate": sample.fate}
            row["prompt"] = clip("\n".join(message_text(m) for m in sample.prompt))
            row["response"] = clip(sample.response)
            clip_turns(row)
            record.samples.append(row)
    if damaged:
        record.missing.append(f"{len(damaged)} groups were left out of the samples: {damaged[0]}")


def _spread(items: list[Any], count: int) -> list[Any]:
    """Return at most `count` items at even distances, with the first and the last."""
    if len(items) <= count:
        return items
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]


def _read_rollout_log(folder: RunFolder, record: RunRecord) -> None:
    """Add samples from rollouts.jsonl, which has fewer of them, when there is no journal."""
    rows = _read_lines(folder.path / "rollouts.jsonl", record, "no samples were logged")
    record.samples = [_logged_sample(r) for r in _spread(rows, MAX_TRAINED_GROUPS * MAX_PER_GROUP)]


def _logged_sample(row: dict[str, Any]) -> dict[str, Any]:
    messages, parts, versions = row.get("prompt"), row.get("parts"), row.get("versions")
    prompt = (
        [message_text(m) for m in messages if isinstance(m, dict)]
        if isinstance(messages, list)
        else []
    )
    step, answer = row.get("step"), row.get("gt_answer")
    return {
        "rollout_id": str(row.get("rollout_id", "")),
        "group_id": str(row.get("group_id", "")),
        "task": str(row.get("task", "")),
        "prompt": clip("\n".join(prompt)),
        "response": clip(str(row.get("response", ""))),
        "gt_answer": None if answer is None else str(answer),
        "reward": _number(row.get("reward")),
        "parts": {k: _number(v) for k, v in parts.items()} if isinstance(parts, dict) else {},
        "note": "",
        "versions": [(_number(v), 0) for v in versions] if isinstance(versions, list) else [],
        "num_tokens": _number(row.get("response_length")),
        "finish_reason": str(row.get("finish_reason", "")),
        "state": "trained",
        "step": step if isinstance(step, int) else None,
        "fate": f"trained in step {step}",
        "turns": [],
    }


def _read_lines(path: Path, record: RunRecord, absence: str) -> list[dict[str, Any]]:
    """Return the JSON objects of a JSONL file; report lines that are not JSON objects."""
    name = path.relative_to(record.path)
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        record.missing.append(f"{name} is not there: {absence}")
        return []
    except OSError as error:
        record.missing.append(f"{name} cannot be read: {_reason(error)}")
        return []
    rows, bad = [], []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if isinstance(row, dict):
            rows.append(row)
        else:
            bad.append(number)
    if bad == [len(lines)]:
        record.missing.append(f"{name}: the last line is cut off and was left out")
    elif bad:
        record.missing.append(f"{name}: {len(bad)} lines are damaged, the first is line {bad[0]}")
    if not rows and not bad:
        record.missing.append(f"{name} is empty: {absence}")
    return rows


def _number(value: Any) -> float | None:
    """Return a finite number at the precision of a plot, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(f"{value:.7g}")


def clip(text: str) -> str:
    """Return a text as long as a page may hold."""
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}\n[cut: {len(text)} characters]"


def clip_turns(row: dict[str, Any]) -> None:
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


def _reason(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error)
