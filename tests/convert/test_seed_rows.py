"""The table of rows in docs/coming-from says one of three things of every row."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from pydantic import ValidationError

from penstock.rollout import SyncProduceStrategyConfig

TABLE = Path(__file__).parents[2] / "docs" / "coming-from" / "seed-rows.csv"


def test_a_row_works_or_is_named_otherwise_or_says_why_it_is_not_here() -> None:
    with TABLE.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["state"] for row in rows} == {"works", "named otherwise", "not here, because"}
    for row in rows:
        assert (row["state"] == "not here, because") == row["here"].startswith("none: "), row


def test_a_sync_strategy_takes_no_staleness() -> None:
    with pytest.raises(ValidationError, match="max_staleness got 1 with strategy sync"):
        SyncProduceStrategyConfig(max_staleness=1)
