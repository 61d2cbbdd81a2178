"""The three forms of test cases, read and checked; and what counts as the same result.

Broken test cases are a fault of the data and raise `RewardError`; they are never a pass or a fail.
"""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.errors import RewardError

TOLERANCE = 1e-6  # of numbers written with a point or an exponent
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


def read_tests(test_cases: Mapping[str, Any] | None) -> Tests:
    """Return the test cases of a prompt or request; raise a RewardError that says what is wrong."""
    if not isinstance(test_cases, Mapping) or not test_cases:
        raise RewardError(f"test_cases: got {_short(test_cases)}, allowed: {_FORMS}")
    if "asserts" in test_cases:
        return AssertTests(_source(test_cases["asserts"], "asserts"))
    if "check" in test_cases:
        entry_point = test_cases.get("entry_point")
        if not isinstance(entry_point, str) or not entry_point.isidentifier():
            raise RewardError(
                f"test_cases: entry_point got {_short(entry_point)}, allowed: a function's name"
            )
        return AssertTests(_source(test_cases["check"], "check"), entry_point)
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


def _source(value: Any, key: str) -> str:
    text = "\n".join(value) if isinstance(value, list) and all(map(_is_text, value)) else value
    if not isinstance(text, str) or not text.strip():
        raise RewardError(f"test_cases: {key} got {_short(value)}, allowed: Python source")
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


def same_output(expected: str, printed: str) -> bool:
    """Compare line by line without trailing blanks, else word by word, decimal numbers by value."""
    wanted, given = _lines(expected), _lines(printed)
    if wanted == given:
        return True
    left, right = expected.split(), printed.split()
    return len(left) == len(right) and all(map(_same_word, left, right))


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


def _same_word(expected: str, printed: str) -> bool:
    if expected == printed:
        return True
    if "." not in expected and "e" not in expected.lower():
        return False
    try:
        return _close(float(expected), float(printed))
    except ValueError:
        return False


def _close(left: float, right: float) -> bool:
    return math.isclose(left, right, rel_tol=TOLERANCE, abs_tol=TOLERANCE)


def same_value(expected: Any, value: Any) -> bool:
    """Compare as JSON data: a tuple is a list; some datasets wrap the value in a list of one."""
    if _same(expected, value):
        return True
    return isinstance(expected, list) and len(expected) == 1 and _same(expected[0], value)


def _same(expected: Any, value: Any) -> bool:
    if isinstance(value, tuple):
        value = list(value)
    if isinstance(expected, bool) or isinstance(value, bool):
        return expected is value
    if isinstance(expected, float) and isinstance(value, int | float):
        return expected == value or _close(expected, float(value))
    if isinstance(expected, list) and isinstance(value, list):
        return len(expected) == len(value) and all(map(_same, expected, value))
    if isinstance(expected, dict) and isinstance(value, dict):
        return _same_dicts(expected, value)
    if isinstance(expected, list) and isinstance(value, set | frozenset):
        return False
    return bool(expected == value)


def _same_dicts(expected: dict[Any, Any], value: dict[Any, Any]) -> bool:
    by_text = {str(key): item for key, item in value.items()}  # JSON has no other keys
    if len(by_text) != len(expected):
        return False
    return all(
        str(key) in by_text and _same(item, by_text[str(key)]) for key, item in expected.items()
    )
