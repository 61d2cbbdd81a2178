"""One forward pass of the CPU runner: decoded rows first, then packed prompts, then padding.

Prompt tokens attend causally within their own sequence. The tokens of a partial response attend one row
at a time, exactly as when they were decoded, so that continuing from a partial changes no bit.
"""

from __future__ import annotations

import numpy as np
import torch

from penstock.engine.transformers.cpu.buckets import Bucket, BucketedKV
from penstock.engine.transformers.kv_attention import AttentionCall, causal_attention
from penstock.engine.transformers.sequences import Span
from penstock.models.attention import plain_attention

QUANTUM = 16  # attention lengths are multiples of it: a vector remainder would change a row's bits


def round_up(value: int, quantum: int) -> int:
    return -(-value // quantum) * quantum


class RowsStep:
    """The `Step` of one forward pass: its decoded rows and its prefilled rows."""

    def __init__(self, decode: DecodeRows, prefill: PrefillRows) -> None:
        self._decode, self._prefill = decode, prefill

    def store(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self._decode.store(layer, key, value)
        if self._prefill.spans:
            self._prefill.store(layer, key, value)

    def attend(self, layer: int, call: AttentionCall) -> torch.Tensor:
        heads, rows = call.query.shape[1:3]
        output = call.query.new_zeros(1, rows, heads, call.value.shape[3])
        self._decode.attend(layer, call, output)
        self._prefill.attend(call, output)
        return output


class DecodeRows:
    """One row for every sequence in the KV cache, in the order of the buckets."""

    def __init__(self, kv: BucketedKV, length: np.ndarray) -> None:
        self._parts: list[_BucketRows] = []
        slots: list[int] = []
        for bucket in kv.in_use:
            position = length[bucket.slots]
            self._parts.append(_BucketRows(bucket, len(slots), position))
            slots += bucket.slots
        self.slots_N = np.array(slots, np.int64)

    def store(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        key_RHD, value_RHD = key[0].transpose(0, 1), value[0].transpose(0, 1)
        for part in self._parts:
            rows = slice(part.first, part.end)
            for stored, new in ((part.bucket.keys, key_RHD), (part.bucket.values, value_RHD)):
                stored[layer].flatten(0, 1).index_copy_(0, part.target, new[rows])

    def attend(self, layer: int, call: AttentionCall, output: torch.Tensor) -> None:
        """Fill the decoded rows of `output` [1, rows, heads, value size]."""
        query_RHD = call.query[0].transpose(0, 1)
        for part in self._parts:
            rows, bucket = slice(part.first, part.end), part.bucket
            count = part.end - part.first
            key = bucket.keys[layer, :count, : part.length].transpose(1, 2)
            value = bucket.values[layer, :count, : part.length].transpose(1, 2)
            output[0, rows] = _attend_rows(
                query_RHD[rows], key, value, part.mask(call.window), call
            )


class _BucketRows:
    """The rows of one bucket within a decode step."""

    def __init__(self, bucket: Bucket, first: int, position: np.ndarray) -> None:
        rows = len(bucket.slots)
        self.bucket, self.first, self.end, self._position = bucket, first, first + rows, position
        self.length = min(round_up(int(position.max()) + 1, QUANTUM), bucket.capacity)
        self.target = torch.from_numpy(np.arange(rows) * bucket.capacity + position)
        self._masks: dict[int | None, torch.Tensor] = {}

    def mask(self, window: int | None) -> torch.Tensor:
        """Return the additive mask [rows, 1, 1, length]; built once per step for all layers."""
        if window not in self._masks:
            key_L = np.arange(self.length)
            hidden = key_L[None, :] > self._position[:, None]
            if window is not None:
                hidden |= key_L[None, :] <= self._position[:, None] - window
            mask = np.where(hidden, np.float32(-np.inf), np.float32(0))
            self._masks[window] = torch.from_numpy(mask)[:, None, None, :].to(
                self.bucket.keys.dtype
            )
        return self._masks[window]


class PrefillRows:
    """Packed prompts; collects the keys and values of every layer for `finish`."""

    def __init__(self, spans: list[Span]) -> None:
        self.spans = spans
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []

    def store(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        assert layer == len(self._keys), "layers store in their order"
        rows = slice(self.spans[0].start, self.spans[-1].end)
        self._keys.append(key[0, :, rows].transpose(0, 1))
        self._values.append(value[0, :, rows].transpose(0, 1))

    def attend(self, call: AttentionCall, output: torch.Tensor) -> None:
        """Fill the prefilled rows of `output` [1, rows, heads, value size]."""
        for span in self.spans:
            prompt = slice(span.start, span.start + span.prompt_length)
            output[:, prompt] = causal_attention(call, prompt).transpose(1, 2)
            if span.length > span.prompt_length:
                partial = slice(prompt.stop, span.end)
                output[0, partial] = _attend_partial(span, partial, call)

    def finish(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of the prefilled rows, [layers, rows, kv heads, size]."""
        return torch.stack(self._keys), torch.stack(self._values)


def _attend_partial(span: Span, rows: slice, call: AttentionCall) -> torch.Tensor:
    """Attend for the tokens of a partial response, each as in its own decode step."""
    padded_length = round_up(span.length, QUANTUM)

    def stored(new: torch.Tensor) -> torch.Tensor:
        """Return [rows, kv heads, padded length, size] without a copy per row."""
        own = new[0, :, span.start : span.end].transpose(0, 1)
        padded = own.new_zeros(padded_length, *own.shape[1:])
        padded[: span.length] = own
        return padded.transpose(0, 1).expand(rows.stop - rows.start, -1, -1, -1)

    position = torch.arange(span.prompt_length, span.length)
    key_L = torch.arange(padded_length)
    hidden = key_L[None, :] > position[:, None]
    if call.window is not None:
        hidden |= key_L[None, :] <= position[:, None] - call.window
    mask = torch.zeros(hidden.shape, dtype=call.key.dtype).masked_fill_(hidden, -torch.inf)
    query = call.query[0, :, rows].transpose(0, 1)
    return _attend_rows(query, stored(call.key), stored(call.value), mask[:, None, None, :], call)


def _attend_rows(
    query_NHD: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    call: AttentionCall,
) -> torch.Tensor:
    """Attend with one query row per sequence over [rows, kv heads, length, size].

    The query heads of one kv head form one product.
    """
    if call.needs_plain:
        return plain_attention(
            query_NHD[:, :, None],
            key,
            value,
            mask == 0,
            scale=call.scale,
            softcap=call.softcap,
            sink_H=call.sinks,
        )[:, :, 0]
    rows, heads, size = query_NHD.shape
    grouped = query_NHD.reshape(rows, key.shape[1], heads // key.shape[1], size)
    output = torch.nn.functional.scaled_dot_product_attention(
        grouped, key, value, attn_mask=mask, scale=call.scale
    )
    return output.reshape(rows, heads, value.shape[3])
