"""HTTP servers inside this process: a Starlette app on a bound socket, and limits on what clients may hold.

The verification server, the agents' endpoint, the dashboard and `penstock serve` use it. uvicorn reads and writes
HTTP; what it does not bound is bounded here: connections per client, silent connections and the time of a stop.
It takes no signals, but for a program that only serves, and polls nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import logging
import re
import signal
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

import h11
import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from penstock.errors import UserError

_BACKLOG = 1024  # a client whose connection is dropped here comes back only after a second
_HEADER_BYTES = 16 << 10
_BUSY = b'{"error": "connections: allowed: no more now"}'
_NO_MORE_CONNECTIONS = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\n"
    b"Connection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(_BUSY), _BUSY)
)
_log = logging.getLogger(__name__)
_silent = logging.Logger("uvicorn", logging.CRITICAL)  # what clients do wrong is not logged


class Shares:
    """An amount that clients share (connections, places, bytes), and the most that one client gets."""

    def __init__(self, total: int, each: int) -> None:
        self._total, self._each = total, each
        self._held: Counter[str] = Counter()
        self.in_use = 0

    def left(self, client: str) -> int:
        return min(self._each - self._held[client], self._total - self.in_use)

    def take(self, client: str, amount: int) -> bool:
        """Give the client this amount; False if too much is in use."""
        if amount > self.left(client):
            return False
        self._held[client] += amount
        self.in_use += amount
        return True

    def give_back(self, client: str, amount: int) -> None:
        self._held[client] -= amount
        self.in_use -= amount
        if not self._held[client]:
            del self._held[client]


class _Connection(H11Protocol):
    """A connection that is refused past its client's share, and cut when it is silent for too long."""

    def __init__(
        self, config: uvicorn.Config, state: ServerState, shares: Shares, silent_s: float
    ) -> None:
        super().__init__(config, state, app_state={})
        self.logger, self.access_log = _silent, False
        self._shares, self._silent_s = shares, silent_s
        self._address, self._admitted = "", False
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._address = self.client[0] if self.client else ""
        self._admitted = self._shares.take(self._address, 1)
        if self._admitted:
            self._watch()
        else:
            transport.write(_NO_MORE_CONNECTIONS)
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._admitted:
            self._shares.give_back(self._address, 1)
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        """Read on; a request without a Host, as hand-written clients send it, has an empty one."""
        head, end, rest = data.partition(b"\r\n\r\n")
        begins = self.is_idle and not self.conn.trailing_data[0]
        if end and begins and b"\r\nhost:" not in head.lower():
            data = head + b"\r\nHost:" + end + rest
        super().data_received(data)

    @property
    def is_idle(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP; cut a client that sends it within a request or behind one."""
        if self.is_idle and self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
            return
        self.cycle.disconnected = True  # the response has no reader
        self.cycle.message_event.set()
        self.transport.abort()

    def on_response_complete(self) -> None:
        self._watch()
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch()

    def _watch(self) -> None:
        """Give the client time to send its next request, or to read the response."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(self._silent_s, self._cut_if_silent)

    def _cut_if_silent(self) -> None:
        if self.is_idle or self.flow.write_paused:
            self.transport.abort()

    def finish(self) -> None:
        """End after the response that is on its way, or now."""
        if self.is_idle:
            self.transport.close()
        else:
            self.cycle.keep_alive = False


class AppServer:
    """Serves an app in the running event loop, from `start` to `close`.

    A connection is cut after `silent_s` without a request on it, or without a client that reads its response.
    """

    def __init__(
        self, app: ASGIApp, *, connections: int, connections_per_client: int, silent_s: float
    ) -> None:
        self._config = uvicorn.Config(
            app,
            http=_Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            proxy_headers=False,
            timeout_keep_alive=int(silent_s) + 1,
            h11_max_incomplete_event_size=_HEADER_BYTES,
        )
        self._shares, self._silent_s = Shares(connections, connections_per_client), silent_s
        self._state = ServerState()
        self._server: asyncio.Server | None = None

    async def start(self, listening: socket.socket) -> None:
        self._config.load()
        self._server = await asyncio.get_running_loop().create_server(
            lambda: _Connection(self._config, self._state, self._shares, self._silent_s),
            sock=listening,
            backlog=_BACKLOG,
        )

    @contextlib.asynccontextmanager
    async def on(self, listening: socket.socket, grace_s: float = 2.0) -> AsyncIterator[None]:
        """Serve on a socket inside a `with` statement."""
        await self.start(listening)
        try:
            yield
        finally:
            await self.close(grace_s)

    async def close(self, grace_s: float = 2.0) -> None:
        """Stop listening, let requests be answered for a moment, then cut what is left."""
        if self._server is None:
            return
        self._server.close()
        connections = [c for c in self._state.connections if isinstance(c, _Connection)]
        for connection in connections:
            connection.finish()
        await self._wait_for_responses(grace_s)
        for connection in connections:
            connection.transport.abort()  # a stream ends when its client is gone
        await self._wait_for_responses(grace_s)
        for task in self._state.tasks:
            task.cancel()
        await self._wait_for_responses(grace_s)

    async def _wait_for_responses(self, at_most_s: float) -> None:
        if self._state.tasks:
            await asyncio.wait(set(self._state.tasks), timeout=at_most_s)


def make_app(routes: Sequence[BaseRoute], *, middleware: Sequence[Middleware] = ()) -> Starlette:
    """An app whose refusals (HTTPException) are JSON, `{"error": reason}`."""
    return Starlette(
        routes=routes,
        middleware=middleware,
        exception_handlers={HTTPException: _refuse, ClientDisconnect: _refuse, 500: _fail},
    )


def json_response(
    value: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """JSON in ASCII, so that text with half a character (a lone surrogate) can be sent too."""
    return Response(json.dumps(value), status, headers, media_type="application/json")


async def _refuse(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):  # the client is gone: nobody reads it
        return Response(status_code=400)
    headers = dict(error.headers or {})
    if error.status_code in (429, 503):
        headers["Retry-After"] = "1"
    return json_response({"error": error.detail}, error.status_code, headers)


async def _fail(request: Request, error: Exception) -> Response:
    _log.error("the server failed a request", exc_info=error)
    return json_response({"error": "the server failed"}, 500)


class NoForeignPages:
    """Middleware that refuses web pages: a Host that is not ours (DNS rebinding), a foreign Origin."""

    def __init__(self, app: ASGIApp, hosts: Sequence[str] = (), *, needs_host: bool = True) -> None:
        """needs_host: refuse a request without a Host, which only a program sends."""
        self._app, self._needs_host = app, needs_host
        self._names = {"localhost", socket.gethostname().lower(), *map(str.lower, hosts)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        host = headers.get("host", "").lower()
        name = re.sub(r":\d*$", "", host)
        response: ASGIApp = self._app
        is_named = bool(name) or self._needs_host
        # a link that a person follows to us is no request of a page
        site, mode = headers.get("sec-fetch-site", "none"), headers.get("sec-fetch-mode")
        is_embedded = site not in ("none", "same-origin") and mode != "navigate"
        origins = [origin.lower() for origin in headers.getlist("origin")]
        if is_named and name not in self._names and not _is_address(name.strip("[]")):
            allowed = "localhost, an IP address, or the option hosts"
            reason = f"host: got {name[:100]!r}, allowed: {allowed}"
            response = json_response({"error": reason}, 421)
        elif is_embedded or any(origin != f"http://{host}" for origin in origins):
            reason = "origin: got that of a web page, allowed: none"
            response = json_response({"error": reason}, 403)
        await response(scope, receive, send)


async def read_body(request: Request, *, most_bytes: int, within_s: float) -> bytes:
    """The request's body; HTTPException if it is too large or takes too long."""
    chunks, size = [], 0
    try:
        async with asyncio.timeout(within_s), contextlib.aclosing(request.stream()) as stream:
            async for chunk in stream:
                size += len(chunk)
                if size > most_bytes:
                    raise HTTPException(413, f"body: allowed: up to {most_bytes >> 20} MiB")
                chunks.append(chunk)
    except TimeoutError:
        raise HTTPException(408, f"body: allowed: within {within_s:g} s") from None
    return b"".join(chunks)


def client_of(request: Request) -> str:
    """The address that a request comes from."""
    return request.client.host if request.client else ""


def listen(command: str, host: str, port: int) -> socket.socket:
    """A socket that is bound to this address; a UserError names the command that cannot have it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise UserError(
            f"{command}: host {host!r}, port {port}: {error.strerror}, allowed: a free port "
            "(--port 0 takes any)"
        ) from None


def url_of(host: str, listening: socket.socket) -> str:
    """The address for clients, with the port that was taken."""
    return f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}"


def run_until_stopped(serve: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    """Run a program whose only work is to serve; Ctrl-C and SIGTERM set the event that ends it."""

    async def main() -> None:
        stopped, loop = asyncio.Event(), asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stopped.set)
        await serve(stopped)

    asyncio.run(main())


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
