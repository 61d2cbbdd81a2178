"""Reads a Python config of XTuner as words and values, from its syntax tree: nothing is executed.

A word is a class and its field, such as SampleParams.max_tokens; words of the evaluation begin with
`eval:`. Read are literals, names, arithmetic, dict(...), calls of config classes with named fields,
f-strings, comparisons and environment variables. Whatever only code could tell (a call, a name that an
`if` assigns) is `Unread`, and the conversion says so.
"""

from __future__ import annotations

import ast
import operator
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.errors import UserError

OF_EVALUATION = "eval:"  # begins the words of the evaluation
_TRAINERS = ("RLColocateTrainerConfig", "RLDisaggregatedTrainerConfig")
# Several of these may be there: words name the field that holds them.
_INSIDE = ("CPUResourcesConfig", "AcceleratorResourcesConfig", "RolloutImportanceSampling")
_FAMILIES = ("JudgerConfig", "AgentLoopConfig", "TaskSpecConfig", "AgentLoopManagerConfig")
_OPERATORS: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_OF_TEXTS = (ast.Add, ast.Eq, ast.NotEq)
_KINDS: dict[str, Callable[[Any], Any]] = {"int": int, "float": float, "str": str, "Path": str}
_LARGEST = 1 << 40  # an operand; a config computes sizes and rates
_LONGEST = 4096  # a text that is computed with


@dataclass(slots=True, frozen=True)
class Unread:
    """An expression whose value only its code could tell."""

    source: str

    def __str__(self) -> str:
        return self.source


class FromEnvironment(str):
    """The text of an environment variable; `source` is shown in its place where no setting takes it."""

    source: str = ""


@dataclass(slots=True)
class Part:
    """A call of a config class with named fields."""

    name: str
    fields: dict[str, Any]


def read_python(text: str, path: Path) -> dict[str, Any]:
    """Return the words of `trainer = RLColocateTrainerConfig(...)` and of all that it holds."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise UserError(f"convert: {path} is no Python file: {error}") from None
    names: dict[str, Any] = {}
    for statement in tree.body:
        _assign(statement, names)
    trainer = names.get("trainer")
    if not isinstance(trainer, Part) or trainer.name not in _TRAINERS:
        allowed = " or ".join(f"{name}(...)" for name in _TRAINERS)
        raise UserError(f"convert: got {path} without a trainer, allowed: trainer = {allowed}")
    return {"Trainer": trainer.name, **dict(_words(trainer, "", ""))}


def _assign(statement: ast.stmt, names: dict[str, Any]) -> None:
    """Take over a plain assignment; forget what any other statement could change."""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target, value = statement.targets[0], _value(statement.value, names)
        if isinstance(target, ast.Name):
            names[target.id] = value
            return
    source = ast.unparse(statement).splitlines()[0]
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del):
            names[node.id] = Unread(source)
        elif isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store):
            changed = names.get(node.value.id) if isinstance(node.value, ast.Name) else None
            if isinstance(node, ast.Attribute) and isinstance(changed, Part):
                changed.fields[node.attr] = Unread(source)
            elif isinstance(node.value, ast.Name):
                names[node.value.id] = Unread(source)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names[node.name] = Unread(node.name)


def _value(node: ast.expr, names: dict[str, Any]) -> Any:
    match node:
        case ast.Constant():
            return node.value
        case ast.Name():
            return names.get(node.id, Unread(node.id))
        case ast.List() | ast.Tuple():
            return [_value(one, names) for one in node.elts]
        case ast.Dict():
            keys = [None if key is None else _value(key, names) for key in node.keys]
            if all(isinstance(key, str) for key in keys):
                values = (_value(one, names) for one in node.values)
                return dict(zip(keys, values, strict=True))
        case ast.BinOp() | ast.Compare() | ast.UnaryOp() | ast.JoinedStr() | ast.IfExp():
            return _computed(node, names)
        case ast.Subscript() | ast.Call():
            return _called(node, names)
    return Unread(ast.unparse(node))


def _computed(node: ast.expr, names: dict[str, Any]) -> Any:
    unread = Unread(ast.unparse(node))
    sides: tuple[ast.expr, ast.expr]
    kind: type[ast.AST]
    match node:
        case ast.BinOp():
            sides, kind = (node.left, node.right), type(node.op)
        case ast.Compare(ops=[only]):
            sides, kind = (node.left, node.comparators[0]), type(only)
        case ast.UnaryOp(op=ast.USub()):
            sides, kind = (ast.Constant(0), node.operand), ast.Sub
        case ast.JoinedStr():
            return _joined(node, names)
        case ast.IfExp():
            test = _value(node.test, names)
            chosen = node.body if test else node.orelse
            return unread if isinstance(test, Unread | Part) else _value(chosen, names)
        case _:
            return unread
    values = [_value(side, names) for side in sides]
    if kind not in _OPERATORS or not all(_is_small(value) for value in values):
        return unread
    if any(isinstance(value, str) for value in values) and kind not in _OF_TEXTS:
        return unread  # "x" * n and "%9d" % n can be of any length
    if kind is ast.Pow and abs(values[1]) > 64:
        return unread
    try:
        found = _OPERATORS[kind](*values)
    except (TypeError, ValueError, ArithmeticError):
        return unread
    return _from_same(values, found, unread.source)


def _is_small(value: Any) -> bool:
    if isinstance(value, str):
        return len(value) <= _LONGEST
    return isinstance(value, int | float) and abs(value) <= _LARGEST


def _joined(node: ast.JoinedStr, names: dict[str, Any]) -> Any:
    parts = [
        _value(one.value, names) if isinstance(one, ast.FormattedValue) else _value(one, names)
        for one in node.values
    ]
    if all(isinstance(part, str | int | float) for part in parts):
        return _from_same(parts, "".join(map(str, parts)), ast.unparse(node))
    return Unread(ast.unparse(node))


def _from_same(values: Sequence[Any], found: Any, source: str) -> Any:
    """Return a text that is made with that of an environment variable as one that comes from there."""
    if isinstance(found, str) and any(isinstance(value, FromEnvironment) for value in values):
        found = FromEnvironment(found)
        found.source = source
    return found


def _called(node: ast.Subscript | ast.Call, names: dict[str, Any]) -> Any:
    source = ast.unparse(node)
    if isinstance(node, ast.Subscript):
        is_variable = ast.unparse(node.value) == "os.environ"
        return _variable(source, _value(node.slice, names)) if is_variable else Unread(source)
    called, given = ast.unparse(node.func), [_value(one, names) for one in node.args]
    fields = {one.arg: _value(one.value, names) for one in node.keywords if one.arg is not None}
    if called in ("os.environ.get", "os.getenv") and given:
        default = given[1] if len(given) > 1 else fields.get("default")
        return _variable(source, given[0], default)
    if len(fields) < len(node.keywords):  # **more
        return Unread(source)
    if called == "dict" and not given:
        return fields
    if called in _KINDS and len(given) == 1 and isinstance(given[0], str | int | float):
        try:
            return _KINDS[called](given[0])
        except ValueError:
            return Unread(source)
    name = called.rpartition(".")[2]
    if (name.endswith("Config") or name == "SampleParams" or name in _INSIDE) and not given:
        return Part(name, fields)
    return Unread(source)


def _variable(source: str, name: Any, default: Any = None) -> Any:
    if isinstance(name, str) and name in os.environ:
        text = FromEnvironment(os.environ[name])
        text.source = source
        return text
    return Unread(source) if default is None else default


def _words(part: Part, prefix: str, within: str) -> Iterator[tuple[str, Any]]:
    """Yield (word, value) for every field of a part and of the parts in it."""
    name = "Trainer" if part.name in _TRAINERS else part.name.removeprefix("Disagg")
    name = next((family for family in _FAMILIES if name.endswith(family)), name)
    for field, value in part.fields.items():
        inner = OF_EVALUATION if field == "eval_agent_loop_manager_cfg" else prefix
        yield from _word(f"{within or f'{prefix}{name}.'}{field}", value, inner)


def _word(word: str, value: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Part):
        yield word, value.name
        yield from _words(value, prefix, f"{word}." if value.name in _INSIDE else "")
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from _word(f"{word}.{name}", inner, prefix)
    elif isinstance(value, list) and any(isinstance(one, Part | dict) for one in value):
        for number, one in enumerate(value):
            # the first is converted; further ones are named with their number, and left
            yield from _word(word, one, prefix if not number else f"{prefix}{number + 1}:")
    else:
        yield word, value
