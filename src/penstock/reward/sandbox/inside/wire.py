"""What passes between the host, the factory and the sandboxes: frames, and plain Python data in them.

A frame is JSON, raw bytes, and file descriptors. Every frame is bounded, so that neither side can make the
other read without end. Raw bytes travel behind the JSON (`blobs`), so that whoever only passes on the
output of untrusted code never decodes it.

Plain data is all that untrusted code may pass to the judging side: copies of exact built-in types, never an object
with methods of its own, so that an `__eq__` that always says yes stays where it was made. `decode` trusts
nothing: whatever is not a form that `encode` makes raises NotPlain. Inside the sandbox: standard library only.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

MAX_FRAME_BYTES = 64 << 20
_LENGTH = struct.Struct("!I")
_MOST_DESCRIPTORS = 4  # that come with one frame


class Closed(Exception):
    """The other side has closed the connection."""


class Malformed(Exception):
    """The other side sent something that is no frame."""


def send(
    link: socket.socket,
    message: dict[str, Any],
    descriptors: Sequence[int] = (),
    blobs: Sequence[bytes] = (),
) -> None:
    """Send one frame, with file descriptors and raw bytes."""
    head, rest = _pack(message, blobs)
    try:
        if descriptors:
            socket.send_fds(link, [head], list(descriptors))
        else:
            link.sendall(head)
        link.sendall(rest)
    except (BrokenPipeError, ConnectionResetError):
        raise Closed from None


def receive(link: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """The next frame. Raises Closed at the end, TimeoutError past the socket's time-out."""
    descriptors: list[int] = []
    try:
        head, descriptors, _, _ = socket.recv_fds(link, _LENGTH.size, _MOST_DESCRIPTORS)
        if not head:
            raise Closed
        head += _exactly(link.recv, _LENGTH.size - len(head))
        return _body(link.recv, head, MAX_FRAME_BYTES), descriptors
    except (ConnectionResetError, Closed, Malformed):
        for descriptor in descriptors:
            os.close(descriptor)
        raise Closed from None


def _pack(message: dict[str, Any], blobs: Sequence[bytes]) -> tuple[bytes, bytes]:
    """The length of the JSON, and the rest of the frame."""
    if blobs:
        message = message | {"blobs": [len(blob) for blob in blobs]}
    body = json.dumps(message).encode()
    return _LENGTH.pack(len(body)), b"".join((body, *blobs))


def _body(read: Callable[[int], bytes], head: bytes, most: int) -> dict[str, Any]:
    """Read a frame behind its length; `blobs` holds its raw bytes."""
    (length,) = _LENGTH.unpack(head)
    if length > most:
        raise Malformed(f"a frame of {length} bytes, allowed: up to {most}")
    text = _exactly(read, length)
    try:
        message = json.loads(text)
    except (ValueError, RecursionError):
        raise Malformed("not JSON") from None
    if type(message) is not dict:
        raise Malformed("not a JSON object")
    if "blobs" in message:
        sizes = message["blobs"]
        valid = type(sizes) is list and all(type(s) is int and 0 <= s <= most for s in sizes)
        if not valid or sum(sizes) > most:
            raise Malformed("blobs of another shape")
        message["blobs"] = [_exactly(read, size) for size in sizes]
    return message


def _exactly(read: Callable[[int], bytes], count: int) -> bytes:
    chunks = []
    while count:
        chunk = read(min(count, 1 << 20))
        if not chunk:
            raise Closed
        chunks.append(chunk)
        count -= len(chunk)
    return b"".join(chunks)


class Pipe:
    """Frames over a plain descriptor, for code that may not use socket calls."""

    def __init__(self, descriptor: int, most: int = MAX_FRAME_BYTES) -> None:
        """Receive and send frames of at most `most` bytes."""
        self._descriptor, self._most = descriptor, most

    def send(self, message: dict[str, Any]) -> None:
        data = memoryview(b"".join(_pack(message, ())))
        if len(data) > self._most:
            raise Malformed(f"a frame of {len(data)} bytes, allowed: up to {self._most}")
        while data:
            try:
                data = data[os.write(self._descriptor, data) :]
            except (BrokenPipeError, ConnectionResetError):
                raise Closed from None

    def receive(self) -> dict[str, Any]:
        """The next frame. Raises Closed at the end and Malformed for what is no frame."""
        try:
            return _body(self._read, _exactly(self._read, _LENGTH.size), self._most)
        except ConnectionResetError:
            raise Closed from None

    def _read(self, count: int) -> bytes:
        return os.read(self._descriptor, count)


# -- plain data --------------------------------------------------------------------------------------

MAX_DEPTH = 100
MAX_INT_BITS = 1 << 20
_SMALL_INT = 1 << 53
_DICTS = (dict, defaultdict, OrderedDict)
Other = Callable[[Any], Any]


class NotPlain(TypeError):
    """A value that has no plain form, or data that is not the form of any value."""


def encode(value: Any, other: Other | None = None) -> Any:
    """The JSON form of a value; `other` encodes values that are not plain; without it they raise."""
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if isinstance(value, int):
        return _encode_int(int.__index__(value))
    if isinstance(value, float):
        return {"float": float.__repr__(value)}
    if kind is list or kind is deque:
        return [encode(item, other) for item in value]
    for name, collection in (("tuple", tuple), ("set", set), ("frozenset", frozenset)):
        if kind is collection or (collection is tuple and isinstance(value, tuple)):
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
    """The value of a JSON form; `other` decodes an {"object": ...}."""
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
    collection = {"tuple": tuple, "set": set, "frozenset": frozenset}.get(name)
    if collection is None:
        raise NotPlain(f"got the form {name[:20]!r}, allowed: plain data")
    return collection([_decode(item, other, depth + 1) for item in _list(content)])


def tag(form: Any) -> tuple[str, Any]:
    """The name and content of a form such as {"tuple": [...]}."""
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


def _float(content: Any) -> float:
    return float(_text(content, 40))


def _range(content: Any) -> range:
    first, stop, step = (_decode(part, None, MAX_DEPTH) for part in _list(content, 3))
    return range(first, stop, step)


_LEAVES: dict[str, Callable[[Any], Any]] = {
    "int": lambda content: int(_text(content, MAX_INT_BITS // 4 + 4), 16),
    "float": _float,
    "bytes": lambda content: bytes.fromhex(_text(content, 1 << 30)),
    "complex": lambda content: complex(*map(_float, _list(content, 2))),
    "range": _range,
}
