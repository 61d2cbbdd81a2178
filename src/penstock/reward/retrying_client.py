"""Posts JSON to servers that judge: several URLs in turn, a time limit, retries with back-off.

Any failure raises; only a server's own answer is a verdict. No proxies, no redirects, no cookies.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import Sequence
from typing import Any

import httpx2

from penstock.config.server_url import server_url
from penstock.errors import RewardError

MAX_REPLY_BYTES = 64 << 20
MAX_BACKOFF_S = 30.0
CONNECTIONS = 32


class _RetryableError(Exception):
    """This attempt failed; another may succeed."""

    def __init__(self, reason: str, after_s: float = 0.0) -> None:
        super().__init__(reason)
        self.after_s = after_s


class RetryingClient:
    """Consumes request bodies, produces the replies of the first server that answers."""

    def __init__(
        self,
        kind: str,
        urls: Sequence[str],
        route: str,
        *,
        token: str = "",
        request_timeout_s: float = 120.0,
        retries: int = 5,
        backoff_s: float = 0.2,
        unreachable: type[RewardError] = RewardError,
    ) -> None:
        """kind: what the servers are, for messages; unreachable: raised if none answers."""
        self._kind, self._route, self._unreachable = kind, route, unreachable
        self._urls = [server_url(kind, url).removesuffix(route) for url in urls]
        self._turn = itertools.cycle(range(len(self._urls)))
        self._headers, self._token = {"Content-Type": "application/json"}, token
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        self._request_timeout_s = request_timeout_s
        self._retries, self._backoff_s = retries, backoff_s
        self._client: httpx2.AsyncClient | None = None  # made by the first request
        self._slots = asyncio.Semaphore(CONNECTIONS)

    async def ask(self, request: Any) -> tuple[str, bytes]:
        """(server, reply) of the first server that answers; raise if none does."""
        body = json.dumps(request).encode()
        first, reasons = next(self._turn), list[str]()
        for attempt in range(self._retries + 1):
            url = self._urls[(first + attempt) % len(self._urls)]
            try:
                return url, await self._attempt(url, body)
            except _RetryableError as failure:
                reasons.append(f"{url}: {failure}")
                if attempt < self._retries:
                    await asyncio.sleep(self._pause(attempt, failure.after_s))
        raise self._unreachable(
            f"no {self._kind} answered after {len(reasons)} attempts; last: {reasons[-1]}"
        )

    def _pause(self, attempt: int, asked_s: float) -> float:
        """The back-off before the next attempt: it doubles per round over all servers, with jitter."""
        doubled = self._backoff_s * 2 ** (attempt // len(self._urls))
        return min(MAX_BACKOFF_S, max(asked_s, doubled * random.uniform(0.5, 1.5)))

    async def _attempt(self, url: str, body: bytes) -> bytes:
        if self._client is None:
            self._client = httpx2.AsyncClient(
                headers=self._headers,
                timeout=None,  # the whole request has one
                limits=httpx2.Limits(max_connections=None, max_keepalive_connections=0),
                trust_env=False,
            )
        post, reply = self._client.stream("POST", f"{url}{self._route}", content=body), bytearray()
        try:
            # a wait for one of the connections does not count
            async with self._slots, asyncio.timeout(self._request_timeout_s), post as response:
                async for chunk in response.aiter_bytes():
                    reply += chunk
                    if len(reply) > MAX_REPLY_BYTES:
                        break
        except TimeoutError:
            raise _RetryableError(f"no answer within {self._request_timeout_s:g} s") from None
        except (httpx2.HTTPError, OSError) as error:
            raise _RetryableError(f"{type(error).__name__}: {error}") from None
        status = response.status_code
        if status == 200:
            return bytes(reply)
        message = reply[:4096].decode(errors="replace")
        if self._token:  # the server may echo it
            message = message.replace(self._token, "***")
        message = message[:300]
        if status == 429 or status >= 500:
            after_s = _seconds(response.headers.get("Retry-After", "0"))
            raise _RetryableError(f"status {status}: {message}", after_s)
        raise RewardError(f"{self._kind} {url} refused: status {status}: {message}")

    async def close(self) -> None:
        """End the connections."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()


def _seconds(text: str) -> float:
    try:
        return max(0.0, float(text))
    except ValueError:
        return 0.0
