"""The findings of a run that is under way: looks after every step, and tells each finding once.

A finding that ends and comes back soon is not told again. Keeps the metrics of the first and of the newest
steps only, so that a look costs the same in a long run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from penstock.config import Config
from penstock.inspection.findings.observed import Observed, Row, looked_at_settings
from penstock.inspection.findings.rules import AFTER_STEP, AT_START, find
from penstock.inspection.track.logs import Finding, each_logged_step
from penstock.store.run_folder import RunFolder
from penstock.store.space import DiskWatch
from penstock.types import Batch

_FIRST, _NEWEST = 10, 300  # steps whose metrics are kept
_AGAIN = 100  # steps after which a finding that came back is told again


class LiveFindings:
    """Consumes the metrics of every step, produces findings; `open` holds those of now."""

    def __init__(
        self,
        folder: RunFolder,
        config: Config,
        total_steps: int,
        *,
        note: Callable[[str], None] = lambda text: None,
        last_failure: Callable[[], str] = lambda: "",
    ) -> None:
        """note: tells the user. last_failure: returns why a group failed."""
        self.open: list[Finding] = []
        self._note = note
        self._facts: Mapping[str, str] = {}
        self._folder, self._config, self._total = folder.path, config, total_steps
        self._settings = looked_at_settings(config)
        self._last_failure = last_failure
        self._disk = DiskWatch(folder.path, config, total_steps)
        self._metrics = folder.metrics
        self._rows: list[Row] = []
        self._at_start: list[Finding] = []
        self._told: dict[str, int] = {}  # name -> the newest step with this finding

    @property
    def newest(self) -> Row:
        """The metrics of the newest step, in a resumed run those of its last one; none before the first step."""
        return self._rows[-1] if self._rows else {}

    def start(self, steps_done: int, facts: Mapping[str, str]) -> None:
        """Tell how much disk the run may use, and what is wrong before its first step."""
        self._facts = facts
        for _, row in each_logged_step(self._metrics):
            self._keep(row)
        self._note(self._disk.forecast(steps_done))
        self.look(steps_done)

    def look(
        self, step: int, batch: Batch | None = None, metrics: Mapping[str, Any] | None = None
    ) -> None:
        """Look at the run after a step, or without its batch before the first one; tell what is new."""
        if metrics is not None:
            self._keep({"step": step, **metrics})
        observed = Observed(
            run=str(self._folder),
            config=self._config,
            settings=self._settings,
            rows=self._rows,
            facts=self._facts,
            batch=batch,
            disk=self._disk.look(step + 1) if step < self._total else None,
            last_failure=self._last_failure,
        )
        if batch is None:
            self._at_start = find(observed, AT_START)
        self.open = [*find(observed, AFTER_STEP), *self._at_start]
        for finding in self.open:
            if step - self._told.get(finding.name, -_AGAIN) >= _AGAIN:
                self._note(f"warning: {finding}")
            self._told[finding.name] = step

    def _keep(self, row: Row) -> None:
        self._rows.append(row)
        if len(self._rows) > _FIRST + 2 * _NEWEST:
            del self._rows[_FIRST:-_NEWEST]
