"""The progress display: a live panel on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from penstock import files
from penstock.inspection.track.account_text import account_lines
from penstock.inspection.track.finding_text import finding_table
from penstock.inspection.track.protocol import RunInfo
from penstock.inspection.track.sparkline import sparkline
from penstock.types import Rollout

_PLAIN_INTERVAL_S = 5.0
_SHOWN_FINDINGS = 3
_KEPT = 1000  # values of a curve; a longer one is thinned out


class ConsoleTracker:
    """Shows step, time left, reward and held-out curves, samples, the open waits and findings."""

    def __init__(self, info: RunInfo, console: Console | None = None) -> None:
        self._console = console or files.console(stderr=True)
        self._info = info
        self._metrics: dict[str, float] = {}
        self._rewards: list[float | None] = []
        self._evals: dict[str, list[float | None]] = {}  # "heldout accuracy" -> values
        self._last_plain = 0.0
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            MofNCompleteColumn(),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("[dim]left"),
            TimeRemainingColumn(),
            console=self._console,
        )
        self._bar = self._progress.add_task(
            "step", total=info.total_steps, completed=info.first_step
        )
        self._batch = Progress(  # what is ready of the next step: no time of its own
            TextColumn("[dim]{task.description}"),
            MofNCompleteColumn(),
            BarColumn(style="dim", complete_style="dim", finished_style="dim"),
            console=self._console,
        )
        self._batch_bar = self._batch.add_task("next", total=None)
        self._live: Live | None = None
        if self._console.is_terminal:
            self._live = Live(
                console=self._console, get_renderable=self._render, refresh_per_second=4
            )
            self._live.start()

    def log_step(self, step: int, metrics: dict[str, float]) -> None:
        self._metrics = metrics
        self._rewards.append(metrics.get("reward/mean"))
        if len(self._rewards) > 2 * _KEPT:
            self._rewards = self._rewards[::2]
        self._progress.update(self._bar, completed=step)
        if self._live is None:
            self._plain_line(step)

    def log_eval(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            task, _, measure = name.removeprefix("eval/").rpartition("/")
            if measure == "accuracy" or f"eval/{task}/accuracy" not in metrics:
                self._evals.setdefault(f"{task} {measure}", []).append(value)
        figures = "  ".join(f"{name.removeprefix('eval/')} {v:.3f}" for name, v in metrics.items())
        line = Text.assemble(("eval", "cyan"), f" after step {step}: {figures}")
        self._console.print(line, highlight=False)

    def note(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _plain_line(self, step: int) -> None:
        now = time.monotonic()
        last = step == self._info.total_steps
        if now - self._last_plain < _PLAIN_INTERVAL_S and not last:
            return
        self._last_plain = now
        curves = [(name, f"{values[-1]:.3f}") for name, values in self._curves()]
        figures = "  ".join(f"{name} {value}" for name, value in [*curves, *self._figures()])
        self._console.print(
            f"step {step}/{self._info.total_steps}  {figures}", highlight=False, soft_wrap=True
        )
        for line in [*self._info.live().splitlines()[1:], *account_lines(self._metrics)]:
            self._console.print(f"    {line}", highlight=False, soft_wrap=True)

    def _curves(self) -> list[tuple[str, list[float | None]]]:
        found = [(name, values) for name, values in self._evals.items() if values]
        if self._rewards and self._rewards[-1] is not None:
            found.append(("reward", self._rewards))
        return found

    def _figures(self) -> list[tuple[str, str]]:
        get = self._metrics.get
        rate = get("tokens/generated", 0.0) / max(get("time/step_s", 0.0), 1e-9)
        shown = [("accuracy", f"{get('accuracy/mean', 0.0):.3f}")]
        if "accuracy/mean" not in self._metrics:  # nothing judges the answers
            shown = []
        return [
            *shown,
            ("length", f"{get('response_length/mean', 0.0):.1f}"),
            ("tokens/s", f"{rate:,.0f}"),
            (
                "staleness",
                f"{get('staleness/mean', 0.0):.2f} (max {get('staleness/max', 0.0):.0f})",
            ),
            ("trainer waited", f"{get('time/consumer_wait_s', 0.0):.2f} s"),
            ("producer waited", f"{get('time/producer_wait_s', 0.0):.2f} s"),
        ]

    # -- the panel ----------------------------------------------------------------------------

    def _render(self) -> files.Visible:
        ready, wanted = self._info.next_batch()
        self._batch.update(self._batch_bar, completed=ready, total=wanted or None)
        parts: list[RenderableType] = [self._progress, *([self._batch] if wanted else [])]
        if self._metrics or self._evals:
            parts += [self._curve_table(), self._figure_row(), self._sample_table()]
        parts.append(Text(self._info.live(), style="dim"))
        parts += [Text(line, style="dim") for line in account_lines(self._metrics)]
        if found := list(self._info.findings()):
            parts.append(finding_table(found[:_SHOWN_FINDINGS], brief=True))
            if more := len(found) - _SHOWN_FINDINGS:
                hint = f"  and {more} more: penstock doctor {self._info.folder}"
                parts += [Text(hint, style="dim")] if more > 0 else []
        return files.Visible(Group(*parts))

    def _curve_table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", no_wrap=True)
        width = max(10, min(60, self._console.width - 40))
        for name, values in self._curves():
            low, high = (0.0, 1.0) if name.endswith("accuracy") else (None, None)
            plot = sparkline(self._console, values, low, high, width)
            table.add_row(name, Text(f"{values[-1]:.3f}", style="bold"), Text(plot, style="cyan"))
        return table

    def _figure_row(self) -> Columns:
        """Return names with their values, each pair whole, in as many lines as the width needs."""
        pairs = self._figures() if self._metrics else []
        shown = [Text.assemble((f"{name} ", "dim"), value, no_wrap=True) for name, value in pairs]
        return Columns(shown, padding=(0, 2))

    def _sample_table(self) -> Table:
        """Show the best and the worst response of the newest batch."""
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", no_wrap=True)
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True, overflow="ellipsis")
        batch = self._info.batch()
        scored = [one for one in batch.rollouts if one.score is not None] if batch else []
        if scored:
            ranked = sorted(scored, key=lambda rollout: rollout.reward)
            for name, rollout in (("best", ranked[-1]), ("worst", ranked[0])):
                table.add_row(name, Text(f"{rollout.reward:.3f}"), _one_line(rollout))
        return table


def _one_line(rollout: Rollout) -> Text:
    asked = rollout.prompt.messages[-1].get("content", "") if rollout.prompt else ""
    question, answer = (" ".join(str(text).split()) for text in (asked, rollout.text))
    short = question if len(question) <= 50 else f"{question[:48]}.."
    return Text.assemble((f"{short} -> ", "dim"), answer or "(empty)")
