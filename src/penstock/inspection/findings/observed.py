"""What the rules look at: the config, the metrics of every step, the newest batch, and facts of the start.

Plain values: the driver makes an `Observed` after every step (`live.py`), `read_observed` makes the same
from a run folder.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any

from penstock.config import Config
from penstock.data.identity import TOTAL_STEPS
from penstock.errors import PenstockError
from penstock.inspection.track.logs import read_metrics
from penstock.store.journal import Journal
from penstock.store.run_folder import RunFolder
from penstock.store.space import DiskSpace, DiskWatch
from penstock.training.algo import ALGORITHMS
from penstock.training.algo.method import run_settings
from penstock.training.algo.settings import AlgorithmSettings
from penstock.types import Batch

WINDOW = 5  # steps over which a metric is averaged

Row = Mapping[str, Any]


@dataclass(slots=True, frozen=True, kw_only=True)
class Observed:
    """A run up to its newest step."""

    run: str  # what `penstock rollouts` is given
    config: Config
    settings: AlgorithmSettings  # of the algorithm (`looked_at_settings`)
    rows: Sequence[Row] = ()  # metrics of each step, in order, with `step`
    facts: Mapping[str, str] = field(default_factory=dict)  # the journal's identity (identity.py)
    batch: Batch | None = None  # of the newest step
    disk: DiskSpace | None = None  # None: not looked at, or nothing more will be written
    last_failure: Callable[[], str] = lambda: ""  # the error of the newest failed group

    @property
    def last_step(self) -> int:
        return int(self.rows[-1]["step"]) if self.rows else 0

    def newest(self, name: str, count: int) -> list[float]:
        """A metric of the newest steps, at most `count`; NaN where a step has none."""
        return [_number(row.get(name)) for row in self.rows[-count:]]

    def now(self, name: str, window: int = WINDOW) -> float:
        """A metric's mean over the newest steps; NaN if fewer than `window` have it."""
        newest = self.newest(name, window)
        return mean(newest) if len(newest) == window else math.nan

    def at_start(self, name: str, window: int = WINDOW) -> float:
        """A metric's mean over the first steps; NaN if the run is not twice as long yet."""
        if len(self.rows) < 2 * window:
            return math.nan
        return mean([_number(row.get(name)) for row in self.rows[:window]])

    def since(self, name: str, holds: Callable[[float], bool], window: int = WINDOW) -> int | None:
        """The step since which the metric's mean over `window` steps has held; None: it does not."""
        value, first = (lambda index: _number(self.rows[index].get(name))), None
        for end in range(len(self.rows), window - 1, -1):
            if not holds(mean([value(index) for index in range(end - window, end)])):
                break
            first = end - window
        if first is None:
            return None
        alone = (index for index in range(first, len(self.rows)) if holds(value(index)))
        return int(self.rows[next(alone, first)]["step"])

    def steps_above(self, name: str, limit: float, count: int) -> list[int]:
        """Those of the newest steps, at most `count`, whose metric is above a limit."""
        return [int(row["step"]) for row in self.rows[-count:] if _number(row.get(name)) > limit]

    def total(self, name: str, count: int) -> float:
        """The sum of a metric over the newest steps, at most `count`."""
        values = (_number(row.get(name)) for row in self.rows[-count:])
        return sum(value for value in values if not math.isnan(value))

    def share(self, name: str, count: int) -> float:
        """Which share of the newest steps passed with a wait, as a median; NaN before `count` steps."""
        pairs = zip(self.newest(name, count), self.newest("time/step_s", count), strict=True)
        shares = sorted(min(1.0, wait / step) for wait, step in pairs if wait >= 0 and step > 0)
        return shares[count // 2] if len(shares) == count else math.nan

    def fact(self, name: str) -> dict[str, Any]:
        """A fact of the start; empty if the run did not record it."""
        try:
            fact = json.loads(self.facts.get(name, "{}"))
        except ValueError:
            return {}
        return fact if isinstance(fact, dict) else {}


def looked_at_settings(config: Config) -> AlgorithmSettings:
    """The algorithm's settings without importing code of the run: an algorithm of its own counts as GRPO."""
    algorithm = config.algorithm
    if algorithm.name not in ALGORITHMS:
        algorithm = algorithm.model_copy(update={"name": "grpo"})
    return run_settings(config.model_copy(update={"algorithm": algorithm}))


def mean(values: Sequence[float]) -> float:
    """The mean of the numbers; NaN if there is none."""
    numbers = [value for value in values if not math.isnan(value)]
    return sum(numbers) / len(numbers) if numbers else math.nan


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    return float(value)


def read_observed(folder: RunFolder) -> Observed:
    """Read a run folder; what is missing or damaged is left out."""
    config = folder.config()
    rows = list(read_metrics(folder.metrics).values())
    facts, batch, failure = dict[str, str](), None, ""
    # damage can put any type anywhere
    with suppress(PenstockError, TypeError, ValueError):
        with closing(Journal.look(folder.journal)) as journal:
            failures = journal.query(
                "SELECT reason FROM events WHERE status = 'failed' AND reason != '' ORDER BY at DESC LIMIT 1"
            )
            identity = journal.read_identity()
            batch = journal.batch(rows[-1]["step"]) if rows else None
            facts, failure = identity, str(failures[0][0]) if failures else ""
    total = facts.get(TOTAL_STEPS)
    steps = int(total) if total and total.isdigit() else config.train.steps
    done = rows[-1]["step"] if rows else 0
    disk = None
    if steps and done < steps:
        disk = DiskWatch(folder.path, config, steps, first=(0, 0)).look(done + 1)
    return Observed(
        run=str(folder.path),
        config=config,
        settings=looked_at_settings(config),
        rows=rows,
        facts=facts,
        batch=batch,
        disk=disk,
        last_failure=lambda: failure,
    )
