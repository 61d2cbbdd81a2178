"""Frames between the host, the nursery and the sandboxes: JSON, raw bytes, and file descriptors.

Inside the sandbox: standard library only. Every frame is bounded, so that neither side can make the
other read without end. Raw bytes travel behind the JSON (`blobs`), so that whoever only passes on the
output of untrusted code never decodes it.
"""

from __future__ import annotations

import array
import json
import os
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Any

MAX_FRAME_BYTES = 64 << 20
_LENGTH = struct.Struct("!I")


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
            rights = array.array("i", descriptors)
            link.sendmsg([head], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        else:
            link.sendall(head)
        link.sendall(rest)
    except (BrokenPipeError, ConnectionResetError):
        raise Closed from None


def receive(link: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return the next frame. Raises Closed at the end, TimeoutError past the socket's time-out."""
    descriptors = array.array("i")
    try:
        head, ancillary, _, _ = link.recvmsg(_LENGTH.size, socket.CMSG_SPACE(16))
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
        if not head:
            raise Closed
        head += _exactly(link.recv, _LENGTH.size - len(head))
        return _body(link.recv, head, MAX_FRAME_BYTES), list(descriptors)
    except (ConnectionResetError, Closed, Malformed):
        for descriptor in descriptors:
            os.close(descriptor)
        raise Closed from None


def _pack(message: dict[str, Any], blobs: Sequence[bytes]) -> tuple[bytes, bytes]:
    """Return the length of the JSON, and the rest of the frame."""
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
        message["blobs"] = [_exactly(read, size) for size in _sizes(message["blobs"], most)]
    return message


def _sizes(sizes: Any, most: int) -> list[int]:
    valid = type(sizes) is list and all(type(size) is int and 0 <= size <= most for size in sizes)
    if not valid or sum(sizes) > most:
        raise Malformed("blobs of another shape")
    return sizes


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
        """Return the next frame. Raises Closed at the end and Malformed for what is no frame."""
        try:
            return _body(self._read, _exactly(self._read, _LENGTH.size), self._most)
        except ConnectionResetError:
            raise Closed from None

    def _read(self, count: int) -> bytes:
        return os.read(self._descriptor, count)
