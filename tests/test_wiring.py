"""Parts get what they need when they are built: nobody sets an attribute of another part later.

Records are no parts: a dataclass that is not frozen holds data that changes on its way, and its fields may be
assigned anywhere. A field that holds a function is wiring, in a record too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from stages.source_code import FILES, SOURCE, nodes

ROOMS = ("run", "workers", "rollout", "inspection")
FOREIGN = {  # attributes of things that are not ours
    "args",  # of an exception
    "__name__",  # these four: of a function that is shown to a model
    "__doc__",
    "__annotations__",
    "__signature__",
    "writeable",  # of the flags of an array
}
Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def is_record(node: ast.ClassDef) -> bool:
    """Return whether a class is a dataclass whose fields may change."""
    decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
    return any("dataclass" in text and "frozen=True" not in text for text in decorators)


@cache
def record_fields() -> frozenset[str]:
    """Return the names of all fields of records that hold data."""
    return frozenset(
        field.target.id
        for path in FILES
        for node in nodes(path)
        if isinstance(node, ast.ClassDef) and is_record(node)
        for field in node.body
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and "Callable" not in ast.unparse(field.annotation)
    )


def targets(node: ast.AST) -> Iterator[ast.expr]:
    """Yield what a statement assigns to, one by one."""
    match node:
        case ast.Assign():
            waiting = list(node.targets)
        case ast.AugAssign() | ast.AnnAssign() | ast.For() | ast.AsyncFor():
            waiting = [node.target]
        case ast.With() | ast.AsyncWith():
            waiting = [item.optional_vars for item in node.items if item.optional_vars]
        case ast.NamedExpr():
            waiting = [node.target]
        case _:
            waiting = []
    while waiting:
        target = waiting.pop()
        if isinstance(target, ast.Tuple | ast.List):
            waiting += target.elts
        else:
            yield target.value if isinstance(target, ast.Starred) else target


def set_from_outside(tree: list[ast.AST], fields: frozenset[str]) -> list[str]:
    """Return every assignment to an attribute that is no field of a record, of anything but self or cls."""
    classes = {node.name for node in tree if isinstance(node, ast.ClassDef)}
    known = fields | FOREIGN
    return [
        ast.unparse(target)
        for node in tree
        for target in targets(node)
        if isinstance(target, ast.Attribute)
        and not (
            isinstance(target.value, ast.Name) and target.value.id in {"self", "cls", *classes}
        )
        and target.attr not in known
    ]


def own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function without those of the functions inside it, which are yielded whole."""
    waiting = list(ast.iter_child_nodes(function))
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, Function):
            waiting += ast.iter_child_nodes(node)


def closes_too_early(function: ast.AST) -> Iterator[str]:
    """Yield every name that a function inside uses and that is assigned only after it, or with it."""
    built: dict[str, tuple[int, int]] = {}  # name -> where its first value is complete
    inner: list[Function] = []
    for node in own_nodes(function):
        if isinstance(node, Function):
            inner.append(node)
        for target in targets(node):
            if isinstance(target, ast.Name):
                end = (node.end_lineno or 0, node.end_col_offset or 0)
                if isinstance(node, ast.For | ast.AsyncFor | ast.With | ast.AsyncWith):
                    end = (target.end_lineno or 0, target.end_col_offset or 0)
                built[target.id] = min(end, built.get(target.id, end))
    for used in inner:
        names = [node for node in ast.walk(used) if isinstance(node, ast.Name)]
        own = {argument.arg for argument in ast.walk(used) if isinstance(argument, ast.arg)}
        own |= {name.id for name in names if isinstance(name.ctx, ast.Store)}
        for name in names:
            if name.id not in own and built.get(name.id, (0, 0)) > (used.lineno, used.col_offset):
                yield f"line {name.lineno}: {name.id}"


def early_closures(tree: list[ast.AST]) -> list[str]:
    functions = (node for node in tree if isinstance(node, Function))
    return [found for function in functions for found in closes_too_early(function)]


def nodes_of(code: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(code)))


def files() -> list[Path]:
    return [path for path in FILES if path.relative_to(SOURCE).parts[0] in ROOMS]


def test_no_attribute_of_a_part_is_set_from_outside() -> None:
    found = {}
    for path in files():
        name = path.relative_to(SOURCE).as_posix()
        found[name] = set_from_outside(nodes(path), record_fields())
    assert {name: here for name, here in found.items() if here} == {}


def test_no_function_refers_to_a_thing_that_is_not_built_yet() -> None:
    found = {path.relative_to(SOURCE): early_closures(nodes(path)) for path in files()}
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "code",
    [
        "pool.when_loaded = wake",
        "self._engines.when_loaded = wake",
        "job.tracker, other = make()",
        "workers.callbacks.note: Note = print",
        "with open() as job.tracker: pass",
        "for pool.engine in engines: pass",
    ],
)
def test_an_attribute_that_is_set_from_outside_is_found(code: str) -> None:
    assert set_from_outside(nodes_of(code), frozenset({"score"})) != []


def test_records_and_oneself_may_be_assigned() -> None:
    code = "rollout.score = 1\nself.note = note\nerror.args = ()\nbatch[0].score = 2"
    assert set_from_outside(nodes_of(code), frozenset({"score"})) == []


def test_a_field_that_holds_a_function_is_no_data() -> None:
    fields = record_fields()
    assert "score" in fields
    assert not {"confirmed", "start_agent"} & fields


@pytest.mark.parametrize(
    "body",
    [
        "job = Job(note=lambda text: job.tracker.note(text))",
        "def renew(): return part.renewed()\n    pool = Pool(renew)\n    part = Trainer(pool)",
    ],
)
def test_a_function_that_refers_to_a_later_thing_is_found(body: str) -> None:
    assert early_closures(nodes_of(f"def build():\n    {body}")) != []


def test_a_function_that_refers_to_an_earlier_thing_is_fine() -> None:
    body = "part = Trainer()\n    def renew(): return part.renewed()\n    pool = Pool(renew)"
    assert early_closures(nodes_of(f"def build():\n    {body}")) == []
