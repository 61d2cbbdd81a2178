"""Every promise of docs/durability.md names a test that exists."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

TOP = Path(__file__).resolve().parents[3]
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


@cache
def functions_of(path: str) -> set[str]:
    tree = ast.parse((TOP / path).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def promises(page: str) -> list[str]:
    """Return the rows of the table of promises."""
    table = page.split("| promise | holds | held by |\n")[1].split("\n\n")[0]
    return table.splitlines()[1:]


def faults(page: str) -> list[str]:
    """Return the promises without a test, and the tests that do not exist."""
    bare = [row for row in promises(page) if not NAMED.search(row)]
    lost = [
        f"{path}::{name}"
        for path, name in NAMED.findall(page)
        if not (TOP / path).is_file() or name not in functions_of(path)
    ]
    return bare + lost


def test_every_promise_names_a_test_that_exists() -> None:
    page = (TOP / "docs" / "durability.md").read_text()
    assert len(promises(page)) > 20
    assert faults(page) == []


def test_a_promise_without_a_test_and_a_test_that_is_gone_are_found() -> None:
    head = "| promise | holds | held by |\n|---|---|---|\n"
    gone = "| this | always | `tests/promises/docs/test_promises.py::test_gone`, `tests/no.py::test_it` |"
    bare = "| that | always | |"
    assert faults(f"{head}{gone}\n{bare}\n\nmore") == [
        bare,
        "tests/promises/docs/test_promises.py::test_gone",
        "tests/no.py::test_it",
    ]
