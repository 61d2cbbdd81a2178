"""A tiny policy in several versions, with its tokenizer and weights, for engine tests."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from penstock.engine.protocol import GenerationRequest, SamplingParams
from penstock.types import WeightHandle
from penstock.weights.model_weights import model_digest, named_weights

ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789 +-=<>/.,?!"
EOS = 1
VOCABULARY = 64


def tiny_model(version: int = 0, implementation: str = "sdpa") -> Qwen3ForCausalLM:
    """Return the policy of a version: same shape, clearly different weights."""
    torch.manual_seed(1000 + version)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=EOS,
        initializer_range=0.2,
    )
    model = Qwen3ForCausalLM._from_config(config, attn_implementation=implementation)
    return model.float().eval()


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
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    names = ["<pad>", "<eos>", "<unk>", *ALPHABET]
    names += [f"<extra{i}>" for i in range(VOCABULARY - len(names))]
    core = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def text_of(ids: list[int]) -> str:
    return _tokenizer().decode(ids, skip_special_tokens=False)


@cache
def _tokenizer() -> PreTrainedTokenizerFast:
    return tokenizer()


def save_policy(folder: Path, version: int = 0) -> Path:
    tiny_model(version).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder
