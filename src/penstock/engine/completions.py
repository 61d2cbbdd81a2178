"""The /v1/completions dialect of the openai engine: bodies out, checked answers in. Layer 1.

Token ids both ways (`return_token_ids`, as vLLM and SGLang offer); text is never looked at.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.engine.protocol import FinishReason, GenerationRequest, SamplingParams


class WrongAnswer(Exception):
    """The server answered, but not what was asked for."""


def completion_body(model: str, request: GenerationRequest) -> dict[str, Any]:
    """One request; a partial response is part of the prompt, and its length off the limits."""
    sampling, made = request.sampling, len(request.response_ids)
    body: dict[str, Any] = {
        "model": model,
        "prompt": [*request.prompt_ids.tolist(), *request.response_ids.tolist()],
        "max_tokens": sampling.max_tokens - made,
        "min_tokens": max(0, sampling.min_tokens - made),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "seed": (request.seed + made) % (1 << 31),
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
    """One token that is certain by top_k = 1: its log-prob is 0 exactly if filters are counted in."""
    return {
        "model": model,
        "prompt": [2, 3],
        "max_tokens": 1,
        "temperature": 1.0,
        "top_k": 1,
        "logprobs": 0,
        "return_token_ids": True,
    }


def neutral(sampling: SamplingParams) -> bool:
    """Whether raw log-probs and those of the sampling distribution are the same."""
    return (
        sampling.temperature in (0.0, 1.0)
        and sampling.top_p == 1.0
        and sampling.top_k == 0
        and sampling.min_tokens == 0
    )


def read_completion(answer: Any, most: int) -> tuple[np.ndarray, np.ndarray, FinishReason]:
    """Ids, log-probs and the reason; raises `WrongAnswer` on anything half or odd."""
    try:
        choice = answer["choices"][0]
        ids = choice.get("token_ids")
        logprobs = (choice.get("logprobs") or {}).get("token_logprobs")
        reason = choice.get("finish_reason")
    except (AttributeError, KeyError, IndexError, TypeError):
        raise WrongAnswer(f"not a completion: {str(answer)[:200]}") from None
    if not isinstance(ids, list) or not isinstance(logprobs, list):
        raise WrongAnswer("no token ids or no log-probs; allowed: a server with return_token_ids")
    if len(ids) != len(logprobs) or not 1 <= len(ids) <= most:
        raise WrongAnswer(
            f"got {len(ids)} token ids and {len(logprobs)} log-probs, allowed: equal, 1 to {most}"
        )
    if reason not in ("stop", "length"):
        raise WrongAnswer(f"finish_reason: got {reason!r}, allowed: stop, length")
    if any(value is None for value in logprobs):
        raise WrongAnswer("a log-prob is missing")
    return np.array(ids, np.int32), np.array(logprobs, np.float32), reason
