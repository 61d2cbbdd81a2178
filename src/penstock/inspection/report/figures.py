"""The key figures of a run, computed from its record, for the report and the closing summary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.inspection.report.data import RunRecord


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
    tokens_per_s: float | None  # generated tokens per second of training time
    largest_staleness: int | None
    trainer_waited: float | None  # share of the time, 0 to 1
    producer_waited: float | None
    drawn: int | None  # number of groups
    trained: int | None
    dropped: int | None


def take_figures(record: RunRecord) -> Figures:
    """Compute the key figures of a run."""
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
    """Return part / whole, at most 1: a wait may begin before the step that it is counted in."""
    return min(1.0, part / whole) if part is not None and whole else None
