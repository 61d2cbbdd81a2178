"""The HTTP endpoint of agents: an OpenAI server on this machine with one key per session.

Sits between an agent's client library and `run/session.py`. `dialects.py` reads and writes the bodies. A key
opens the session it was made for and nothing else, and only while its rollout runs. HTTP/1.1 with
keep-alive, on the driver's event loop; bodies have a Content-Length, streams are server-sent events.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.errors import PenstockError, UserError
from penstock.rollout.agent.dialects import DIALECTS, BadRequest, Dialect
from penstock.rollout.agent.session import ContextOverflow, Session, TurnsExceeded
from penstock.types import ModelCall

_MOST_BYTES = 64 << 20  # of a request's body
_MOST_HEADERS = 64 << 10
_CLOSE_WAIT_S = 5.0  # for connections that were cut
_REASONS = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found"}


@dataclass(slots=True, frozen=True)
class _Request:
    method: str
    path: str
    headers: dict[str, str]  # names in small letters
    body: bytes


class Refused(PenstockError):
    """A request gets an error as its answer."""

    def __init__(self, status: int, message: str, code: str = "") -> None:
        super().__init__(message)
        self.status, self.code = status, code


class Endpoint:
    """Serves the sessions that are open, on a port of this machine."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.base_url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/v1"
        self._sessions: dict[str, Session] = {}
        self._server: asyncio.Server | None = None
        self._connections: dict[asyncio.StreamWriter, asyncio.Task[Any]] = {}

    async def start(self) -> None:
        self._server = await asyncio.start_server(
            self._serve, sock=self._socket, limit=_MOST_HEADERS
        )

    async def close(self) -> None:
        """Stop listening, and cut the connections that are open."""
        if self._server is not None:
            self._server.close()
        for writer in list(self._connections):
            writer.close()
        if self._connections:
            await asyncio.wait(list(self._connections.values()), timeout=_CLOSE_WAIT_S)
        self._socket.close()

    def open(self, session: Session) -> str:
        """Return a new key for the session."""
        key = f"sk-penstock-{secrets.token_urlsafe(24)}"
        self._sessions[key] = session
        return key

    def shut(self, key: str) -> None:
        """Make a key worthless."""
        self._sessions.pop(key, None)

    # -- one connection --------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections[writer] = task
        try:
            while (request := await _read_request(reader)) is not None:
                await self._answer(request, reader, writer)
                if request.headers.get("connection", "").lower() == "close":
                    break
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # the client is gone, or speaks no HTTP
        except Refused as error:
            await _send(writer, error.status, {"error": {"message": str(error)}})
        finally:
            del self._connections[writer]
            with contextlib.suppress(ConnectionError):
                writer.close()
                await writer.wait_closed()

    async def _answer(
        self, request: _Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        dialect = DIALECTS.get(request.path)
        try:
            session = self._session_of(request)
            if request.path == "/v1/models":
                await _send(writer, 200, {"object": "list", "data": [{"id": "policy"}]})
                return
            if dialect is None or request.method != "POST":
                allowed = ", ".join(f"POST {path}" for path in DIALECTS)
                raise Refused(404, f"got {request.method} {request.path}, allowed: {allowed}")
            calls, body, events = await _ask(dialect, session, request)
        except Refused as error:
            shown = (dialect or DIALECTS["/v1/chat/completions"]).error(str(error), error.code)
            await _send(writer, error.status, shown)
            return
        is_gone = reader.at_eof() or writer.is_closing()  # the client hung up before its answer
        if events is None:
            await _send(writer, 200, body)
        else:
            await _send_events(writer, events)
        if not is_gone:
            session.hear(calls)

    def _session_of(self, request: _Request) -> Session:
        word, _, key = request.headers.get("authorization", "").partition(" ")
        key = key.strip() if word.lower() == "bearer" else request.headers.get("x-api-key", "")
        session = self._sessions.get(key)
        if session is None:
            raise Refused(401, "the key belongs to no session that is open", "invalid_api_key")
        return session


async def _ask(
    dialect: Dialect, session: Session, request: _Request
) -> tuple[list[ModelCall], dict[str, Any], list[tuple[str, Any]] | None]:
    """Return the calls of a request, the answer to its body, and the events if it asks for a stream."""
    is_retry = request.headers.get("x-stainless-retry-count", "0") not in ("", "0")
    try:
        body = json.loads(request.body or b"null")
        asked = dialect.read(body, session.notes)
        calls = await asyncio.gather(
            *(
                session.call(
                    asked.messages, asked.tools, max_tokens=asked.max_tokens, is_retry=is_retry
                )
                for _ in range(asked.n)
            )
        )
    except ContextOverflow as error:
        raise Refused(400, str(error), "context_length_exceeded") from error
    except TurnsExceeded as error:
        raise Refused(400, str(error), "max_turns_exceeded") from error
    except (BadRequest, UserError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise Refused(400, str(error), "invalid_request") from error
    except Exception as error:  # an engine that failed: the agent sees it, the run goes on
        raise Refused(500, f"{type(error).__name__}: {error}", "engine") from error
    shown = dialect.write(asked, calls, session.tree, session.notes)
    return calls, shown, dialect.events(asked, shown) if asked.stream else None


async def _read_request(reader: asyncio.StreamReader) -> _Request | None:
    """Return the next request of a connection; None at its end."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise
        return None
    first, *lines = head.decode("latin-1").rstrip("\r\n").split("\r\n")
    words = first.split(" ")
    if len(words) != 3:
        raise Refused(400, "got no HTTP request")
    headers = {
        name.strip().lower(): value.strip()
        for name, _, value in (line.partition(":") for line in lines)
    }
    size = headers.get("content-length", "0")
    is_number = size.isdecimal() and len(size) < 16
    if headers.get("transfer-encoding") or not is_number or int(size) > _MOST_BYTES:
        raise Refused(400, f"allowed: a body with a Content-Length of at most {_MOST_BYTES}")
    body = await reader.readexactly(int(size))
    path = words[1].partition("?")[0].rstrip("/")
    if path.startswith("/v1/v1/"):  # Anthropic's client appends /v1 to its base_url
        path = path.removeprefix("/v1")
    return _Request(words[0], path, headers, body)


async def _send(writer: asyncio.StreamWriter, status: int, body: Mapping[str, Any]) -> None:
    data = json.dumps(body).encode()
    reason = _REASONS.get(status, "Error")
    head = f"HTTP/1.1 {status} {reason}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    await writer.drain()


async def _send_events(writer: asyncio.StreamWriter, events: list[tuple[str, Any]]) -> None:
    """Send server-sent events; a name is written if it is not empty, text goes as it is."""
    lines = []
    for name, data in events:
        lines.append(f"event: {name}\n" if name else "")
        lines.append(f"data: {data if isinstance(data, str) else json.dumps(data)}\n\n")
    body = "".join(lines).encode()
    head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nCache-Control: no-cache\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    await writer.drain()
