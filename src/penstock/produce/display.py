"""The progress of production, per task: a live table in a terminal, plain lines elsewhere. Layer 3."""

from __future__ import annotations

from rich.console import Console
from rich.live import Live
from rich.table import Table

from penstock.produce.snapshot import ProducerSnapshot, TaskSnapshot


def progress_line(now: ProducerSnapshot) -> str:
    """One plain line: every task, and who waits for what."""
    tasks = "; ".join(
        f"{task.name}: drawn {task.drawn}, in flight {task.in_flight}, ready {task.ready}, "
        f"to retry {task.aborted + task.expired}, trained {task.trained}, dropped {_drops(task)}"
        for task in now.tasks
    )
    waits = "; ".join(f"{wait.who} waits for {wait.what}" for wait in now.waits)
    return f"step {now.next_step}, weights {now.model_version} | {tasks}" + (
        f" | {waits}" if waits else ""
    )


def progress_table(now: ProducerSnapshot) -> Table:
    """The same as a table."""
    table = Table(
        "task",
        "drawn",
        "in flight",
        "ready",
        "to retry",
        "trained",
        "dropped",
        title=f"step {now.next_step}, weights {now.model_version}"
        + (" (paused)" if now.paused else ""),
        caption="\n".join(
            f"{wait.who} waits for {wait.what} ({wait.seconds:.0f} s)" for wait in now.waits
        ),
    )
    for task in now.tasks:
        retry = task.aborted + task.expired
        numbers = (task.drawn, task.in_flight, task.ready, retry, task.trained)
        table.add_row(task.name, *map(str, numbers), _drops(task))
    return table


class ProgressDisplay:
    """Shows snapshots as they come. Use as a context manager."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._live = Live(console=self._console) if self._console.is_terminal else None
        self._last_line = ""

    def __enter__(self) -> ProgressDisplay:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, now: ProducerSnapshot) -> None:
        if self._live is not None:
            self._live.update(progress_table(now))
            return
        line = progress_line(now)
        if line != self._last_line:
            self._last_line = line
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)


def _drops(task: TaskSnapshot) -> str:
    return ", ".join(f"{reason} {number}" for reason, number in sorted(task.dropped.items())) or "0"
