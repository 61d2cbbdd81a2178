"""One HTTP server: calls with JSON, streamed completions, vLLM's pause, and a connection that shows its end.

Each call opens one connection. Closing the connection cancels the call: servers stop generating for a
client that has disconnected. No proxies, no redirects, no cookies.
"""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx2

_COMPLETIONS = "/v1/completions"
_MOST_BODY = 256 * 1024 * 1024
_MOST_EVENT = 16 * 1024 * 1024
_SHORT_S = 10.0  # limit of a short question, or of a connection
_PROBES = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}  # notices a dead host


class HttpError(Exception):
    """A failed call. `status` is 0 if no answer came; `retryable` says whether to try again."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status

    @property
    def retryable(self) -> bool:
        return self.status == 0 or self.status == 429 or self.status >= 500


class Server:
    """Calls one server; every failure is an HttpError."""

    def __init__(self, url: str, timeout_s: float, api_key: str) -> None:
        self.url = url
        self._timeout_s, self._api_key = timeout_s, api_key
        self._client = httpx2.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=None,  # every call sets a limit of its own
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=0),
            trust_env=False,
        )

    @property
    def is_on_this_machine(self) -> bool:
        return urlsplit(self.url).hostname in ("127.0.0.1", "localhost", "::1")

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        return await self._call("POST", path, body, self._timeout_s)

    async def get(self, path: str) -> Any:
        return await self._call("GET", path, None, _SHORT_S)

    async def completions(self, body: dict[str, Any]) -> AsyncGenerator[Any, None]:
        """Yield the decoded events of a streamed answer until its [DONE], or the one whole answer.

        The caller sets the timeout of a stream: nothing here ends one that stays silent.
        """
        if not body.get("stream"):
            yield await self.post(_COMPLETIONS, body)
            return
        async with self._response("POST", _COMPLETIONS, body) as response:
            if "text/event-stream" not in response.headers.get("content-type", ""):
                raise HttpError(
                    f"{self.url}{_COMPLETIONS}: the answer is not a stream of events", 406
                )
            async for event in httpx2.EventSource(response, _MOST_EVENT):
                if event.data == "[DONE]":
                    return
                yield json.loads(event.data)
        raise HttpError(f"{self.url}: the stream ended before [DONE]")

    async def check_health(self) -> None:
        """Raise HttpError if the server does not answer; one without /health counts as alive."""
        try:
            await self.get("/health")
        except HttpError as error:
            if error.retryable:
                raise

    async def has_pause(self) -> bool:
        """Return whether the server can pause, as vLLM can; end a pause that a dead client left behind."""
        try:
            answer = await self.get("/is_paused")
        except HttpError:
            return False
        if not isinstance(answer, dict) or "is_paused" not in answer:
            return False
        if answer["is_paused"]:
            await self.set_paused(False)
        return True

    async def set_paused(self, paused: bool) -> None:
        await self.post("/pause?mode=keep&clear_cache=false" if paused else "/resume", {})

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a connection without a request; the system closes it when the server's process ends."""
        url = urlsplit(self.url)
        secure = ssl.create_default_context() if url.scheme == "https" else None
        port = url.port or (443 if secure else 80)
        try:
            async with asyncio.timeout(_SHORT_S):
                reader, writer = await asyncio.open_connection(url.hostname, port, ssl=secure)
        except TimeoutError:
            raise HttpError(f"{self.url}: no connection within {_SHORT_S:g} s") from None
        except OSError as error:
            raise HttpError(f"{self.url}: {type(error).__name__}: {error}") from error
        connection = writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _PROBES.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        return reader, writer

    async def close(self) -> None:
        await self._client.aclose()

    async def _call(
        self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float
    ) -> Any:
        try:
            async with asyncio.timeout(timeout_s), self._response(method, path, body) as response:
                text = await _read(response)
        except TimeoutError:
            raise HttpError(f"{self.url}: no answer within {timeout_s:g} s") from None
        try:
            return json.loads(text) if text.strip() else {}
        except ValueError as error:
            reason = f"the answer is not JSON: {type(error).__name__}"
            raise HttpError(f"{self.url}{path}: {reason}") from None

    @asynccontextmanager
    async def _response(
        self, method: str, path: str, body: dict[str, Any] | None
    ) -> AsyncIterator[httpx2.Response]:
        """Send a request; yield an answer that is a success, whose body is still to come."""
        try:
            async with self._client.stream(method, path, json=body) as response:
                if not response.is_success:
                    text = (await _read(response)).decode("utf-8", "replace")
                    if self._api_key:  # a server may echo the key
                        text = text.replace(self._api_key, "***")
                    status = response.status_code
                    raise HttpError(f"{self.url}{path}: HTTP {status}: {text[:300]!r}", status)
                yield response
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError, ValueError) as error:
            raise HttpError(f"{self.url}: {type(error).__name__}: {error}") from error


async def _read(response: httpx2.Response) -> bytes:
    parts, size = [], 0
    async for part in response.aiter_bytes():
        parts.append(part)
        size += len(part)
        if size > _MOST_BODY:
            raise ValueError(f"an answer of more than {_MOST_BODY} bytes")
    return b"".join(parts)
