"""Attention that engine and trainer share: the flash kernel over sequences of any length, and plain operations.

Plain operations are for scores that no fused kernel computes: Gemma 2 caps its scores softly; GPT-OSS gives
each head a sink, a score that enters the softmax and has no value. They process queries in chunks, so that a
long sequence does not hold all its scores at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

_SCORES_AT_ONCE = 1 << 27  # over all sequences and heads


@dataclass(slots=True, eq=False)
class AttentionCall:
    """The arguments of one layer's attention; keys and values are those of the new rows only."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale: float
    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None

    @property
    def needs_plain(self) -> bool:
        """Whether the scores need what torch's fused attention lacks: a soft cap or sinks."""
        return self.softcap is not None or self.sinks is not None


Chooser = Callable[[int, torch.Tensor | None, torch.Tensor], torch.Tensor]  # as `Step.choose`


class Step(Protocol):
    """One forward pass: stores the keys and values of each layer and attends for its rows."""

    chooser: Chooser | None = None  # who else chooses the experts of rows

    def store(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store the new keys and values, [1, kv heads, rows, head size]."""

    def attend(self, layer: int, call: AttentionCall) -> torch.Tensor:
        """The attention output [1, rows, heads, head size]."""

    def choose(
        self, layer: int, kept_K: torch.Tensor | None, expert_RC: torch.Tensor
    ) -> torch.Tensor:
        """The experts that rows take (`kept_K`: these rows only), from those that the router chose."""
        return expert_RC if self.chooser is None else self.chooser(layer, kept_K, expert_RC)


def expert_numbers(expert_RC: torch.Tensor, kept_K: torch.Tensor | None, rows: int) -> torch.Tensor:
    """The experts of a layer as they are recorded, int16: number + 1; 0 in rows that are not kept, which have none."""
    number_RC = (expert_RC + 1).to(torch.int16)
    if kept_K is None:
        return number_RC
    return number_RC.new_zeros(rows, number_RC.shape[1]).index_copy_(0, kept_K, number_RC)


def fits_flash(key_size: int, value_size: int) -> bool:
    """Whether the flash kernel computes heads of these sizes; those of latent attention differ."""
    return key_size == value_size and key_size % 8 == 0 and key_size <= 256


def can_use_flash(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether the flash kernel computes these heads: on a GPU in half precision, of sizes that fit."""
    half = query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)
    return half and fits_flash(query.shape[-1], value.shape[-1])


def flash_attention(
    query_THD: torch.Tensor,
    key_KHD: torch.Tensor,
    value_KHD: torch.Tensor,
    queries: tuple[torch.Tensor, int],
    keys: tuple[torch.Tensor, int],
    *,
    scale: float,
    window: int | None = None,
) -> tuple[torch.Tensor, ...]:
    """The output of causal attention within each sequence, [T, heads, size], and what backward needs.

    `queries` and `keys` are the cumulative lengths of the sequences, int32, and the largest length.
    """
    output_THD, logsumexp, state, unused, _ = torch.ops.aten._flash_attention_forward(
        query_THD, key_KHD, value_KHD, queries[0], keys[0], queries[1], keys[1], 0.0, True, False,
        scale=scale, window_size_left=-1 if window is None else window - 1, window_size_right=0,
    )  # fmt: skip
    return output_THD, logsumexp, state, unused


def flash_gradients(
    grad_THD: torch.Tensor,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    outputs: tuple[torch.Tensor, ...],
    queries: tuple[torch.Tensor, int],
    keys: tuple[torch.Tensor, int],
    *,
    scale: float,
    window: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of queries, keys and values, from what `flash_attention` was given and returned."""
    query, key, value = torch.ops.aten._flash_attention_backward(
        grad_THD, *inputs, *outputs[:2], queries[0], keys[0], queries[1], keys[1], 0.0, True,
        *outputs[2:], scale=scale, window_size_left=-1 if window is None else window - 1,
        window_size_right=0,
    )  # fmt: skip
    return query, key, value


def plain_attention(
    query_BHQD: torch.Tensor,
    key_BGKD: torch.Tensor,
    value_BGKD: torch.Tensor,
    mask: torch.Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    sink_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """[batch, heads, queries, value size]; `mask` is True where a query sees a key."""
    groups = query_BHQD.shape[1] // key_BGKD.shape[1]
    key_BHKD = key_BGKD.repeat_interleave(groups, dim=1)
    value_BHKD = value_BGKD.repeat_interleave(groups, dim=1)
    batch, heads, queries, _ = query_BHQD.shape
    chunk = max(1, _SCORES_AT_ONCE // (batch * heads * key_BHKD.shape[2]))
    outputs = []
    for first in range(0, queries, chunk):
        part = slice(first, first + chunk)
        chunk_mask = mask if mask.shape[-2] == 1 else mask[..., part, :]
        scores = torch.matmul(query_BHQD[:, :, part], key_BHKD.transpose(2, 3)) * scale
        if scores.dtype != torch.float64:
            scores = scores.float()
        probabilities = _probabilities(scores, chunk_mask, softcap, sink_H)
        outputs.append(torch.matmul(probabilities.to(value_BHKD.dtype), value_BHKD))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)


def _probabilities(
    scores: torch.Tensor, mask: torch.Tensor, softcap: float | None, sink_H: torch.Tensor | None
) -> torch.Tensor:
    """The attention probabilities; with a sink they add up to less than one."""
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~mask, -torch.inf)
    if sink_H is None:
        return scores.softmax(dim=-1)
    sink = sink_H.to(scores.dtype)[:, None, None].expand(scores.shape[0], -1, scores.shape[2], 1)
    return torch.cat([scores, sink], dim=-1).softmax(dim=-1)[..., :-1]


def causal_attention(call: AttentionCall) -> torch.Tensor:
    """Attend within each sequence of the batch, whose queries are its last tokens; [batch, heads, queries, size]."""
    query, key, value = call.query, call.key, call.value
    length, keys = query.shape[2], key.shape[2]
    is_whole = length == keys and (call.window is None or call.window >= keys)
    seen_LK = None
    if call.needs_plain or not is_whole:
        place_K = torch.arange(keys, device=query.device)
        gap_LK = place_K[keys - length :, None] - place_K
        seen_LK = (gap_LK >= 0) & (gap_LK < (call.window or keys))
    if call.needs_plain:
        assert seen_LK is not None
        return plain_attention(
            query, key, value, seen_LK, scale=call.scale, softcap=call.softcap, sink_H=call.sinks
        )
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=seen_LK, is_causal=seen_LK is None, scale=call.scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip


class OneSequence(Step):
    """A step whose rows are one sequence; stores nothing but the shapes that the layers pass."""

    def __init__(self) -> None:
        self.layers: list[int] = []  # those that stored, in their order
        self.shapes: list[tuple[int, int, int]] = []  # of each: kv heads, key size, value size

    def store(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self.layers.append(layer)
        self.shapes.append((key.shape[1], key.shape[3], value.shape[3]))

    def attend(self, layer: int, call: AttentionCall) -> torch.Tensor:
        return causal_attention(call).transpose(1, 2)
