"""The snapshot of the producing side in words."""

from __future__ import annotations

from penstock.rollout import ProducerSnapshot, ProducerWait, TaskSnapshot

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
    waits=(ProducerWait(who="step 2", what="2 of 4 groups of task math", seconds=3.0),),
)


def test_every_task_has_a_line_that_says_where_its_groups_are() -> None:
    assert [str(task) for task in NOW.tasks] == [
        "math: drawn 12, in flight 4, ready 2, to retry 1, trained 4, dropped failed 1"
    ]
