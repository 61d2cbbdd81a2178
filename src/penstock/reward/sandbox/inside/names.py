"""Which names of assert-style tests come from the solution. Inside the sandbox, and for the host's check of data.

Only the names under test do: a program that defined a helper of its tests would decide its own verdict.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import json
import symtable
import sys
from collections.abc import Sequence
from typing import NamedTuple

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class BrokenTests(Exception):
    """Tests that are no Python, or use names that neither they nor the solution are to define."""


class TestsRead(NamedTuple):
    """Tests behind their prelude, and where the names come from that they do not define."""

    tree: ast.Module
    solution: list[str]
    modules: list[str]  # of the standard library


def read_tests(source: str, prelude: str, names: Sequence[str], *, imports: bool) -> TestsRead:
    """Read tests; from the solution come `names`, or the only name that nobody defines.

    Without `imports` nothing is imported, and the names of tests with `import *` are not looked at.
    """
    try:
        body, helpers = ast.parse(source, "<tests>").body, ast.parse(prelude, "<prelude>").body
        free = _free_names([source, prelude])
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise BrokenTests(f"not valid Python: {str(error)[:300]}") from None
    if not body:
        raise BrokenTests("empty, allowed: at least one test")
    helpers = [n for n in helpers if not (isinstance(n, _DEFINITIONS) and n.name in names)]
    tree = ast.Module([*helpers, *body], [])
    stars = [
        node.module or ""
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.names[0].name == "*"
    ]
    if stars and not imports:
        return TestsRead(tree, list(names), [])
    for module in stars:
        free -= vars(importlib.import_module(module)).keys()
    solution = _names_under_test(free, names)
    return TestsRead(tree, solution, sorted(free & sys.stdlib_module_names - {*solution}))


def _names_under_test(free: set[str], names: Sequence[str]) -> list[str]:
    unknown = sorted(free - {*names} - sys.stdlib_module_names)
    if not names and len(free) == 1:
        return list(free)
    if unknown and (names or len(unknown) > 1):
        entry_point = json.dumps([*names, *unknown])
        raise BrokenTests(
            f"not complete: they use {', '.join(unknown)} without a definition, allowed: "
            f'"entry_point": {entry_point} if the solution defines them, else "prelude": SOURCE'
        )
    return list(names) or unknown


def _free_names(sources: Sequence[str]) -> set[str]:
    """The global names that the sources use and none of them defines."""
    used, bound = set[str](), set(dir(builtins))
    tables = [symtable.symtable(source, "<tests>", "exec") for source in sources]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        for symbol in table.get_symbols():
            if not symbol.is_global():
                continue
            if symbol.is_referenced():
                used.add(symbol.get_name())
            if symbol.is_assigned() or symbol.is_imported():
                bound.add(symbol.get_name())
    return {name for name in used - bound if not name.startswith("__")}
