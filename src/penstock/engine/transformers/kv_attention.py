"""Attention of transformers' own layers over our KV caches.

A model loaded with the attention implementation "penstock" runs on rows: input ids [1, rows], one row
per token, from any mix of sequences. Each layer announces itself to `StepCache`, then hands its queries,
keys and values to this thread's current `Step`, which stores and attends. Keys and values are stored as
layers pass them, so latent attention (DeepSeek) is stored expanded. The caches are the runners'.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.cache_utils import Cache

from penstock.errors import UserError
from penstock.model.attention import AttentionCall, OneSequence, Step
from penstock.model.decoder_check import (
    SHORT,
    check_ids,
    difference,
    eager_attention,
    token_logprobs,
)
from penstock.model.families import Family, long_rope_from

IMPLEMENTATION = "penstock"


class _Current(threading.local):
    step: Step | None = None
    layer: int = 0


_current = _Current()


class StepCache(Cache):
    """The model's cache argument: stores nothing, only notes which layer is running."""

    def __init__(self) -> None:
        self.layers: list[Any] = []

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *_: Any,
        **__: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert _current.step is not None, "the model runs outside an engine step"
        _current.layer = layer_idx
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    if kwargs.get("position_bias") is not None:
        raise NotImplementedError("position biases")
    assert _current.step is not None, "the model runs outside an engine step"
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    call = AttentionCall(query, key, value, scale, sliding_window, softcap, s_aux)
    _current.step.store(_current.layer, key, value)
    return _current.step.attend(_current.layer, call), None


AttentionInterface.register(IMPLEMENTATION, _attention)


@dataclass(slots=True, frozen=True, kw_only=True)
class KVShape:
    """What a model stores in a KV cache for one token."""

    layers: int
    heads: int
    key_size: int
    value_size: int
    dtype: torch.dtype
    experts: int = 0  # of a token in a layer, if they are recorded

    @classmethod
    def of(cls, family: Family, dtype: torch.dtype, *, records: bool = False) -> KVShape:
        return cls(
            layers=len(family.layers),
            heads=family.kv_heads,
            key_size=family.head_size,
            value_size=family.head_size,
            dtype=dtype,
            experts=family.experts.count if records and family.experts else 0,
        )

    @property
    def bytes_per_token(self) -> int:
        heads = self.heads * (self.key_size + self.value_size) * self.dtype.itemsize
        return self.layers * (heads + 2 * self.experts)


def probe_shape(model: torch.nn.Module, longest: int) -> KVShape:
    """What each layer stores; refuse models that keep other state, or whose log-probs would be others.

    `longest` is the run's longest sequence.
    """
    name, probe = type(model).__name__, OneSequence()
    if (length := long_rope_from(model.config, longest)) is not None:
        raise UserError(
            f"engine transformers: got {name} with sequences of up to {longest} tokens, of which one of more than "
            f"{length} would turn the positions of all others otherwise (long rope); allowed: sequences of at most "
            f"{length} tokens; use engine vllm for longer ones"
        )
    try:
        _of_one_sequence(model, probe, torch.zeros(2, dtype=torch.int64))
    except (
        AttributeError,
        LookupError,
        NotImplementedError,
        TypeError,
        ValueError,
    ) as error:  # what foreign layers raise that look for state in our cache
        raise UserError(
            f"engine transformers: got {name}, which needs another kind of cache "
            f"({type(error).__name__}: {error}); "
            "allowed: decoders with plain attention; use engine vllm for this model"
        ) from error
    layers = model.config.get_text_config().num_hidden_layers
    shapes = set(probe.shapes)
    if sorted(probe.layers) != list(range(layers)) or len(shapes) != 1:
        raise UserError(
            f"engine transformers: got {name} with {len(probe.layers)} attentions in {layers} layers "
            f"and {len(shapes)} shapes, allowed: the same attention once in every "
            "layer; use engine vllm for this model"
        )
    _check_logprobs(model, longest)
    heads, key_size, value_size = shapes.pop()
    return KVShape(
        layers=layers,
        heads=heads,
        key_size=key_size,
        value_size=value_size,
        dtype=next(model.parameters()).dtype,
    )


def own_logits(
    model: Any,
    step: Step,
    ids_R: torch.Tensor,
    position_R: torch.Tensor,
    kept_K: torch.Tensor | None = None,
) -> torch.Tensor:
    """The logits of the kept rows by the model's own code over a step; None: of all."""
    _current.step = step
    try:
        logits_KV: torch.Tensor = model(
            input_ids=ids_R[None],
            position_ids=position_R[None],
            past_key_values=StepCache(),
            use_cache=True,
            logits_to_keep=0 if kept_K is None else kept_K,
        ).logits[0]
    finally:
        _current.step = None
    return logits_KV


def _of_one_sequence(model: Any, step: Step, ids_T: torch.Tensor) -> torch.Tensor:
    ids_T = ids_T.to(next(model.parameters()).device)
    return own_logits(model, step, ids_T, torch.arange(len(ids_T), device=ids_T.device))


def _check_logprobs(model: Any, longest: int) -> None:
    """Refuse a model whose log-probs over our caches are not those of the unchanged, eager model."""
    text = model.config.get_text_config()
    names = ("sliding_window", "attention_window_size", "attention_chunk_size")
    limits = [getattr(text, name, None) or 0 for name in names]
    outgrown = max((limit for limit in limits if SHORT <= limit < longest), default=0)
    for length in {min(SHORT, longest), min(outgrown + SHORT, longest)}:
        ids_T = check_ids(model.get_input_embeddings().weight.shape[0], length)
        ids_T = ids_T.to(next(model.parameters()).device)
        with torch.no_grad():
            with eager_attention(model):
                plain_TV = model(input_ids=ids_T[None], use_cache=False).logits[0]
            rows_TV = _of_one_sequence(model, OneSequence(), ids_T)
        actual_T, plain_T = token_logprobs(rows_TV, ids_T), token_logprobs(plain_TV, ids_T)
        gap, exact = difference(actual_T, plain_T, plain_TV.dtype)
        if not exact:
            raise UserError(
                f"engine transformers: got {type(model).__name__}, whose log-probs over a KV cache of plain "
                f"attention differ by {gap:.2g} from its own in a sequence of {length} tokens; allowed: "
                "decoders with plain attention; use engine vllm for this model"
            )
