"""Client of the verification server: several URLs, time-outs, retries with back-off.

If no server can be reached it raises `SandboxError`: the rollout fails and is tried again later. Only a
server's own answer is a verdict.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

import httpx2

from penstock.config.server_url import server_url
from penstock.errors import RewardError, SandboxError, UserError
from penstock.reward.sandbox.verify import Verdict

MAX_REPLY_BYTES = 64 << 20
MAX_BACKOFF_S = 30.0
CONNECTIONS = 32
ROUTE, BATCH_ROUTE = "/check_correctness", "/check_correctness_batch"
TOKEN_VARIABLE = "PENSTOCK_SANDBOX_TOKEN"


class _RetryableError(Exception):
    """This attempt failed; another may succeed."""

    def __init__(self, reason: str, after_s: float = 0.0) -> None:
        super().__init__(reason)
        self.after_s = after_s


class VerificationClient:
    """Consumes solutions and test cases, produces the verdicts of a server."""

    def __init__(
        self,
        urls: Sequence[str],
        *,
        token: str = "",
        request_timeout_s: float = 120.0,
        retries: int = 5,
        backoff_s: float = 0.2,
    ) -> None:
        if not urls:
            raise UserError("verification server: got no URL, allowed: at least one")
        self._urls = [server_url("verification server", url).removesuffix(ROUTE) for url in urls]
        self._turn = itertools.cycle(range(len(self._urls)))
        self._headers, self._token = {"Content-Type": "application/json"}, token
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        self._request_timeout_s = request_timeout_s
        self._retries, self._backoff_s = retries, backoff_s
        self._client: httpx2.AsyncClient | None = None  # made by the first request

    async def check(
        self,
        test_cases: Mapping[str, Any],
        source: str,
        timeout_s: float,
        stop_at_failure: bool = False,
    ) -> Verdict:
        """The verdict of the first server that answers; raise SandboxError if none does."""
        request = {
            "in_outs": dict(test_cases),
            "generation": source,
            "timeout": timeout_s,
            "stop_at_failure": stop_at_failure,
        }
        body = json.dumps(request).encode()
        first, reasons = next(self._turn), list[str]()
        for attempt in range(self._retries + 1):
            url = self._urls[(first + attempt) % len(self._urls)]
            try:
                return await self._attempt(url, body)
            except _RetryableError as failure:
                reasons.append(f"{url}: {failure}")
                if attempt < self._retries:
                    await asyncio.sleep(self._pause(attempt, failure.after_s))
        raise SandboxError(
            f"no verification server answered after {len(reasons)} attempts; last: {reasons[-1]}"
        )

    def _pause(self, attempt: int, asked_s: float) -> float:
        """The back-off before the next attempt: it doubles per round over all servers, with jitter."""
        doubled = self._backoff_s * 2 ** (attempt // len(self._urls))
        return min(MAX_BACKOFF_S, max(asked_s, doubled * random.uniform(0.5, 1.5)))

    async def _attempt(self, url: str, body: bytes) -> Verdict:
        try:
            status, reply, after_s = await self._post(url, body)
        except (httpx2.HTTPError, OSError) as error:
            raise _RetryableError(f"{type(error).__name__}: {error}") from None
        if status == 200:
            return _read_verdict(url, reply)
        message = reply[:4096].decode(errors="replace")
        if self._token:  # the server may echo it
            message = message.replace(self._token, "***")
        message = message[:300]
        if status == 429 or status >= 500:
            raise _RetryableError(f"status {status}: {message}", after_s)
        raise RewardError(f"verification server {url} refused: status {status}: {message}")

    async def _post(self, url: str, body: bytes) -> tuple[int, bytes, float]:
        """Status, body and Retry-After of a server's response."""
        if self._client is None:
            self._client = httpx2.AsyncClient(
                headers=self._headers,
                timeout=httpx2.Timeout(self._request_timeout_s, pool=None),
                limits=httpx2.Limits(max_connections=CONNECTIONS, max_keepalive_connections=0),
                trust_env=False,
            )
        address, reply = f"{url}{ROUTE}", bytearray()
        async with self._client.stream("POST", address, content=body) as response:
            async for chunk in response.aiter_bytes():
                reply += chunk
                if len(reply) > MAX_REPLY_BYTES:
                    break
            after_s = _seconds(response.headers.get("Retry-After", "0"))
            return response.status_code, bytes(reply), after_s

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


def _read_verdict(url: str, reply: bytes) -> Verdict:
    """Read a reply; refuse any other form, so that a protocol error never looks like a zero."""
    try:
        fields = json.loads(reply)
        result, metadata = fields["result"], fields["metadata"]
    except (ValueError, TypeError, KeyError):
        raise RewardError(f"verification server {url}: the reply is not a verdict") from None
    valid = isinstance(result, list) and bool(result) and set(map(repr, result)) <= _CODES
    if not valid or not isinstance(metadata, list) or len(metadata) != len(result):
        raise RewardError(f"verification server {url}: got result {str(result)[:100]}")
    return Verdict(result, metadata)


_CODES = frozenset(map(repr, (1, 0, -1, -2)))
