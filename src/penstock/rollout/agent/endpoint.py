"""The HTTP endpoint of agents: an OpenAI server on this machine with one key per session.

Sits between an agent's client library and `session.py`. `dialects.py` reads and writes the bodies. A key
opens the session it was made for and nothing else, and only while its rollout runs. Served on the driver's
event loop; streams are server-sent events in one piece.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
from collections.abc import Callable
from typing import Any

from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from penstock.errors import PenstockError, UserError
from penstock.rollout.agent.dialects import DIALECTS, BadRequest, Dialect
from penstock.rollout.agent.session import ContextOverflow, Session, TurnsExceeded
from penstock.serving import AppServer, NoForeignPages, json_response, make_app, read_body
from penstock.types import ModelCall

_MOST_BYTES, _BODY_S = 64 << 20, 600.0  # of a request's body
_CONNECTIONS = 10_000
_SILENT_S = 3600.0  # an agent may think, or use a tool, between two requests
_CLOSE_S = 1.0


class RequestError(PenstockError):
    """A request gets an error as its response."""

    def __init__(self, status: int, message: str, code: str = "") -> None:
        super().__init__(message)
        self.status, self.code = status, code


class Endpoint:
    """Serves the sessions that are open, on a port of this machine."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.base_url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/v1"
        self._sessions: dict[str, Session] = {}
        self._server = AppServer(
            make_app(
                [Route("/{path:path}", self._answer, methods=["GET", "POST"])],
                middleware=[Middleware(NoForeignPages, needs_host=False)],
            ),
            connections=_CONNECTIONS,
            connections_per_client=_CONNECTIONS,
            silent_s=_SILENT_S,
        )

    async def start(self) -> None:
        await self._server.start(self._socket)

    async def close(self) -> None:
        """Stop listening, and cut the connections that are open."""
        await self._server.close(_CLOSE_S)
        self._socket.close()

    def open(self, session: Session) -> str:
        """A new key for the session."""
        key = f"sk-penstock-{secrets.token_urlsafe(24)}"
        self._sessions[key] = session
        return key

    def shut(self, key: str) -> None:
        """Make a key worthless."""
        self._sessions.pop(key, None)

    async def _answer(self, request: Request) -> Response:
        path = request.scope["path"].rstrip("/")
        if path.startswith("/v1/v1/"):  # Anthropic's client appends /v1 to its base_url
            path = path.removeprefix("/v1")
        dialect = DIALECTS.get(path)
        try:
            session = self._session_of(request)
            if path == "/v1/models":
                return json_response({"object": "list", "data": [{"id": "policy"}]})
            if dialect is None or request.method != "POST":
                allowed = ", ".join(f"POST {path}" for path in DIALECTS)
                raise RequestError(404, f"got {request.method} {path}, allowed: {allowed}")
            calls, response = await respond(dialect, lambda body: session, request)
        except RequestError as refusal:
            form = dialect or DIALECTS["/v1/chat/completions"]
            return json_response(form.error(str(refusal), refusal.code), refusal.status)
        if not await request.is_disconnected():  # a client may hang up before its response
            session.hear(calls)
        return response

    def _session_of(self, request: Request) -> Session:
        word, _, key = request.headers.get("authorization", "").partition(" ")
        key = key.strip() if word.lower() == "bearer" else request.headers.get("x-api-key", "")
        session = self._sessions.get(key)
        if session is None:
            raise RequestError(401, "the key belongs to no session that is open", "invalid_api_key")
        return session


async def respond(
    dialect: Dialect, open_session: Callable[[Any], Session], request: Request
) -> tuple[list[ModelCall], Response]:
    """The calls that a request asks for, and the response with their answers; raise RequestError for any other.

    open_session: the session that answers a body.
    """
    is_retry = request.headers.get("x-stainless-retry-count", "0") not in ("", "0")
    data = await read_body(request, most_bytes=_MOST_BYTES, within_s=_BODY_S)
    try:
        asked = json.loads(data or b"null")
        session = open_session(asked)
        chat = dialect.read(asked, session.notes)
        calls = await asyncio.gather(
            *(
                session.call(
                    chat.messages,
                    chat.tools,
                    max_tokens=chat.max_tokens,
                    is_retry=is_retry,
                    choice=choice,
                )
                for choice in range(chat.n)
            )
        )
    except ContextOverflow as error:
        raise RequestError(400, str(error), "context_length_exceeded") from error
    except TurnsExceeded as error:
        raise RequestError(400, str(error), "max_turns_exceeded") from error
    except (
        BadRequest,
        UserError,
        UnicodeDecodeError,
        json.JSONDecodeError,
        RecursionError,
    ) as error:
        raise RequestError(400, str(error), "invalid_request") from error
    except Exception as error:  # an engine that failed: the agent sees it, the run goes on
        raise RequestError(500, f"{type(error).__name__}: {error}", "engine") from error
    body = dialect.write(chat, calls, session.tree, session.notes)
    if not chat.stream:
        return calls, json_response(body)
    events = dialect.events(chat, body)
    lines = []
    for name, data in events:
        lines.append(f"event: {name}\n" if name else "")
        text = data if isinstance(data, str) else json.dumps(data)
        lines.append(f"data: {text}\n\n")
    headers = {"Cache-Control": "no-cache"}
    return calls, Response("".join(lines), media_type="text/event-stream", headers=headers)
