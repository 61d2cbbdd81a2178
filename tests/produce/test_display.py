"""The progress display: a table for a terminal, lines for everything else."""

from __future__ import annotations

import io

from rich.console import Console

from penstock.produce import ProducerSnapshot, TaskSnapshot, Wait
from penstock.produce.display import ProgressDisplay, progress_line

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
    waits=(Wait(who="step 2", what="2 of 4 groups of task math", since=0.0, seconds=3.0),),
    producer_wait_s=0.0,
    next_step=2,
    model_version=1,
    paused=False,
)


def shown(terminal: bool) -> str:
    out = io.StringIO()
    with ProgressDisplay(Console(file=out, force_terminal=terminal, width=100)) as display:
        display.update(NOW)
        display.update(NOW)
    return out.getvalue()


def test_plain_text_has_one_line_per_change() -> None:
    text = shown(terminal=False)
    assert text.count("\n") == 1
    assert "math: drawn 12, in flight 4, ready 2, to retry 1, trained 4, dropped failed 1" in text
    assert "step 2 waits for 2 of 4 groups of task math" in text
    assert progress_line(NOW) in text


def test_a_terminal_gets_a_table() -> None:
    text = shown(terminal=True)
    assert "math" in text
    assert "failed 1" in text
    assert "waits for" in text


def test_a_snapshot_knows_whether_it_balances() -> None:
    assert NOW.tasks[0].balanced
