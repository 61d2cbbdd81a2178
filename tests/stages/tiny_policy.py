"""A tiny policy in several versions, with its tokenizer and weights, for engine tests."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import torch
from small_policy import EOS, SPECIAL, small_model, word_tokenizer
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from penstock.engine.protocol import GenerationRequest, SamplingParams
from penstock.types import WeightHandle
from penstock.weights.model_weights import model_digest, named_weights

__all__ = ["EOS"]

ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789 +-=<>/.,?!"
VOCABULARY = 64


def tiny_model(version: int = 0, implementation: str = "sdpa") -> Qwen3ForCausalLM:
    """Return the policy of a version: same shape, clearly different weights."""
    shape = {"head_dim": 32, "max_position_embeddings": 512, "initializer_range": 0.2}
    model = small_model(VOCABULARY, seed=1000 + version, attention=implementation, **shape)
    return model.eval()


@cache
def reference(version: int) -> Qwen3ForCausalLM:
    return tiny_model(version)


def handle(version: int, digest: str = "") -> WeightHandle:
    return WeightHandle(
        version=version, digest=digest or model_digest(reference(version)), kind="test"
    )


def fetch(source: WeightHandle) -> Iterator[tuple[str, torch.Tensor]]:
    return named_weights(reference(source.version))


def expected_logprobs(
    version: int,
    prompt: np.ndarray,
    response: np.ndarray,
    temperature: float = 1.0,
    banned: int | None = None,
) -> np.ndarray:
    """Return a response's log-probs under `version`; the token `banned` is never sampled."""
    ids = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))[None]
    with torch.no_grad():
        logits = reference(version)(ids).logits[0].float() / (temperature or 1.0)
    if banned is not None:
        logits[:, banned] = -torch.inf
    scores = logits.log_softmax(dim=-1)[len(prompt) - 1 : -1]
    return scores.gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()


def request(
    request_id: str,
    prompt: list[int] | np.ndarray = (5, 6, 7, 8),
    *,
    seed: int = 0,
    response: list[int] | np.ndarray = (),
    **sampling: object,
) -> GenerationRequest:
    return GenerationRequest(
        request_id=request_id,
        prompt_ids=np.array(prompt, np.int32),
        response_ids=np.array(response, np.int32),
        sampling=SamplingParams(**{"max_tokens": 24, **sampling}),
        seed=seed,
    )


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per character."""
    known = len(SPECIAL) + len(ALPHABET)
    return word_tokenizer([*ALPHABET, *(f"<extra{i}>" for i in range(VOCABULARY - known))])


def text_of(ids: list[int]) -> str:
    return _tokenizer().decode(ids, skip_special_tokens=False)


@cache
def _tokenizer() -> PreTrainedTokenizerFast:
    return tokenizer()


def save_policy(folder: Path, version: int = 0) -> Path:
    tiny_model(version).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder
