"""A small HTTP/1.1 server for clients that are not trusted. Knows nothing of sandboxes.

Everything a client can hold is bounded: connections in all and per client address, the size of headers and
bodies, the memory of all bodies together, the time for headers and body, and its share of a round of the
event loop (`links.py`). A handler gets a request before its body is read, so that it can refuse it first.
Requests of web pages are refused: their Host is a name that is not ours (DNS rebinding), or they carry a
foreign Origin.

Consumes connections, produces requests for one handler; woken by sockets and its own time limits.
"""

from __future__ import annotations

import asyncio
import contextlib
import http
import ipaddress
import json
import logging
import re
import socket
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from penstock.reward.sandbox.links import Client, Link, Waste

_HEADER_BYTES = 16 << 10
_MOST_HEADERS = 64
_BACKLOG = 1024  # a client whose connection is dropped here comes back only after a second
_ACCEPTED_AT_ONCE = 64  # then others have their turn in the event loop, however many connect
_MOST_REFUSED = 64  # connections that are kept open for the reply to be read
_REFUSED_AT_ONCE = 8  # with a reply; more are closed without one
_NO_DESCRIPTOR_S = 1.0  # wait before the next connection is taken if the process can open no more
_LINGER_S, _LINGER_BYTES = 2.0, 64 << 20  # for a refused client that is still sending
_LINGER_PAUSE_S = 0.02  # between two reads of what it sends: refusals must not keep the loop busy
_REQUEST_LINE = re.compile(rb"([A-Z]{1,10}) (/[\x21-\x7e]{0,2000}) HTTP/1\.([01])")
_HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]{1,100}):[ \t]*([\x20-\x7e\x80-\xff\t]*?)[ \t]*")
_NUMBER = re.compile(r"[0-9]{1,12}")
_NO_WASTE = (422, 429)  # a request that could not be granted, of a client that follows the rules
_log = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True, kw_only=True)
class ListenerLimits:
    """What clients may hold."""

    connections: int
    connections_per_client: int
    header_s: float
    body_s: float
    body_bytes: int
    all_bodies_bytes: int
    waste_s: float = 0.01  # wait of a client for each of many connections that brought nothing
    hosts: tuple[str, ...] = ()  # names besides localhost, this machine's name and IP addresses


class Refusal(Exception):
    """A refused request: an HTTP status and the reason."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(slots=True, kw_only=True)
class Request:
    """A request whose body may still be on its way."""

    method: str
    path: str
    headers: dict[str, str]
    client: str  # the address that it comes from
    read_body: Callable[[], Awaitable[bytes]]
    has_left: Callable[[], bool]  # whether nobody waits for the reply any more


@dataclass(slots=True, kw_only=True)
class Reply:
    """A reply that is not JSON: a body, or a stream that lasts until the client leaves."""

    content_type: str
    body: bytes = b""
    stream: AsyncGenerator[bytes, None] | None = None
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class _Connection:
    link: Link
    held_bytes: int = 0  # of all_bodies_bytes, by the body of the present request
    unread: int = 0  # bytes of the present body that are not read yet
    busy: bool = False  # between the head of a request and its reply
    useful: bool = False  # a request on it was answered and not refused


Handler = Callable[[Request], Awaitable[dict[str, Any] | Reply]]


class Listener:
    """Serves one handler, which returns JSON or a Reply, or raises Refusal."""

    def __init__(self, handler: Handler, limits: ListenerLimits) -> None:
        self._handler, self._limits = handler, limits
        self._connections: dict[asyncio.Task[None], _Connection] = {}  # those that are served
        self._clients: dict[str, Client] = {}  # those with a connection
        self._number = 0  # of connections: served, and not served yet
        self._next_comes = False  # the next round serves more connections
        self._refused: deque[socket.socket] = deque()  # they may still read why
        self._held_bytes = 0
        self._waste = Waste(limits.waste_s, time.monotonic)
        self._listening: socket.socket | None = None
        self._names = {"localhost", socket.gethostname().lower(), *map(str.lower, limits.hosts)}

    async def start(self, listening: socket.socket) -> None:
        listening.setblocking(False)
        listening.setsockopt(
            socket.IPPROTO_TCP, socket.TCP_NODELAY, 1
        )  # its connections inherit it
        listening.listen(_BACKLOG)
        self._listening = listening
        asyncio.get_running_loop().add_reader(listening, self._accept)

    async def close(self) -> None:
        """Stop listening, let the requests at hand be answered, cut every connection."""
        assert self._listening is not None
        asyncio.get_running_loop().remove_reader(self._listening)
        self._listening.close()
        for link in self._refused:
            link.close()
        self._refused.clear()
        for client in list(self._clients.values()):
            while client.not_served:
                self._forget(client.not_served.popleft(), client)
        busy = [task for task, one in self._connections.items() if one.busy]
        if busy:
            await asyncio.wait(busy, timeout=_LINGER_S)
        tasks = list(self._connections)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _accept(self) -> None:
        """Take the connections that wait, and refuse those that are too many.

        They wait in one row: a client behind 300 of another waits until all of them are taken, so taking
        one must cost little.
        """
        assert self._listening is not None
        refused = 0
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                link, peer = self._listening.accept()
            except (BlockingIOError, InterruptedError):
                break
            except ConnectionAbortedError:
                continue
            except OSError as error:  # no descriptor or memory is left for now
                _log.warning("no connection can be taken: %s", error.strerror)
                loop = asyncio.get_running_loop()
                loop.remove_reader(self._listening)
                loop.call_later(_NO_DESCRIPTOR_S, self._accept_again)
                break
            link.setblocking(False)
            if self._take(link, str(peer[0]) if peer else ""):
                continue
            refused += 1
            if refused <= _REFUSED_AT_ONCE:
                self._refuse(link)
            else:
                link.close()
        if not self._next_comes:
            self._serve_next()

    def _take(self, link: socket.socket, address: str) -> bool:
        """Note a connection that is to be served; return False if there are too many."""
        client = self._clients.get(address)
        number = client.number if client else 0
        if (
            self._number >= self._limits.connections
            or number >= self._limits.connections_per_client
        ):
            return False
        if client is None:
            client = self._clients[address] = Client(address)
        self._number += 1
        client.number += 1
        client.not_served.append(link)
        return True

    def _forget(self, link: socket.socket, client: Client) -> None:
        link.close()
        self._number -= 1
        client.number -= 1
        if not client.number:
            del self._clients[client.address]
            client.close()

    def _refuse(self, link: socket.socket) -> None:
        """Tell a client to come back; what it sends is not read."""
        with contextlib.suppress(OSError):  # it is gone
            link.send(_NO_MORE)
            link.shutdown(socket.SHUT_WR)
        self._refused.append(link)
        if len(self._refused) > _MOST_REFUSED:
            self._close_refused()
        else:
            asyncio.get_running_loop().call_later(_LINGER_S, self._close_refused)

    def _close_refused(self) -> None:
        if self._refused:
            self._refused.popleft().close()

    def _accept_again(self) -> None:
        if self._listening is not None and self._listening.fileno() >= 0:  # not closed
            asyncio.get_running_loop().add_reader(self._listening, self._accept)

    def _serve_next(self) -> None:
        """Begin to serve one connection of each client; the next round serves the next ones."""
        self._next_comes = False
        for client in self._clients.values():
            if client.not_served and not self._must_wait(client):
                one = _Connection(Link(client.not_served.popleft(), client))
                task = asyncio.create_task(self._serve(one))
                self._connections[task] = one
                task.add_done_callback(self._served)
                self._next_comes = self._next_comes or bool(client.not_served)
        if self._next_comes:
            asyncio.get_running_loop().call_soon(self._serve_next)

    def _must_wait(self, client: Client) -> bool:
        """Return whether a client waits for what it wasted; it is served again when it has waited."""
        wait_s = self._waste.wait_s(client.address)
        if wait_s and not client.waits:
            client.waits = True
            asyncio.get_running_loop().call_later(wait_s, self._has_waited, client)
        return client.waits

    def _has_waited(self, client: Client) -> None:
        client.waits = False
        if not self._next_comes:
            self._serve_next()

    def _served(self, task: asyncio.Task[None]) -> None:
        link = self._connections.pop(task).link
        self._forget(link.socket, link.client)
        if not task.cancelled() and (fault := task.exception()) is not None:
            _log.error("the server failed a connection", exc_info=fault)

    async def _serve(self, one: _Connection) -> None:
        try:
            while await self._answer_one(one):
                async with asyncio.timeout(self._limits.body_s):
                    await one.link.turn()
                if wait_s := self._waste.wait_s(one.link.client.address):
                    await asyncio.sleep(wait_s)
        except (OSError, EOFError, TimeoutError):  # gone, or did not say in time what it wants
            if not one.useful:
                self._waste.add(one.link.client.address)

    async def _answer_one(self, one: _Connection) -> bool:
        """Answer one request; return whether the connection stays open for another."""
        keep, status = False, 200
        body: dict[str, Any] | Reply
        try:
            request, keep = await self._read_head(one)
            one.busy = True
            body = await self._handler(request)
            one.useful = True
        except Refusal as refusal:
            one.useful = refusal.status in _NO_WASTE
            if not one.useful:
                self._waste.add(one.link.client.address)
            status, body = refusal.status, {"error": str(refusal)}
        except (OSError, EOFError, TimeoutError):
            raise
        except Exception:  # a fault of ours: the client gets a 500, the log the traceback
            _log.exception("the server failed a request")
            status, body = 500, {"error": "the server failed"}
        finally:
            self._held_bytes -= one.held_bytes
            one.held_bytes = 0
        keep = keep and not one.unread
        if isinstance(body, Reply) and body.stream is not None:
            await self._stream(one, body, body.stream)
            return False
        await self._reply(one, _packed(status, body, keep), keep)
        return keep

    async def _read_head(self, one: _Connection) -> tuple[Request, bool]:
        try:
            async with asyncio.timeout(self._limits.header_s):
                head = await one.link.read_until(b"\r\n\r\n", _HEADER_BYTES)
        except ValueError:
            raise Refusal(431, f"headers: allowed: up to {_HEADER_BYTES} bytes") from None
        first, *lines = head[:-4].split(b"\r\n")
        line = _REQUEST_LINE.fullmatch(first)
        if line is None:
            raise Refusal(400, "request: allowed: HTTP/1.1")
        headers = _headers(lines)
        self._check_origin(headers)
        one.unread = _length(headers)
        if line[1] == b"POST" and "content-length" not in headers:
            raise Refusal(411, "content-length: got none, allowed: the size of the body")
        request = Request(
            method=line[1].decode(),
            path=line[2].decode(),
            headers=headers,
            client=one.link.client.address,
            read_body=lambda: self._read_body(one, headers),
            has_left=one.link.has_left,
        )
        return request, line[3] == b"1" and headers.get("connection", "").lower() != "close"

    def _check_origin(self, headers: dict[str, str]) -> None:
        host = headers.get("host", "").lower()
        name = host.rpartition(":")[0] if re.search(r":\d*$", host) else host
        if name not in self._names and not _is_address(name.strip("[]")):
            raise Refusal(
                421,
                f"host: got {name[:100]!r}, allowed: localhost, an IP address, or the option hosts",
            )
        origin = headers.get("origin")
        if origin is not None and origin.lower() != f"http://{host}":
            raise Refusal(403, "origin: got that of a web page, allowed: none")

    async def _read_body(self, one: _Connection, headers: dict[str, str]) -> bytes:
        limits, length = self._limits, one.unread
        if length > limits.body_bytes:
            raise Refusal(413, f"body: allowed: up to {limits.body_bytes >> 20} MiB")
        if self._held_bytes + length > limits.all_bodies_bytes:
            raise Refusal(503, "body: allowed: no more bodies now")
        self._held_bytes += length
        one.held_bytes = length
        if headers.get("expect", "").lower() == "100-continue":
            await one.link.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        try:
            async with asyncio.timeout(limits.body_s):
                chunks: list[bytes] = []
                while one.unread:
                    chunk = await one.link.read_some(one.unread, wait=bool(chunks))
                    chunks.append(chunk)
                    one.unread -= len(chunk)
                return b"".join(chunks)
        except TimeoutError:
            raise Refusal(408, f"body: allowed: within {limits.body_s:g} s") from None

    async def _stream(
        self, one: _Connection, reply: Reply, pieces: AsyncGenerator[bytes, None]
    ) -> None:
        one.busy = False  # it has no end of its own: closing the server cuts it
        await self._send(one, _head(reply.status, reply.content_type, reply.headers, False))
        async with contextlib.aclosing(pieces):
            async for piece in pieces:
                await self._send(one, piece)

    async def _reply(self, one: _Connection, packed: bytes, keep: bool) -> None:
        await self._send(one, packed)
        one.busy = False
        if not keep:
            await self._linger(one.link)

    async def _send(self, one: _Connection, data: bytes) -> None:
        async with asyncio.timeout(self._limits.body_s):
            await one.link.send(data)

    async def _linger(self, link: Link) -> None:
        """Let a client read the reply before the connection ends, even if it is still sending."""
        with contextlib.suppress(OSError, TimeoutError):
            link.socket.shutdown(socket.SHUT_WR)
            async with asyncio.timeout(_LINGER_S):
                left = _LINGER_BYTES
                while left > 0 and (size := await link.discard()):
                    left -= size
                    await asyncio.sleep(_LINGER_PAUSE_S)


def _packed(status: int, body: dict[str, Any] | Reply, keep: bool) -> bytes:
    if isinstance(body, Reply):
        size = {"Content-Length": str(len(body.body))}
        return _head(body.status, body.content_type, body.headers | size, keep) + body.body
    data = json.dumps(body).encode()
    more = {"Content-Length": str(len(data))}
    if status in (429, 503):
        more["Retry-After"] = "1"
    return _head(status, "application/json", more, keep) + data


def _head(status: int, content_type: str, more: dict[str, str], keep: bool) -> bytes:
    lines = [
        f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}",
        f"Content-Type: {content_type}",
        f"Connection: {'keep-alive' if keep else 'close'}",
        *(f"{name}: {value}" for name, value in more.items()),
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


_NO_MORE = _packed(503, {"error": "connections: allowed: no more now"}, False)


def _headers(lines: list[bytes]) -> dict[str, str]:
    if len(lines) > _MOST_HEADERS:
        raise Refusal(431, f"headers: got {len(lines)}, allowed: up to {_MOST_HEADERS}")
    headers: dict[str, str] = {}
    for line in lines:
        parts = _HEADER.fullmatch(line)
        if parts is None:
            raise Refusal(400, "headers: allowed: a name and a value in each line")
        name = parts[1].decode().lower()
        if name in headers:
            raise Refusal(400, f"headers: got {name} twice, allowed: once")
        headers[name] = parts[2].decode("latin-1")
    if "transfer-encoding" in headers:
        raise Refusal(411, "transfer-encoding: got one, allowed: none, and a content-length")
    return headers


def _length(headers: dict[str, str]) -> int:
    text = headers.get("content-length", "0")
    if not _NUMBER.fullmatch(text):
        raise Refusal(400, "content-length: allowed: a number")
    return int(text)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
