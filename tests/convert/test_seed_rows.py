"""The table of rows in docs/coming-from says one of three things of every row."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from pydantic import ValidationError

from penstock.rollout import ProduceProgress, SyncProduceStrategyConfig, TaskShares

PAGES = Path(__file__).parents[2] / "docs" / "coming-from"
TABLE = PAGES / "seed-rows.csv"


def test_a_row_works_or_is_named_otherwise_or_says_why_it_is_not_here() -> None:
    with TABLE.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["state"] for row in rows} == {"works", "named otherwise", "not here, because"}
    for row in rows:
        assert (row["state"] == "not here, because") == row["here"].startswith("none: "), row


def test_a_sync_strategy_takes_no_staleness() -> None:
    with pytest.raises(ValidationError, match="max_staleness got 1 with strategy sync"):
        SyncProduceStrategyConfig(max_staleness=1)


# the words of XTuner that are no names here
RENAMED = (
    "mark_consumed",
    "ensure_target_upto",
    "build_local",
    "add_raw_rewards",
    "add_produce_time",
    "group_generate_time_s",
    "SamplerWithReplayBuffer",
    "staleness_threshold",
    "tail_batch_candidate_step",
    "IsValidSampleFn",
)


@pytest.mark.parametrize("word", RENAMED)
def test_the_page_of_xtuner_says_what_to_write(word: str) -> None:
    by_hand = (PAGES / "xtuner.md").read_text("utf-8").partition("## In Python")[2]
    cells = [line.split("|") for line in by_hand.splitlines() if line.startswith("|")]
    (row,) = (row for row in cells if word in row[1])
    assert "`" in row[2] or "`" in row[3], row


def test_calls_of_xtuner_as_its_page_writes_them() -> None:
    progress = ProduceProgress.build_local({"math": 6, "code": 2}, train_step=3)
    assert progress.target("math") == 6
    progress.ensure_target_upto(4, TaskShares({"math": 3, "code": 1}, 8).at)
    assert (progress.target("math"), progress.target("code")) == (12, 4)
    progress.finish_consume(3, {"math": 6, "code": 2})
    assert (progress.consumed("code"), progress.next_consumer_step) == (2, 4)
