"""A small HTTP/1.1 client on asyncio streams: JSON in, JSON out, one connection a call. Layer 1.

Closing the connection is how a call is given up: servers stop generating for a client that is gone.
No proxies, no redirects, no cookies.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

_MOST_BODY = 256 * 1024 * 1024


class HttpError(Exception):
    """The call failed; `status` is 0 where no answer came. `again` says whether to retry."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status

    @property
    def again(self) -> bool:
        return self.status == 0 or self.status == 429 or self.status >= 500


@dataclass(slots=True, frozen=True)
class JsonClient:
    """Calls one server."""

    base_url: str
    timeout_s: float = 600.0
    api_key: str = ""

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        return await self._call("POST", path, json.dumps(body).encode(), self.timeout_s)

    async def get(self, path: str, timeout_s: float = 10.0) -> Any:
        return await self._call("GET", path, b"", timeout_s)

    async def _call(self, method: str, path: str, body: bytes, timeout_s: float) -> Any:
        try:
            async with asyncio.timeout(timeout_s):
                status, text = await self._exchange(method, path, body)
        except TimeoutError:
            raise HttpError(f"{self.base_url}: no answer within {timeout_s:g} s") from None
        except (OSError, EOFError, ValueError) as error:
            raise HttpError(f"{self.base_url}: {type(error).__name__}: {error}") from error
        if not 200 <= status < 300:
            raise HttpError(f"{self.base_url}{path}: HTTP {status}: {text[:300]!r}", status)
        if not text.strip():
            return {}
        try:
            return json.loads(text)
        except ValueError:
            raise HttpError(f"{self.base_url}{path}: the answer is not JSON") from None

    async def _exchange(self, method: str, path: str, body: bytes) -> tuple[int, str]:
        url = urlsplit(self.base_url)
        secure = ssl.create_default_context() if url.scheme == "https" else None
        port = url.port or (443 if secure else 80)
        reader, writer = await asyncio.open_connection(url.hostname, port, ssl=secure)
        try:
            head = [
                f"{method} {url.path.rstrip('/')}{path} HTTP/1.1",
                f"Host: {url.netloc}",
                "Connection: close",
                "Content-Type: application/json",
                f"Content-Length: {len(body)}",
            ]
            if self.api_key:
                head.append(f"Authorization: Bearer {self.api_key}")
            writer.write("\r\n".join(head).encode() + b"\r\n\r\n" + body)
            await writer.drain()
            return await _read_answer(reader)
        finally:
            writer.close()


async def _read_answer(reader: asyncio.StreamReader) -> tuple[int, str]:
    status = int((await reader.readuntil(b"\r\n")).split()[1])
    headers: dict[str, str] = {}
    while (line := (await reader.readuntil(b"\r\n")).strip()) != b"":
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.strip().lower()] = value.strip().lower()
    if headers.get("transfer-encoding") == "chunked":
        parts = []
        while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
            parts.append(await reader.readexactly(size))
            await reader.readexactly(2)
        body = b"".join(parts)
    elif "content-length" in headers:
        size = int(headers["content-length"])
        if size > _MOST_BODY:
            raise ValueError(f"an answer of {size} bytes")
        body = await reader.readexactly(size)
    else:
        body = await reader.read()
    return status, body.decode("utf-8", errors="replace")
