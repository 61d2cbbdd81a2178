"""What a run shows while it starts and trains: a live panel, plain lines, or a plot in a notebook.

The texts and small plots that the panel shares with the summary, the tables and the model card are here
too.
"""

from __future__ import annotations

import html
import shlex
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from itertools import pairwise
from typing import Any, ClassVar, Self

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from penstock import files
from penstock.inspection.track.logs import Finding, RunInfo, Tracker, read_metrics

Point = tuple[int, float]  # step, value
READY = "ready"  # the last stage of a worker's start

_PLAIN_INTERVAL_S = 5.0  # least time between two lines without a terminal
_DRAWING_INTERVAL_S = 0.5  # least time between two drawings in a notebook
_SHOWN_FINDINGS = 3
LOSS = "loss/demonstration"  # of a run that imitates, which has no rewards
_KEPT = 1000  # values of a curve; a longer one is thinned out
_BLOCKS, _PLAIN_BLOCKS = "▁▂▃▄▅▆▇█", "_.-=*#"
_WIDTH, _HEIGHT, _MARGIN = 640, 180, 28
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
_EVENTS = (
    "retried",
    "failed",
    "aborted",
    "expired",
    "filtered",
    "tail_calls",
    "pause_timeouts",
    "prompts_skipped_long",
)

# -- texts and small plots ---------------------------------------------------------------------


def task_figures(metrics: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The metrics `tasks/NAME/FIGURE` by task and figure."""
    tasks: dict[str, dict[str, Any]] = {}
    for key, value in metrics.items():
        kind, _, rest = key.partition("/")
        task, _, figure = rest.partition("/")
        if kind == "tasks" and figure:
            tasks.setdefault(task, {})[figure] = value
    return tasks


def account_lines(metrics: dict[str, float]) -> list[str]:
    """A line per task about its last step."""
    return [
        f"{task}, last step: {_account_text(figures)}"
        for task, figures in task_figures(metrics).items()
        if figures.get("samples")
    ]


def _account_text(figures: dict[str, float]) -> str:
    """The figures of one task in words; counts of 0 are left out."""
    get = figures.get
    words = [f"{get('samples', 0.0):,.0f} samples", f"{get('tokens', 0.0):,.0f} tokens"]
    if count := get("reward_count"):
        words.append(f"reward {get('reward_sum', 0.0) / count:.3f}")
    parts = (name for name in figures if name.startswith("part/"))
    words += [f"{name.removeprefix('part/')} {figures[name]:.3f}" for name in parts]
    if "temperature" in figures:
        words.append(f"temperature {figures['temperature']:.3g}")
    if "group_time_p50_s" in figures:
        p50, p99 = figures["group_time_p50_s"], get("group_time_p99_s", 0.0)
        words.append(f"group time {p50:.3g} s (p99 {p99:.3g} s)")
    words += [f"{name.replace('_', ' ')} {figures[name]:.0f}" for name in _EVENTS if get(name)]
    return ", ".join(words)


def fact_table() -> Table:
    """An empty table of names and what is said of each."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    return table


def finding_table(findings: Iterable[Finding], *, brief: bool = False) -> Table:
    """One row per finding: what and since when; unless brief, evidence and advice below it."""
    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True, style="yellow")
    table.add_column(overflow="fold")
    for finding in findings:
        since = f"  since step {finding.since}" if finding.since else ""
        table.add_row("●", Text.assemble((finding.what, "bold yellow"), (since, "dim")))
        if not brief:
            table.add_row("", Text(finding.evidence))
        pasted = " ".join(map(shlex.quote, finding.change))
        if brief and pasted:
            table.add_row("", Text(pasted, style="cyan"))
        else:
            between = ": " if pasted else ""
            table.add_row("", Text.assemble(finding.advice, between, (pasted, "bold cyan")))
        if not brief:
            table.add_row("", "")
    return table


def held_out_scores(metrics: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    """Yield ("heldout accuracy", value) of each evaluated task; its reward if nothing judges answers."""
    for name, value in metrics.items():
        task, _, measure = name.removeprefix("eval/").rpartition("/")
        judged = f"eval/{task}/accuracy" in metrics
        if measure == ("accuracy" if judged else "reward"):
            yield f"{task} {measure}", value


def stretches(count: int, most: int) -> list[tuple[int, int]]:
    """`count` places in at most `most` stretches of about equal length: (first, end) of each."""
    number = min(count, most)
    return list(pairwise(i * count // number for i in range(number + 1))) if number else []


def sparkline(
    console: Console,
    values: Sequence[float | None],
    low: float | None = None,
    high: float | None = None,
    width: int = 40,
) -> str:
    """The plot; a long series is averaged over equal stretches, one value gives none."""
    present = [value for value in values if value is not None]
    if len(present) < 2:
        return ""
    means = [sum(present[a:b]) / (b - a) for a, b in stretches(len(present), width)]
    low = min(means) if low is None else low
    high = max(means) if high is None else high
    blocks = _BLOCKS if console.encoding.lower().startswith("utf") else _PLAIN_BLOCKS
    scale = (len(blocks) - 1) / (high - low) if high > low else 0.0
    return "".join(
        blocks[round(min(max(mean - low, 0.0) * scale, len(blocks) - 1))] for mean in means
    )


def draw_curves(
    curves: Mapping[str, Sequence[Point]], steps: int, labels: Sequence[str] = ()
) -> str:
    """An SVG of the curves over `steps`; the first is a plain line, the others have dots.

    labels: what stands below step 0, 1 and so on.
    """
    values = [value for points in curves.values() for _, value in points]
    low, high = min([0.0, *values]), max([1.0, *values])

    def place(point: Point) -> tuple[float, float]:
        x = _MARGIN + (_WIDTH - 2 * _MARGIN) * point[0] / max(steps, 1)
        y = _MARGIN + (_HEIGHT - 2 * _MARGIN) * (high - point[1]) / (high - low)
        return round(x, 1), round(y, 1)

    parts = [
        f'<text x="2" y="{place((0, edge))[1] + 4}" font-size="11" fill="#888">{edge:g}</text>'
        f'<path d="M{_MARGIN} {place((0, edge))[1]}H{_WIDTH - _MARGIN}" stroke="#ccc"/>'
        for edge in (low, high)
    ]
    parts += [
        f'<text x="{place((step, low))[0]}" y="{_HEIGHT - _MARGIN + 10}" font-size="9" '
        f'text-anchor="middle">{html.escape(label)}</text>'
        for step, label in enumerate(labels)
    ]
    for number, (name, points) in enumerate(curves.items()):
        color, where = _COLORS[number % len(_COLORS)], [place(point) for point in points]
        line = " ".join(f"{x},{y}" for x, y in where)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="1.5"/>')
        if number:
            parts += [f'<circle cx="{x}" cy="{y}" r="3" fill="{color}"/>' for x, y in where]
        parts.append(
            f'<text x="{_MARGIN + 120 * number}" y="{_HEIGHT - 6}" font-size="12" fill="{color}">'
            f"{html.escape(files.visible(name))}</text>"
        )
    size = f'viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{"".join(parts)}</svg>'


# -- the panel ---------------------------------------------------------------------------------


class ConsoleTracker(Tracker):
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
        for name, value in held_out_scores(metrics):
            self._evals.setdefault(name, []).append(value)
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
        seconds = self._progress.tasks[0].time_remaining
        left = "" if seconds is None or last else f"  {timedelta(seconds=round(seconds))} left"
        self._console.print(
            f"step {step}/{self._info.total_steps}{left}  {figures}",
            highlight=False,
            soft_wrap=True,
        )
        for line in [*self._info.live().splitlines()[1:], *account_lines(self._metrics)]:
            self._console.print(f"    {line}", highlight=False, soft_wrap=True)

    def _curves(self) -> list[tuple[str, list[float | None]]]:
        curves = list(self._evals.items())
        if self._rewards and self._rewards[-1] is not None:
            curves.append(("reward", self._rewards))
        return curves

    def _figures(self) -> list[tuple[str, str]]:
        get = self._metrics.get
        rate = get("tokens/generated", 0.0) / max(get("time/step_s", 0.0), 1e-9)
        age, oldest = get("staleness/mean", 0.0), get("staleness/max", 0.0)
        shown = []
        if "accuracy/mean" in self._metrics:  # else nothing judges the answers
            shown.append(("accuracy", f"{self._metrics['accuracy/mean']:.3f}"))
        if LOSS in self._metrics:
            shown.append(("loss", f"{self._metrics[LOSS]:.4f}"))
        return [
            *shown,
            ("length", f"{get('response_length/mean', 0.0):.1f}"),
            ("tokens/s", f"{rate:,.0f}"),
            ("staleness", f"{age:.2f} (max {oldest:.0f})"),
            ("trainer waited", f"{get('time/consumer_wait_s', 0.0):.2f} s"),
            ("producer waited", f"{get('time/producer_wait_s', 0.0):.2f} s"),
        ]

    def _render(self) -> files.Visible:
        ready, wanted = self._info.next_batch()
        self._batch.update(self._batch_bar, completed=ready, total=wanted or None)
        parts: list[RenderableType] = [self._progress, *([self._batch] if wanted else [])]
        if self._metrics or self._evals:
            pairs = self._figures() if self._metrics else []
            figures = [
                Text.assemble((f"{name} ", "dim"), value, no_wrap=True) for name, value in pairs
            ]
            parts += [
                self._curve_table(),
                Columns(figures, padding=(0, 2)),  # in as many lines as the width needs
                self._sample_table(),
            ]
        parts.append(Text(self._info.live(), style="dim"))
        parts += [Text(line, style="dim") for line in account_lines(self._metrics)]
        if findings := list(self._info.findings()):
            parts.append(finding_table(findings[:_SHOWN_FINDINGS], brief=True))
            if more := len(findings) - _SHOWN_FINDINGS:
                hint = f"  and {more} more: penstock doctor {files.pasted(self._info.folder)}"
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

    def _sample_table(self) -> Table:
        """Show the best and the worst response of the newest batch."""
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", no_wrap=True)
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True, overflow="ellipsis")
        batch = self._info.batch()
        scored = [r for r in batch.rollouts if r.score is not None] if batch else []
        ranked = sorted(scored, key=lambda rollout: rollout.reward)
        for name, rollout in (("best", ranked[-1]), ("worst", ranked[0])) if ranked else ():
            prompt = rollout.prompt.messages[-1].get("content", "") if rollout.prompt else ""
            question, answer = (" ".join(str(text).split()) for text in (prompt, rollout.text))
            short = question if len(question) <= 50 else f"{question[:48]}.."
            line = Text.assemble((f"{short} -> ", "dim"), answer or "(empty)")
            table.add_row(name, Text(f"{rollout.reward:.3f}"), line)
        return table


# -- the plot of a notebook --------------------------------------------------------------------


def in_notebook() -> bool:
    """Whether this process is a notebook's kernel, which can show pictures."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None


def make_display(info: RunInfo) -> Tracker:
    """The display that this process can show: a plot in a notebook, else the panel."""
    return NotebookTracker(info) if in_notebook() else ConsoleTracker(info)


class NotebookTracker(Tracker):
    """Draws a plot in the output of the cell that runs: the reward of each step, dots for evaluations.

    The plot begins with the steps that a resumed run has behind it."""

    def __init__(self, info: RunInfo) -> None:
        from IPython.display import HTML, display

        self._html: Any = HTML
        self._info = info
        rows = read_metrics(info.folder / "metrics.jsonl") if info.first_step else {}
        rewards = ((step, row.get("reward/mean")) for step, row in rows.items())
        self._reward = [(step, reward) for step, reward in rewards if reward is not None]
        self._held_out: dict[str, list[Point]] = {}
        self._drawn_at = 0.0
        self._handle: Any = display(HTML(self._page()), display_id=True)

    def log_step(self, step: int, metrics: dict[str, float]) -> None:
        if "reward/mean" in metrics:
            self._reward.append((step, metrics["reward/mean"]))
        is_last = step == self._info.total_steps
        if is_last or time.monotonic() - self._drawn_at > _DRAWING_INTERVAL_S:
            self._draw()

    def log_eval(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in held_out_scores(metrics):
            self._held_out.setdefault(name, []).append((step, value))
        self._draw()

    def note(self, text: str) -> None:
        files.say(text)

    def close(self) -> None:
        self._draw()

    def _draw(self) -> None:
        self._drawn_at = time.monotonic()
        self._handle.update(self._html(self._page()))

    def _page(self) -> str:
        step = self._reward[-1][0] if self._reward else self._info.first_step
        title = f"{self._info.name}: step {step} of {self._info.total_steps}"
        if self._reward:
            title += f", reward {self._reward[0][1]:.3f} → {self._reward[-1][1]:.3f}"
        curves = {"reward": self._reward, **self._held_out}
        return f"<p>{html.escape(title)}</p>{draw_curves(curves, self._info.total_steps)}"


# -- the start ---------------------------------------------------------------------------------


class StartDisplay:
    """Shows what a starting run does, on a line that goes away; nothing where stderr is no terminal.

    Keeps the stages of every worker, for logs/run.log."""

    _shown: ClassVar[StartDisplay | None] = None

    def __init__(self, stage: str) -> None:
        console = files.console(stderr=True)
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", style="dim", markup=False),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self._line = self._progress.add_task(stage, total=None)
        self._stages: dict[str, list[tuple[float, str]]] = {}  # of each worker: since when, what

    def __enter__(self) -> Self:
        self._progress.start()
        StartDisplay._shown = self
        return self

    def __exit__(self, *_: object) -> None:
        StartDisplay._shown = None
        self._progress.stop()

    def tell(self, stage: str) -> None:
        self._progress.update(self._line, description=stage)

    @classmethod
    def worker_stage(cls, worker: str, stage: str, since: float) -> None:
        """Show and keep what a worker does since a moment (`time.time()`), if a start is shown."""
        if cls._shown is not None:
            cls._shown._stages.setdefault(worker, []).append((since, stage))
            by_stage: dict[str, list[str]] = {}
            for worker, stages in cls._shown._stages.items():
                if stages[-1][1] != READY:
                    by_stage.setdefault(stages[-1][1], []).append(worker)
            parts = []
            for stage, workers in by_stage.items():
                more = f" and {len(workers) - 2} more" if len(workers) > 2 else ""
                parts.append(f"{', '.join(workers[:2])}{more}: {stage}")
            cls._shown.tell("; ".join(parts) or "all workers are ready")

    def report(self) -> list[str]:
        """A line for each worker: its stages, the seconds of each, and of all."""
        lines = []
        for worker, stages in self._stages.items():
            spent = (f"{what} {end - at:.2f} s" for (at, what), (end, _) in pairwise(stages))
            first, last = stages[0][0], stages[-1][0]
            began = time.strftime("%H:%M:%S", time.localtime(first)) + f"{first % 1:.2f}"[1:]
            total = f"{last - first:.2f} s in all since {began}"
            lines.append(f"start of {worker}: {', '.join(spent)}; {total}")
        return lines

    @classmethod
    def console(cls) -> Console:
        """The console for lines of a run: while a start is shown, they appear above it."""
        return cls._shown._progress.console if cls._shown else files.console(stderr=True)
