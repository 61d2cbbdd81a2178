"""What the producing side does, in words."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from penstock.rollout import ProducerSnapshot, TaskSnapshot
from penstock.run.foundation import Status
from penstock.waits import WaitKind, Waits

NOW = ProducerSnapshot(
    tasks=(
        TaskSnapshot(
            name="math",
            drawn=12,
            trained=4,
            buffered=3,
            in_flight=4,
            dropped={"failed": 1},
            ready=2,
            aborted=1,
            expired=0,
        ),
    ),
)


def test_every_task_has_a_line_that_says_where_its_groups_are() -> None:
    assert [str(task) for task in NOW.tasks] == [
        "math: drawn 12, in flight 4, ready 2, to retry 1, trained 4, dropped failed 1"
    ]


def test_a_run_tells_what_its_loop_does_and_what_its_tasks_wait_for() -> None:
    now = [0.0]
    waits = Waits(lambda: now[0])
    source: Any = SimpleNamespace(snapshot=lambda: NOW)
    status = Status(source, waits)
    status.doing("training step 2")
    with (
        waits.wait("loop", WaitKind.WAIT, "groups of step 2"),
        waits.wait("produce math", WaitKind.WAIT, "step 2 to be consumed"),
    ):
        now[0] = 3.0
        with waits.wait("update", WaitKind.WAIT, "the groups in flight"):  # only begun
            first, task = status.live().splitlines()
    assert first == "training step 2; produce math waits for step 2 to be consumed (3.0 s)"
    assert task == str(NOW.tasks[0])
