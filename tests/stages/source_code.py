"""The package's source as the tests of its shape read it: each file is parsed once in a process."""

from __future__ import annotations

import ast
import gc
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "penstock"
FILES = sorted(SOURCE.rglob("*.py"))


@cache
def nodes(path: Path) -> list[ast.AST]:
    """Every node of a file, the module first and each after its parent."""
    was_enabled = gc.isenabled()
    gc.disable()  # a tree is no garbage, and looking for some takes two thirds of the time
    try:
        found: list[ast.AST] = [ast.parse(path.read_text("utf-8"), str(path))]
        for node in found:  # which grows
            for value in vars(node).values():
                if isinstance(value, ast.AST):
                    found.append(value)
                elif isinstance(value, list):
                    found += [one for one in value if isinstance(one, ast.AST)]
        return found
    finally:
        if was_enabled:
            gc.enable()
