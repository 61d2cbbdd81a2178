"""Every row of docs/coming-from/seed-rows.csv: what it names here exists, and a test shows that it works."""

from __future__ import annotations

import ast
import csv
import importlib
from functools import cache
from pathlib import Path

import pytest

from penstock.config import Config
from penstock.config.mistakes import valid_keys
from penstock.rollout.progress import EVENTS
from stages.command_line import commands

ROOT = Path(__file__).parents[3]
with (ROOT / "docs" / "coming-from" / "seed-rows.csv").open(newline="") as file:
    ROWS = list(csv.DictReader(file))
FIGURES = {"samples", "tokens", "reward_sum", "group_time_p50_s", *EVENTS}


@cache
def functions_of(path: str) -> set[str]:
    tree = ast.parse((ROOT / "tests" / path).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("row", ROWS, ids=[f"{row['system']}: {row['row']}" for row in ROWS])
def test_a_row_names_what_exists(row: dict[str, str]) -> None:
    path, _, name = row["test"].partition("::")
    assert name in functions_of(path)
    kind, _, rest = row["here"].partition(" ")
    if kind == "key":
        assert rest in set(valid_keys(Config))
    elif kind == "command":
        assert rest.removeprefix("penstock ") in commands()
    elif kind == "metric":
        assert rest.rsplit("/", 1)[1] in FIGURES
    elif row["here"].startswith("penstock."):
        module, _, attribute = row["here"].partition(":")
        assert hasattr(importlib.import_module(module), attribute)
    else:
        assert rest or kind in ("seen", "holds")  # words, for a person


def test_rows_are_named_once() -> None:
    names = [(row["system"], row["row"]) for row in ROWS]
    assert len(set(names)) == len(names) > 140
