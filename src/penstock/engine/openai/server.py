"""One HTTP server: calls with JSON, streamed completions, vLLM's pause, and a connection that shows its end.

Each call opens one connection. Closing the connection cancels the call: servers stop generating for a
client that has disconnected. No proxies, no redirects, no cookies. Completions have token ids both ways
(`return_token_ids`, which vLLM and SGLang offer); text is never read. A completion comes in chunks that
are checked one by one; a whole answer is its only chunk.
"""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from statistics import median
from typing import Any
from urllib.parse import urlsplit

import httpx2

from penstock.engine.protocol import FinishReason, GenerationRequest, SamplingParams
from penstock.engine.remote_requests import sampling_fields

COMPLETIONS = "/v1/completions"
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
            yield await self.post(COMPLETIONS, body)
            return
        async with self._response("POST", COMPLETIONS, body) as response:
            if "text/event-stream" not in response.headers.get("content-type", ""):
                raise HttpError(
                    f"{self.url}{COMPLETIONS}: the answer is not a stream of events", 406
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
        """Whether the server can pause, as vLLM can; end a pause that a dead client left behind."""
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


# ---- completions

STREAMED = {"stream": True, "stream_options": {"include_usage": True}}
# A server fills what a request leaves out from the model's generation config.
NEUTRAL = {"presence_penalty": 0.0, "frequency_penalty": 0.0}
VLLM_NEUTRAL = {"repetition_penalty": 1.0, "min_p": 0.0}  # SGLang has them too, OpenAI has not
_REPEATED_TOKEN, _REPETITIONS = 3, 16
_TOP_TOKENS = 5  # more are refused by some servers


class WrongAnswer(Exception):
    """The server's answer is malformed or does not fit the request."""


def completion_body(
    model: str, request: GenerationRequest, end_ids: Sequence[int] = ()
) -> dict[str, Any]:
    """The body of a request; a partial response joins the prompt and shortens the limits."""
    return {
        "model": model,
        "prompt": [*request.prompt_ids.tolist(), *request.response_ids.tolist()],
        "return_token_ids": True,
        "add_special_tokens": False,
        **NEUTRAL,
        **sampling_fields(request, end_ids),
    }


def probe_body(model: str) -> dict[str, Any]:
    """A request for one token with top_k = 1: its log-prob is 0 only if the server counts filters in."""
    return {
        "model": model,
        "prompt": [2, 3],
        "max_tokens": 1,
        "temperature": 1.0,
        "top_k": 1,
        "logprobs": 0,
        "return_token_ids": True,
        **NEUTRAL,
    }


async def penalty_of(server: Server, model: str, neutral: dict[str, float]) -> float:
    """How far, in nats, a penalty moves a repeated token against others; 0 if the server cannot tell.

    Compares the likeliest tokens after a repeated one: as the server samples them, and as it scores a
    prompt, where no penalty counts. The normalisation cancels in the difference.
    """
    body = {
        "model": model,
        "max_tokens": 1,
        "temperature": 1.0,
        "top_p": 1.0,
        "logprobs": _TOP_TOKENS,
        **NEUTRAL,
        **neutral,
    }
    prompt = [_REPEATED_TOKEN] * _REPETITIONS
    try:
        scored = await server.post(
            COMPLETIONS, {**body, "prompt": [*prompt, _REPEATED_TOKEN], "echo": True}
        )
        sampled = await server.post(COMPLETIONS, {**body, "prompt": prompt})
        before, after = _top_logprobs(scored, len(prompt)), _top_logprobs(sampled, 0)
        repeated = scored["choices"][0]["logprobs"]["tokens"][len(prompt)]
    except (HttpError, WrongAnswer, LookupError):  # it does not score prompts
        return 0.0
    moves = {token: after[token] - before[token] for token in before.keys() & after.keys()}
    own = moves.pop(repeated, None)
    return abs(own - median(moves.values())) if own is not None and moves else 0.0


def _top_logprobs(answer: Any, place: int) -> dict[str, float]:
    try:
        return dict(answer["choices"][0]["logprobs"]["top_logprobs"][place])
    except (KeyError, IndexError, TypeError, ValueError):
        raise WrongAnswer("got no log-probs of the likeliest tokens") from None


def is_unfiltered(sampling: SamplingParams) -> bool:
    """Whether raw log-probs equal those of the sampling distribution."""
    return (
        sampling.temperature in (0.0, 1.0)
        and sampling.top_p == 1.0
        and sampling.top_k == 0
        and sampling.min_tokens == 0
    )


class CompletionChunks:
    """Reads the chunks of one completion; checks them against the request and each other."""

    def __init__(self, most: int) -> None:
        self._most, self._tokens = most, 0
        self._reason: FinishReason | None = None

    def read(self, chunk: Any) -> tuple[list[int], list[float]]:
        """A chunk's ids and log-probs; raise `WrongAnswer` if it is malformed or an error."""
        usage = chunk.get("usage") if isinstance(chunk, dict) else None
        counted = usage.get("completion_tokens") if isinstance(usage, dict) else None
        if counted is not None and not chunk.get("choices") and counted != self._tokens:
            raise WrongAnswer(
                f"usage: got {counted} tokens, allowed: the {self._tokens} that arrived"
            )
        if isinstance(chunk, dict) and chunk.get("choices") == []:  # it carries only the usage
            return [], []
        try:
            choice = chunk["choices"][0]
            ids = choice.get("token_ids")
            logprobs = (choice.get("logprobs") or {}).get("token_logprobs")
            reason = choice.get("finish_reason")
        except (AttributeError, KeyError, IndexError, TypeError):
            raise WrongAnswer(f"got {str(chunk)[:200]}, allowed: a completion") from None
        if reason is not None and not ids and logprobs is None:  # a last chunk without tokens
            ids, logprobs = [], []
        if not isinstance(ids, list) or not isinstance(logprobs, list):
            raise WrongAnswer(
                "got no token ids or no log-probs, allowed: a server with return_token_ids"
            )
        if self._reason is not None and (ids or reason):
            raise WrongAnswer("got tokens after the end of the completion")
        most = self._most - self._tokens
        if len(ids) != len(logprobs) or len(ids) > most:
            raise WrongAnswer(
                f"got {len(ids)} token ids and {len(logprobs)} log-probs, allowed: equal, at most {most}"
            )
        if not all(isinstance(token, int) for token in ids):
            raise WrongAnswer("got a token id that is not an integer")
        if not all(isinstance(value, float | int) for value in logprobs):
            raise WrongAnswer("got a log-prob that is not a number")
        self._tokens += len(ids)
        if reason is not None:
            if reason not in ("stop", "length", "abort"):
                raise WrongAnswer(f"finish_reason: got {reason!r}, allowed: stop, length, abort")
            self._reason = reason
        return ids, logprobs

    @property
    def complete(self) -> bool:
        """Whether the last token has arrived."""
        return self._reason is not None

    def end(self) -> FinishReason:
        """The finish reason, after the last chunk."""
        if self._reason is None:
            raise WrongAnswer("got a completion without finish_reason")
        if not self._tokens and self._reason != "abort":
            raise WrongAnswer("got no tokens, allowed: at least 1")
        return self._reason
