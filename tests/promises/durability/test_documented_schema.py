"""The public views are documented, column by column."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from penstock.store.journal import Journal

PAGE = Path(__file__).parents[3] / "docs" / "durability.md"


@pytest.mark.parametrize(
    "view", ["groups", "rollouts", "steps", "weights", "events", "identity", "calls", "tools"]
)
def test_every_column_of_a_view_is_documented(view: str, tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "journal.db")
    columns = [row[1] for row in journal.query(f"PRAGMA table_info({view})")]
    journal.close()
    (text,) = re.findall(rf"^\*\*`{view}`\*\*:(.*?)\n\n", PAGE.read_text(), re.M | re.S)
    assert columns
    assert set(columns) <= set(re.findall(r"`(\w+)`", text))
