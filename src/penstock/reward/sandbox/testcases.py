"""The three forms of test cases, read and checked.

Broken test cases are a fault of the data and raise `RewardError`; they are never a pass or a fail.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.errors import RewardError

_FORMS = "{inputs, outputs}, {inputs, outputs, fn_name}, {asserts: source} or {check: source, entry_point}"


@dataclass(slots=True, frozen=True)
class StdioTests:
    """Text on stdin, text expected on stdout."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(slots=True, frozen=True)
class CallTests:
    """Arguments of a function, value expected from it."""

    function: str
    inputs: tuple[list[Any], ...]
    outputs: tuple[Any, ...]


@dataclass(slots=True, frozen=True)
class AssertTests:
    """Python source that raises when the solution is wrong."""

    source: str
    entry_point: str | None = None


Tests = StdioTests | CallTests | AssertTests


def read_tests(test_cases: Mapping[str, Any] | None, *, parse: bool = True) -> Tests:
    """Return the test cases of a prompt or request; raise a RewardError that says what is wrong.

    Without `parse`, Python source is left to the judge, which can be killed while it reads it.
    """
    if not isinstance(test_cases, Mapping) or not test_cases:
        raise RewardError(f"test_cases: got {_short(test_cases)}, allowed: {_FORMS}")
    if "asserts" in test_cases:
        return AssertTests(_source(test_cases["asserts"], "asserts", parse))
    if "check" in test_cases:
        entry_point = test_cases.get("entry_point")
        if not isinstance(entry_point, str) or not entry_point.isidentifier():
            raise RewardError(
                f"test_cases: entry_point got {_short(entry_point)}, allowed: a function's name"
            )
        return AssertTests(_source(test_cases["check"], "check", parse), entry_point)
    return _read_pairs(test_cases)


def _read_pairs(test_cases: Mapping[str, Any]) -> Tests:
    inputs, outputs = test_cases.get("inputs"), test_cases.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list):
        raise RewardError(f"test_cases: got the keys {sorted(test_cases)}, allowed: {_FORMS}")
    if not inputs or len(inputs) != len(outputs):
        raise RewardError(
            f"test_cases: got {len(inputs)} inputs and {len(outputs)} outputs, "
            "allowed: as many of each, at least one"
        )
    name = test_cases.get("fn_name")
    if not name:
        return StdioTests(tuple(map(_as_text, inputs)), tuple(map(_as_text, outputs)))
    if not isinstance(name, str):
        raise RewardError(f"test_cases: fn_name got {_short(name)}, allowed: a function's name")
    pairs = [_call_pair(given, expected) for given, expected in zip(inputs, outputs, strict=True)]
    return CallTests(name, tuple(args for args, _ in pairs), tuple(value for _, value in pairs))


def _call_pair(given: Any, expected: Any) -> tuple[list[Any], Any]:
    """Read one call: a list as it is, text as one JSON value per line (the output likewise)."""
    if not isinstance(given, str):
        return (given if isinstance(given, list) else [given]), expected
    try:
        args = [json.loads(line) for line in given.split("\n") if line.strip()]
        return args, json.loads(expected) if isinstance(expected, str) else expected
    except ValueError:
        return [given], expected


def _source(value: Any, key: str, parse: bool) -> str:
    text = "\n".join(value) if isinstance(value, list) and all(map(_is_text, value)) else value
    if not isinstance(text, str) or not text.strip():
        raise RewardError(f"test_cases: {key} got {_short(value)}, allowed: Python source")
    if not parse:
        return text
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise RewardError(f"test_cases: {key} is not valid Python: {error}") from None
    if not body:
        raise RewardError(f"test_cases: {key} got no statement, allowed: at least one test")
    return text


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _as_text(value: Any) -> str:
    if isinstance(value, list) and all(map(_is_text, value)):
        return "\n".join(value)
    return value if isinstance(value, str) else json.dumps(value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
