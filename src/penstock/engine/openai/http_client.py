"""A small HTTP/1.1 client on asyncio streams: sends JSON, returns JSON or a stream of events.

Each call opens one connection. Closing the connection cancels the call: servers stop generating for a
client that has disconnected. No proxies, no redirects, no cookies.
"""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

_MOST_BODY = 256 * 1024 * 1024
_MOST_EVENT = 16 * 1024 * 1024
_PROBES = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}  # notices a dead host
Headers = dict[str, str]


class HttpError(Exception):
    """A failed call. `status` is 0 if no answer came; `retryable` says whether to try again."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status

    @property
    def retryable(self) -> bool:
        return self.status == 0 or self.status == 429 or self.status >= 500


@dataclass(slots=True, frozen=True)
class JsonClient:
    """Calls one server."""

    base_url: str
    timeout_s: float = 600.0
    api_key: str = field(default="", repr=False)

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        return await self._call("POST", path, json.dumps(body).encode(), self.timeout_s)

    async def get(self, path: str, timeout_s: float = 10.0) -> Any:
        return await self._call("GET", path, b"", timeout_s)

    async def stream(self, path: str, body: dict[str, Any]) -> AsyncGenerator[Any, None]:
        """Yield the decoded events of a streamed answer until its [DONE].

        The caller sets the timeout: nothing here ends a stream that stays silent.
        """
        writer = None
        try:
            reader, writer = await self._send("POST", path, json.dumps(body).encode())
            status, headers = await _read_head(reader)
            if not 200 <= status < 300:
                text = await _read_body(reader, headers)
                raise self._refusal(path, status, text)
            if "text/event-stream" not in headers.get("content-type", ""):
                raise HttpError(f"{self.base_url}{path}: the answer is not a stream of events", 406)
            async for event in _events(_parts(reader, headers)):
                if event == b"[DONE]":
                    return
                yield json.loads(event)
            raise HttpError(f"{self.base_url}: the stream ended before [DONE]")
        except (OSError, EOFError, ValueError) as error:
            raise HttpError(f"{self.base_url}: {type(error).__name__}: {error}") from error
        finally:
            if writer is not None:
                writer.close()

    async def _call(self, method: str, path: str, body: bytes, timeout_s: float) -> Any:
        try:
            async with asyncio.timeout(timeout_s):
                reader, writer = await self._send(method, path, body)
                try:
                    status, headers = await _read_head(reader)
                    text = await _read_body(reader, headers)
                finally:
                    writer.close()
        except TimeoutError:
            raise HttpError(f"{self.base_url}: no answer within {timeout_s:g} s") from None
        except (OSError, EOFError, ValueError) as error:
            raise HttpError(f"{self.base_url}: {type(error).__name__}: {error}") from error
        if not 200 <= status < 300:
            raise self._refusal(path, status, text)
        if not text.strip():
            return {}
        try:
            return json.loads(text)
        except ValueError:
            raise HttpError(f"{self.base_url}{path}: the answer is not JSON") from None

    def _refusal(self, path: str, status: int, text: str) -> HttpError:
        """Return the error for an answer that is no success; a server may echo the key in it."""
        said = text.replace(self.api_key, "***") if self.api_key else text
        return HttpError(f"{self.base_url}{path}: HTTP {status}: {said[:300]!r}", status)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a connection without a request; it closes when the server's process ends."""
        try:
            async with asyncio.timeout(10.0):
                reader, writer = await self._open()
        except TimeoutError:
            raise HttpError(f"{self.base_url}: no connection within 10 s") from None
        except OSError as error:
            raise HttpError(f"{self.base_url}: {type(error).__name__}: {error}") from error
        connection = writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _PROBES.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        return reader, writer

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        url = urlsplit(self.base_url)
        secure = ssl.create_default_context() if url.scheme == "https" else None
        port = url.port or (443 if secure else 80)
        return await asyncio.open_connection(url.hostname, port, ssl=secure)

    async def _send(
        self, method: str, path: str, body: bytes
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        url = urlsplit(self.base_url)
        reader, writer = await self._open()
        head = [
            f"{method} {url.path.rstrip('/')}{path} HTTP/1.1",
            f"Host: {url.netloc}",
            "Connection: close",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
        ]
        if self.api_key:
            head.append(f"Authorization: Bearer {self.api_key}")
        try:
            writer.write("\r\n".join(head).encode() + b"\r\n\r\n" + body)
            await writer.drain()
        except BaseException:
            writer.close()
            raise
        return reader, writer


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, Headers]:
    status = int((await reader.readuntil(b"\r\n")).split()[1])
    headers: Headers = {}
    while (line := (await reader.readuntil(b"\r\n")).strip()) != b"":
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.strip().lower()] = value.strip().lower()
    return status, headers


async def _parts(reader: asyncio.StreamReader, headers: Headers) -> AsyncIterator[bytes]:
    """Yield the body as it arrives, chunked, of known length or until the end; raise if it is cut."""
    if headers.get("transfer-encoding") == "chunked":
        while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
            yield await reader.readexactly(size)
            await reader.readexactly(2)
    elif "content-length" in headers:
        left = int(headers["content-length"])
        if left > _MOST_BODY:
            raise ValueError(f"an answer of {left} bytes")
        if left:
            yield await reader.readexactly(left)
    else:
        while part := await reader.read(1 << 16):
            yield part


async def _read_body(reader: asyncio.StreamReader, headers: Headers) -> str:
    parts = [part async for part in _parts(reader, headers)]
    return b"".join(parts).decode("utf-8", errors="replace")


async def _events(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield what follows `data:` in server-sent events, line by line."""
    rest = b""
    async for part in parts:
        *lines, rest = (rest + part).split(b"\n")
        if len(rest) > _MOST_EVENT:
            raise ValueError(f"an event of more than {_MOST_EVENT} bytes")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()
