"""Bodies and answers of /v1/completions, as the openai engine uses it.

Token ids both ways (`return_token_ids`, which vLLM and SGLang offer); text is never read. An answer comes
in chunks that are checked one by one; a whole answer is its only chunk.
"""

from __future__ import annotations

from typing import Any

from penstock.engine.protocol import FinishReason, GenerationRequest, SamplingParams

STREAMED = {"stream": True, "stream_options": {"include_usage": True}}


class WrongAnswer(Exception):
    """The server's answer is malformed or does not fit the request."""


def completion_body(model: str, request: GenerationRequest) -> dict[str, Any]:
    """The body of a request; a partial response joins the prompt and shortens the limits."""
    sampling, tokens = request.sampling, len(request.response_ids)
    body: dict[str, Any] = {
        "model": model,
        "prompt": [*request.prompt_ids.tolist(), *request.response_ids.tolist()],
        "max_tokens": sampling.max_tokens - tokens,
        "min_tokens": max(0, sampling.min_tokens - tokens),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "seed": (request.seed + tokens) % (1 << 31),
        "logprobs": 0,
        "return_token_ids": True,
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
        "add_special_tokens": False,
    }
    if sampling.stop_token_ids:
        body["stop_token_ids"] = list(sampling.stop_token_ids)
    if sampling.stop:
        body["stop"] = list(sampling.stop)
    return body


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
    }


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
        """Return a chunk's ids and log-probs; raise `WrongAnswer` if it is malformed or an error."""
        self._check_usage(chunk)
        if isinstance(chunk, dict) and chunk.get("choices") == []:  # it carries only the usage
            return [], []
        ids, logprobs, reason = _choice(chunk)
        if self._reason is not None and (ids or reason):
            raise WrongAnswer("got tokens after the end of the completion")
        _check_counts(ids, logprobs, self._most - self._tokens)
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
        """Return the finish reason, after the last chunk."""
        if self._reason is None:
            raise WrongAnswer("got a completion without finish_reason")
        if not self._tokens and self._reason != "abort":
            raise WrongAnswer("got no tokens, allowed: at least 1")
        return self._reason

    def _check_usage(self, chunk: Any) -> None:
        """Check the server's token count, if the chunk has one; many servers send none."""
        usage = chunk.get("usage") if isinstance(chunk, dict) else None
        counted = usage.get("completion_tokens") if isinstance(usage, dict) else None
        if counted is not None and not chunk.get("choices") and counted != self._tokens:
            raise WrongAnswer(
                f"usage: got {counted} tokens, allowed: the {self._tokens} that arrived"
            )


def _choice(answer: Any) -> tuple[list[int], list[float], Any]:
    """Return ids, log-probs and finish reason of the only choice."""
    try:
        choice = answer["choices"][0]
        ids = choice.get("token_ids")
        logprobs = (choice.get("logprobs") or {}).get("token_logprobs")
        reason = choice.get("finish_reason")
    except (AttributeError, KeyError, IndexError, TypeError):
        raise WrongAnswer(f"got {str(answer)[:200]}, allowed: a completion") from None
    if reason is not None and not ids and logprobs is None:  # a last chunk without tokens
        ids, logprobs = [], []
    if not isinstance(ids, list) or not isinstance(logprobs, list):
        raise WrongAnswer(
            "got no token ids or no log-probs, allowed: a server with return_token_ids"
        )
    return ids, logprobs, reason


def _check_counts(ids: list[int], logprobs: list[float], most: int) -> None:
    if len(ids) != len(logprobs) or len(ids) > most:
        raise WrongAnswer(
            f"got {len(ids)} token ids and {len(logprobs)} log-probs, allowed: equal, at most {most}"
        )
    if not all(isinstance(token, int) for token in ids):
        raise WrongAnswer("got a token id that is not an integer")
    if not all(isinstance(value, float | int) for value in logprobs):
        raise WrongAnswer("got a log-prob that is not a number")
