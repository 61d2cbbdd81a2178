"""The progress display: a live panel on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from penstock.track.protocol import RunInfo

_PLAIN_INTERVAL_S = 5.0


class ConsoleTracker:
    """Shows step, reward, held-out accuracy, tokens/s, staleness and the open waits."""

    def __init__(self, info: RunInfo, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._info = info
        self._metrics: dict[str, float] = {}
        self._evals: dict[str, float] = {}
        self._last_plain = 0.0
        self._progress = Progress(
            TextColumn("[bold]step"),
            MofNCompleteColumn(),
            BarColumn(),
            TimeRemainingColumn(),
            console=self._console,
        )
        self._bar = self._progress.add_task(
            "train", total=info.total_steps, completed=info.first_step
        )
        self._live: Live | None = None
        if self._console.is_terminal:
            self._live = Live(
                console=self._console, get_renderable=self._render, refresh_per_second=4
            )
            self._live.start()

    def log_step(self, step: int, metrics: dict[str, float]) -> None:
        self._metrics = metrics
        self._progress.update(self._bar, completed=step)
        if self._live is None:
            self._plain_line(step)

    def log_eval(self, step: int, metrics: dict[str, float]) -> None:
        self._evals.update(metrics)
        figures = "  ".join(f"{name.removeprefix('eval/')} {v:.3f}" for name, v in metrics.items())
        self._console.print(f"[cyan]eval[/cyan] after step {step}: {figures}", highlight=False)

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
        figures = "  ".join(f"{name} {value}" for name, value in self._figures())
        self._console.print(
            f"step {step}/{self._info.total_steps}  {figures}", highlight=False, soft_wrap=True
        )
        for line in self._info.live().splitlines()[1:]:
            self._console.print(f"    {line}", highlight=False, markup=False, soft_wrap=True)

    def _figures(self) -> list[tuple[str, str]]:
        get = self._metrics.get
        rate = get("tokens/generated", 0.0) / max(get("time/step_s", 0.0), 1e-9)
        shown = [
            ("reward", f"{get('reward/mean', 0.0):.3f}"),
            ("accuracy", f"{get('accuracy/mean', 0.0):.3f}"),
            ("length", f"{get('response_length/mean', 0.0):.1f}"),
            ("tokens/s", f"{rate:,.0f}"),
            (
                "staleness",
                f"{get('staleness/mean', 0.0):.2f} (max {get('staleness/max', 0.0):.0f})",
            ),
            ("trainer waited", f"{get('time/consumer_wait_s', 0.0):.2f} s"),
            ("producer waited", f"{get('time/producer_wait_s', 0.0):.2f} s"),
        ]
        held_out = [(n.split("/")[1], v) for n, v in self._evals.items() if n.endswith("/accuracy")]
        return [*((f"{task} accuracy", f"{value:.3f}") for task, value in held_out), *shown]

    def _render(self) -> Group:
        table = Table.grid(padding=(0, 2))
        figures = self._figures()
        for start in range(0, len(figures), 4):
            row = [
                Text.assemble((f"{n} ", "dim"), (v, "bold")) for n, v in figures[start : start + 4]
            ]
            table.add_row(*row)
        return Group(self._progress, table, Text(self._info.live(), style="yellow"))
