"""Plain Python data as JSON: the only values that untrusted code may pass to the judging side.

Only exact built-in types arrive on the other side, never an object with methods of its own, so that an
`__eq__` that always says yes stays where it was made. Inside the sandbox: standard library only; the
host uses it, too.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

_SMALL_INT = 1 << 53
_DICTS = (dict, defaultdict, OrderedDict)


class NotPlain(TypeError):
    """The value, or something in it, has no plain form."""


def encode(value: Any, other: Callable[[Any], Any] | None = None) -> Any:
    """Return the JSON form; `other` encodes values that are not plain; without it they raise."""
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if isinstance(value, int):
        number = int.__index__(value)
        return number if -_SMALL_INT < number < _SMALL_INT else {"int": hex(number)}
    if isinstance(value, float):
        return {"float": float.__repr__(value)}
    if kind is list or kind is deque:
        return [encode(item, other) for item in value]
    for name, made in (("tuple", tuple), ("set", set), ("frozenset", frozenset)):
        if kind is made or (made is tuple and isinstance(value, tuple)):
            return {name: [encode(item, other) for item in value]}
    if kind in _DICTS or (isinstance(value, dict) and kind.__module__ == "collections"):
        return {"dict": [[encode(k, other), encode(v, other)] for k, v in value.items()]}
    if kind is bytes or kind is bytearray:
        return {"bytes": value.hex()}
    if kind is complex:
        return {"complex": [float.__repr__(value.real), float.__repr__(value.imag)]}
    if kind is range:
        return {"range": [value.start, value.stop, value.step]}
    if isinstance(value, str):
        return str.__str__(value)
    if other is None:
        raise NotPlain(f"a value of type {kind.__name__} is not plain data")
    return other(value)


def decode(form: Any, other: Callable[[Any], Any] | None = None) -> Any:
    """Return the value of a JSON form; `other` decodes an {"object": ...}."""
    if isinstance(form, list):
        return [decode(item, other) for item in form]
    if not isinstance(form, dict):
        return form
    ((name, content),) = form.items()
    if name == "object" and other is not None:
        return other(content)
    if name in ("tuple", "set", "frozenset"):
        items = [decode(item, other) for item in content]
        return {"tuple": tuple, "set": set, "frozenset": frozenset}[name](items)
    if name == "dict":
        return {decode(k, other): decode(v, other) for k, v in content}
    if name == "int":
        return int(content, 16)
    if name == "float":
        return float(content)
    if name == "bytes":
        return bytes.fromhex(content)
    if name == "complex":
        return complex(float(content[0]), float(content[1]))
    if name == "range":
        return range(*content)
    raise NotPlain(f"got the form {name!r}, allowed: plain data")
