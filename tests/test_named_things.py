"""Functions, classes and attributes that docstrings of the source name in backticks exist there.

Checked are `name()`, `Name`, `some_name` and `some.name`; other words in backticks are left alone.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterable, Iterator
from functools import cache

from stages.source_code import FILES, SOURCE, nodes

NAMED = re.compile(r"`(?:await )?((?:\w+\.)*\w+)(\([^`]*\))?`")
IDENTIFIER = re.compile(r"[A-Z][a-z]\w*|[a-z]\w*_\w+")
ENDINGS = {"py", "md", "toml", "json", "jsonl", "db", "html", "txt", "log", "sh"}
PLACEHOLDERS = {"NAME"}


def definitions(tree: Iterable[ast.AST]) -> Iterator[str]:
    for node in tree:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):  # keys of tables
            yield node.value
        elif isinstance(node, ast.alias):  # what is imported exists too
            yield from (node.asname or node.name).split(".")


@cache
def known() -> frozenset[str]:
    names = {name for path in FILES for name in definitions(nodes(path))}
    modules = {
        part.removesuffix(".py") for path in FILES for part in path.relative_to(SOURCE).parts
    }
    return frozenset(names | modules | set(dir(builtins)) | PLACEHOLDERS | {"penstock"})


def named(docstring: str) -> Iterator[str]:
    for name, call in NAMED.findall(docstring):
        *_, last = name.split(".")
        if last in ENDINGS:
            continue
        if call or "." in name or IDENTIFIER.fullmatch(name):
            yield name


def test_every_named_thing_exists() -> None:
    missing = []
    for path in FILES:
        for node in nodes(path):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                for name in named(ast.get_docstring(node) or ""):
                    if any(part not in known() for part in name.split(".")):
                        missing.append(f"{path.relative_to(SOURCE)}: `{name}`")
    assert not missing, "nothing in the source is called so:\n" + "\n".join(missing)


def test_what_a_benchmark_imports_from_another_is_there() -> None:
    """Also inside functions, which no --help runs."""
    folder = SOURCE.parents[1] / "benchmarks"
    trees = {path.stem: nodes(path) for path in folder.glob("*.py")}
    defined = {script: set(definitions(tree)) for script, tree in trees.items()}
    missing = [
        f"{script}.py: from {node.module} import {alias.name}"
        for script, tree in trees.items()
        for node in tree
        if isinstance(node, ast.ImportFrom) and node.module in trees
        for alias in node.names
        if alias.name not in defined[node.module]
    ]
    assert not missing, "\n".join(missing)
