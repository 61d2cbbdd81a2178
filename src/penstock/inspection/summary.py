"""What `penstock train`, `eval` and `doctor` print for a person: summary and tables.

The summary reads the run folder, so that it covers a resumed run from its first step.
"""

from __future__ import annotations

import json
from dataclasses import asdict

from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.files import count, pasted
from penstock.inspection.findings import find
from penstock.inspection.findings.observed import read_observed
from penstock.inspection.record import FigureChange, Figures, RunRecord, read_run, take_figures
from penstock.inspection.timeline import worked_s
from penstock.inspection.track.console import LOSS, fact_table, finding_table, sparkline
from penstock.rollout.evaluation.evaluate import EvalResult, read_scores
from penstock.store.checkpoint import CheckpointStore
from penstock.store.run_folder import RunFolder


def print_summary(console: Console, folder: RunFolder) -> None:
    """Print what the run reached, how each side spent its time, what was dropped, and what is next."""
    record = read_run(folder)
    figures = take_figures(record)
    table = fact_table()
    # the time of the steps, then of all sessions of the run: a pause is in neither
    worked = worked_s(folder)
    training = "" if figures.seconds is None else f" in {duration(figures.seconds)}"
    rest = "" if worked is None else f", {duration(worked)} with starts and evaluations"
    for name, value in _lines(console, record, figures, f"{figures.steps}{training}{rest}"):
        table.add_row(name, value)
    console.print()
    console.print(table)
    if record.findings:
        console.print()
        console.print(finding_table(record.findings))
    report, paths = folder.path / "report.html", list[tuple[str, object]]()
    if report.is_file():
        paths.append(("report", report))
    paths.append(("run folder", folder.path))
    store = CheckpointStore(folder.checkpoints)
    if (model := store.newest_model()) is not None:
        scores = read_scores(folder.evaluations).get(folder.config().checkpoint.keep_best, {})
        best = "--step best " if scores.keys() & store.steps() else ""
        paths += [
            ("model", model),
            ("next", f"penstock rollouts {pasted(folder.path)}"),
            ("next", f"penstock chat {pasted(folder.path)}"),
            ("next", f"penstock export {pasted(folder.path)} {best}--to FOLDER"),
        ]
    for name, path in paths:  # never wrapped, so that it can be copied
        console.print(Text.assemble((f"{name}: ", "dim"), (str(path), "bold")), soft_wrap=True)


def print_findings(folder: RunFolder, console: Console, *, as_json: bool = False) -> int:
    """Print what is wrong with a run and what to change; return 1 if something is, else 0."""
    observed = read_observed(folder)
    findings = find(observed)
    if as_json:
        console.file.write(json.dumps([asdict(finding) for finding in findings]) + "\n")
    elif findings:
        console.print(finding_table(findings))
    else:
        console.print(
            f"No problem was found in {count(observed.last_step, 'step')}.", highlight=False
        )
    return int(bool(findings))


def print_evaluations(console: Console, results: list[EvalResult]) -> None:
    """Print one row per evaluation task."""
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="dim")
    table.add_column("task", no_wrap=True)
    several = sorted({k for result in results for k in result.pass_at if k > 1})
    passes = [f"pass@{k}" for k in several]
    turns = ["turns"] if any(result.turns is not None for result in results) else []
    measured = (*passes, "reward", "tokens", *turns, "samples", "failed")
    for column in ("accuracy", "95 % CI", *measured):
        table.add_column(column, justify="right", no_wrap=True)
    for result in results:
        table.add_row(
            Text(result.task),
            Text(_figure(result.accuracy), style="bold"),
            "-" if result.low is None else f"{result.low:.2f}-{result.high:.2f}",
            *(f"{result.pass_at[k]:.3f}" if k in result.pass_at else "-" for k in several),
            _figure(result.reward),
            f"{result.response_length:.1f}",
            *(("-" if result.turns is None else f"{result.turns:.1f}") for _ in turns),
            str(result.samples),
            Text(str(result.failures), style="red" if result.failures else ""),
        )
    console.print(table, highlight=False)


def _lines(
    console: Console, record: RunRecord, figures: Figures, steps: str
) -> list[tuple[str, Text]]:
    lines = []
    for task, rows in record.evaluations.items():
        measure = figures.measures[task]
        bounds = (0.0, 1.0) if measure == "accuracy" else (None, None)
        plot = sparkline(console, [row[measure] for row in rows], *bounds)
        lines.append((f"{task} {measure}", _change(figures.held_out[task], plot)))
    if figures.loss is not None:
        lines.append(("loss", _change(figures.loss, sparkline(console, record.curves[LOSS]))))
    elif figures.reward is not None:
        plot = sparkline(console, record.curves["reward/mean"])
        lines.append(("reward", _change(figures.reward, plot)))
    else:
        lines.append(("reward", Text("not logged")))
    lines.append(("steps", Text(steps)))
    if figures.tokens_per_s is not None:
        lines.append(("generated", Text(f"{figures.tokens_per_s:,.0f} tokens/s")))
    if figures.largest_staleness is not None:
        lines.append(("largest staleness", Text(str(figures.largest_staleness))))
    if figures.trainer_waited is not None and figures.producer_waited is not None:
        waits = f"trainer {figures.trainer_waited:.0%}, producer {figures.producer_waited:.0%} of the time"
        lines.append(("waited", Text(waits)))
    if record.groups:
        reasons = ", ".join(f"{count} {reason}" for reason, count in record.drops.items())
        drops = f"{figures.dropped} of {figures.drawn} groups" + (f": {reasons}" if reasons else "")
        lines.append(("dropped", Text(drops, style="yellow" if figures.dropped else "")))
    lines += [("note", Text(text, style="yellow")) for text in record.missing]
    return lines


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _change(change: FigureChange, plot: str) -> Text:
    return Text.assemble(
        f"{change.first:.3f} -> ", (f"{change.last:.3f}", "bold"), ("  " + plot, "cyan")
    )


def duration(seconds: float) -> str:
    """A length of time as a person says it."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{seconds:.1f} s"
