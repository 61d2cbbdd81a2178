"""A snapshot of the producing side in words, one line per task."""

from __future__ import annotations

from penstock.produce.snapshot import ProducerSnapshot, TaskSnapshot


def task_lines(now: ProducerSnapshot) -> list[str]:
    """Where the groups of every task are."""
    return [
        f"{task.name}: drawn {task.drawn}, in flight {task.in_flight}, ready {task.ready}, "
        f"to retry {task.aborted + task.expired}, trained {task.trained}, dropped {_drops(task)}"
        for task in now.tasks
    ]


def _drops(task: TaskSnapshot) -> str:
    return ", ".join(f"{reason} {number}" for reason, number in sorted(task.dropped.items())) or "0"
