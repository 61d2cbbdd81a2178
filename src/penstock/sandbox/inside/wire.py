"""Frames between the host, the nursery and the sandboxes: JSON with a length, and file descriptors.

Inside the sandbox: standard library only. Every frame is bounded, so that neither side can make the
other read without end.
"""

from __future__ import annotations

import array
import json
import os
import socket
import struct
from collections.abc import Sequence
from typing import Any

MAX_FRAME_BYTES = 64 << 20
_LENGTH = struct.Struct("!I")


class Closed(Exception):
    """The other side has closed the connection."""


def send(link: socket.socket, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
    """Send one frame, with file descriptors."""
    body = json.dumps(message).encode()
    head = _LENGTH.pack(len(body))
    try:
        if descriptors:
            rights = array.array("i", descriptors)
            link.sendmsg([head], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        else:
            link.sendall(head)
        link.sendall(body)
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
        head += _exactly(link, _LENGTH.size - len(head)) if head else b""
        if not head:
            raise Closed
        return json.loads(_exactly(link, _bounded(head))), list(descriptors)
    except (ConnectionResetError, Closed):
        for descriptor in descriptors:
            os.close(descriptor)
        raise Closed from None


def _bounded(head: bytes) -> int:
    (length,) = _LENGTH.unpack(head)
    if length > MAX_FRAME_BYTES:
        raise Closed
    return int(length)


def _exactly(link: socket.socket, count: int) -> bytes:
    chunks = []
    while count:
        chunk = link.recv(min(count, 1 << 20))
        if not chunk:
            raise Closed
        chunks.append(chunk)
        count -= len(chunk)
    return b"".join(chunks)


class Pipe:
    """Frames over a plain descriptor, for code that may not use socket calls."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def send(self, message: dict[str, Any]) -> None:
        body = json.dumps(message).encode()
        data = memoryview(_LENGTH.pack(len(body)) + body)
        while data:
            try:
                data = data[os.write(self._descriptor, data) :]
            except (BrokenPipeError, ConnectionResetError):
                raise Closed from None

    def receive(self) -> dict[str, Any]:
        return json.loads(self._read(_bounded(self._read(_LENGTH.size))))

    def _read(self, count: int) -> bytes:
        chunks = []
        while count:
            try:
                chunk = os.read(self._descriptor, min(count, 1 << 20))
            except ConnectionResetError:
                raise Closed from None
            if not chunk:
                raise Closed
            chunks.append(chunk)
            count -= len(chunk)
        return b"".join(chunks)
