"""The seam between transformers' own layers and our key-value stores.

A model loaded with the attention implementation "penstock" runs on rows: input ids [1, rows], one row
per token, whichever sequence it belongs to. Each layer tells `StepCache` that it is its turn and hands
queries, keys and values to the step that is current in this thread. Latent attention (DeepSeek) is
thus stored expanded.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from transformers import AttentionInterface
from transformers.cache_utils import Cache

from penstock.models.attention import plain_attention

IMPLEMENTATION = "penstock"


class Step(Protocol):
    """One forward pass: stores what each layer computed and attends for its rows."""

    def store(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Take the new keys and values, [1, kv heads, rows, head size]."""

    def attend(self, layer: int, call: AttentionCall) -> torch.Tensor:
        """The attention output [1, rows, heads, head size]."""


class AttentionCall:
    """What a layer asks for. Keys and values are the new rows only."""

    __slots__ = ("key", "query", "scale", "sinks", "softcap", "value", "window")

    def __init__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> None:
        self.query, self.key, self.value = query, key, value
        self.scale, self.window, self.softcap, self.sinks = scale, window, softcap, sinks

    @property
    def is_plain(self) -> bool:
        """Whether its scores need what torch's fused attention does not have."""
        return self.softcap is not None or self.sinks is not None


class _Current(threading.local):
    step: Step | None = None
    layer: int = 0


_current = _Current()


class StepCache(Cache):
    """What the model takes for its cache; keeps nothing, and notes which layer is at work."""

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
        assert _current.step is not None, "the model runs outside of an engine step"
        _current.layer = layer_idx
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0


@contextmanager
def running(step: Step) -> Iterator[None]:
    """Make `step` the one that this thread's forward pass talks to."""
    _current.step = step
    try:
        yield
    finally:
        _current.step = None


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
    assert _current.step is not None, "the model runs outside of an engine step"
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    call = AttentionCall(query, key, value, scale, sliding_window, softcap, s_aux)
    _current.step.store(_current.layer, key, value)
    return _current.step.attend(_current.layer, call), None


AttentionInterface.register(IMPLEMENTATION, _attention)


class ShapeProbe:
    """A step that attends within its rows and remembers the shapes that the layers gave it."""

    def __init__(self) -> None:
        self.shapes: dict[int, tuple[int, int, int]] = {}  # layer -> kv heads, key size, value size

    def store(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self.shapes[layer] = (key.shape[1], key.shape[3], value.shape[3])

    def attend(self, layer: int, call: AttentionCall) -> torch.Tensor:
        return causal_attention(call, slice(None)).transpose(1, 2)


def causal_attention(call: AttentionCall, rows: slice) -> torch.Tensor:
    """Causal attention among some rows, as one sequence: [1, heads, rows, head size]."""
    query, key, value = call.query[:, :, rows], call.key[:, :, rows], call.value[:, :, rows]
    length = query.shape[2]
    if not call.is_plain and (call.window is None or call.window >= length):
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=call.scale, enable_gqa=True
        )
    position_L = torch.arange(length, device=query.device)
    gap_LL = position_L[:, None] - position_L[None, :]
    seen_LL = gap_LL >= 0
    if call.window is not None:
        seen_LL &= gap_LL < call.window
    if call.is_plain:
        return plain_attention(
            query, key, value, seen_LL, scale=call.scale, softcap=call.softcap, sink_H=call.sinks
        )
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=seen_LL, scale=call.scale, enable_gqa=True
    )
