"""Plain Python data as JSON: the only values that untrusted code may pass to the judging side.

Only copies of exact built-in types arrive on the other side, never an object with methods of its own, so
that an `__eq__` that always says yes stays where it was made. `decode` trusts nothing: whatever is
not a form that `encode` makes raises NotPlain. Inside the sandbox: standard library only.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

MAX_DEPTH = 100
MAX_INT_BITS = 1 << 20
_SMALL_INT = 1 << 53
_DICTS = (dict, defaultdict, OrderedDict)
Other = Callable[[Any], Any]


class NotPlain(TypeError):
    """The value, or something in it, has no plain form, or the form is none."""


def encode(value: Any, other: Other | None = None) -> Any:
    """Return the JSON form; `other` encodes values that are not plain; without it they raise."""
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if isinstance(value, int):
        return _encode_int(int.__index__(value))
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
        return {"range": [_encode_int(part) for part in (value.start, value.stop, value.step)]}
    if isinstance(value, str):
        return str.__str__(value)
    if other is None:
        raise NotPlain(f"a value of type {kind.__name__} is not plain data")
    return other(value)


def _encode_int(number: int) -> Any:
    if number.bit_length() > MAX_INT_BITS:
        raise NotPlain(f"an integer of {number.bit_length()} bits: at most {MAX_INT_BITS} pass")
    return number if -_SMALL_INT < number < _SMALL_INT else {"int": hex(number)}


def decode(form: Any, other: Other | None = None) -> Any:
    """Return the value of a JSON form; `other` decodes an {"object": ...}."""
    try:
        return _decode(form, other, 0)
    except (ValueError, TypeError, OverflowError) as error:
        raise NotPlain(f"not a form of plain data: {str(error)[:100]}") from None


def _decode(form: Any, other: Other | None, depth: int) -> Any:
    kind = type(form)
    if form is None or kind is bool or kind is str:
        return form
    if kind is int and -_SMALL_INT < form < _SMALL_INT:
        return form
    if depth > MAX_DEPTH:
        raise NotPlain(f"nested deeper than {MAX_DEPTH}")
    if kind is list:
        return [_decode(item, other, depth + 1) for item in form]
    name, content = tag(form)
    if name == "object" and other is not None:
        return other(content)
    if name in _LEAVES:
        return _LEAVES[name](content)
    if name == "dict":
        pairs = [_decode(pair, other, depth + 1) for pair in _list(content)]
        return dict(_list(pair, 2) for pair in pairs)
    made = {"tuple": tuple, "set": set, "frozenset": frozenset}.get(name)
    if made is None:
        raise NotPlain(f"got the form {name[:20]!r}, allowed: plain data")
    return made([_decode(item, other, depth + 1) for item in _list(content)])


def tag(form: Any) -> tuple[str, Any]:
    """Return the name and content of a form such as {"tuple": [...]}."""
    if type(form) is not dict or len(form) != 1:
        raise NotPlain(f"got a {type(form).__name__}, allowed: a form of plain data")
    ((name, content),) = form.items()
    return name, content


def _list(content: Any, length: int | None = None) -> list[Any]:
    if type(content) is not list or length not in (None, len(content)):
        raise NotPlain("got another shape, allowed: a list")
    return content


def _text(content: Any, most: int) -> str:
    if type(content) is not str or len(content) > most:
        raise NotPlain("got another shape, allowed: a text of bounded length")
    return content


def read_int(content: Any) -> int:
    return int(_text(content, MAX_INT_BITS // 4 + 4), 16)


def _float(content: Any) -> float:
    return float(_text(content, 40))


def _range(content: Any) -> range:
    first, stop, step = (_decode(part, None, MAX_DEPTH) for part in _list(content, 3))
    return range(first, stop, step)


_LEAVES: dict[str, Callable[[Any], Any]] = {
    "int": read_int,
    "float": _float,
    "bytes": lambda content: bytes.fromhex(_text(content, 1 << 30)),
    "complex": lambda content: complex(*map(_float, _list(content, 2))),
    "range": _range,
}
