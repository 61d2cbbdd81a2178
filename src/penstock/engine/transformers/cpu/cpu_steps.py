"""One forward pass of the CPU runner: decoded rows first, then packed prompts, then padding.

Prompt tokens attend causally within their own sequence. The tokens of a partial response attend one row
at a time, exactly as when they were decoded, so that continuing from a partial changes no bit.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch.nn import functional

from penstock.engine.transformers.cpu.buckets import Bucket, BucketedKV
from penstock.engine.transformers.sequences import Span
from penstock.model.attention import AttentionCall, causal_attention, plain_attention

QUANTUM = 16  # attention lengths are multiples of it: a vector remainder would change a row's bits
_LEAST_PLAIN = 64  # keys of a plain attention: torch multiplies tiny matrices by other code


def round_up(value: int, quantum: int) -> int:
    return -(-value // quantum) * quantum


class RowsStep:
    """The `Step` of one forward pass: its decoded rows and its prefilled rows."""

    def __init__(self, decode: DecodeRows, prefill: PrefillRows) -> None:
        self._decode, self._prefill = decode, prefill
        self._used = prefill.spans[-1].end if prefill.spans else len(decode.slots_N)

    def store(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self._decode.store(layer, key, value)
        if self._prefill.spans:
            self._prefill.store(layer, key, value)

    def attend(self, layer: int, call: AttentionCall) -> torch.Tensor:
        heads, rows = call.query.shape[1:3]
        output = call.query.new_empty(1, rows, heads, call.value.shape[3])
        self._decode.attend(layer, call, output)
        self._prefill.attend(call, output)
        if self._used < rows:
            output[:, self._used :] = 0
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
            keys, values = part.stored[layer]
            keys.index_copy_(0, part.target, key_RHD[part.first : part.end])
            values.index_copy_(0, part.target, value_RHD[part.first : part.end])

    def attend(self, layer: int, call: AttentionCall, output: torch.Tensor) -> None:
        """Fill the decoded rows of `output` [1, rows, heads, value size]."""
        query_RHD = call.query[0].transpose(0, 1)
        for part in self._parts:
            rows = slice(part.first, part.end)
            key, value = part.seen[layer]
            attend_rows(query_RHD[rows], key, value, part.mask(call.window), call, output[0, rows])


class _BucketRows:
    """The rows of one bucket within a decode step."""

    def __init__(self, bucket: Bucket, first: int, position: np.ndarray) -> None:
        rows = len(bucket.slots)
        self.bucket, self.first, self.end, self._position = bucket, first, first + rows, position
        self.length = min(round_up(int(position.max()) + 1, QUANTUM), bucket.capacity)
        self.target = torch.from_numpy(np.arange(rows) * bucket.capacity + position)
        cache = bucket.keys, bucket.values
        # per layer: all places of the bucket, and [rows, kv heads, length, size] of these rows
        self.stored = list(zip(*(tensor.flatten(1, 2).unbind() for tensor in cache), strict=True))
        visible = (tensor[:, :rows, : self.length].transpose(2, 3).unbind() for tensor in cache)
        self.seen = list(zip(*visible, strict=True))
        self._masks: dict[int | None, torch.Tensor] = {}

    def mask(self, window: int | None) -> torch.Tensor:
        """The additive mask [rows, 1, 1, length]; built once per step for all layers."""
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
        for start, count, length in _prompt_runs(self.spans, joined=not call.needs_plain):
            prompts = slice(start, start + count * length)
            joined = replace(
                call,
                query=_split(call.query, prompts, count),
                key=_split(call.key, prompts, count),
                value=_split(call.value, prompts, count),
            )
            attended_BHLD = causal_attention(joined, slice(None))
            output[0, prompts].unflatten(0, (count, length)).copy_(attended_BHLD.transpose(1, 2))
        for span in self.spans:
            if span.length > span.prompt_length:
                partial = slice(span.start + span.prompt_length, span.end)
                _attend_partial(span, partial, call, output[0, partial])

    def finish(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the prefilled rows, [layers, rows, kv heads, size]."""
        return torch.stack(self._keys), torch.stack(self._values)


def _prompt_runs(spans: list[Span], joined: bool) -> list[tuple[int, int, int]]:
    """(first row, prompts, tokens of each) for prompts of one length in adjacent rows.

    A call of the fused attention costs more than a short prompt. It computes each sequence on its own,
    so joining them changes no bit; `joined` is False for attention without this property.
    """
    runs: list[tuple[int, int, int]] = []
    for span in spans:
        if joined and runs:
            start, count, length = runs[-1]
            if length == span.prompt_length and start + count * length == span.start:
                runs[-1] = (start, count + 1, length)
                continue
        runs.append((span.start, 1, span.prompt_length))
    return runs


def _split(new: torch.Tensor, rows: slice, count: int) -> torch.Tensor:
    """These rows of [1, heads, rows, size] as [count, heads, rows of each, size]."""
    return new[0, :, rows].unflatten(1, (count, -1)).transpose(0, 1)


def _attend_partial(span: Span, rows: slice, call: AttentionCall, output_NHD: torch.Tensor) -> None:
    """Attend for the tokens of a partial response, each as in its own decode step."""
    padded_length = round_up(span.length, QUANTUM)

    def stored(new: torch.Tensor) -> torch.Tensor:
        """[rows, kv heads, padded length, size] without a copy per row."""
        sequence = new[0, :, span.start : span.end].transpose(0, 1)
        padded = sequence.new_zeros(padded_length, *sequence.shape[1:])
        padded[: span.length] = sequence
        return padded.transpose(0, 1).expand(rows.stop - rows.start, -1, -1, -1)

    position = torch.arange(span.prompt_length, span.length)
    key_L = torch.arange(padded_length)
    hidden = key_L[None, :] > position[:, None]
    if call.window is not None:
        hidden |= key_L[None, :] <= position[:, None] - call.window
    mask = torch.zeros(hidden.shape, dtype=call.key.dtype).masked_fill_(hidden, -torch.inf)
    query = call.query[0, :, rows].transpose(0, 1)
    attend_rows(
        query, stored(call.key), stored(call.value), mask[:, None, None, :], call, output_NHD
    )


def attend_rows(
    query_NHD: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    call: AttentionCall,
    output_NHD: torch.Tensor,
) -> None:
    """Attend with one query row per sequence over [rows, kv heads, length, size]; fill `output_NHD`.

    The query heads of one kv head form one product.
    """
    if call.needs_plain:
        missing = max(0, _LEAST_PLAIN - key.shape[2])
        if missing:
            key, value = (functional.pad(stored, (0, 0, 0, missing)) for stored in (key, value))
            mask = functional.pad(mask, (0, missing), value=-torch.inf)
        output_NHD.copy_(
            plain_attention(
                query_NHD[:, :, None],
                key,
                value,
                mask == 0,
                scale=call.scale,
                softcap=call.softcap,
                sink_H=call.sinks,
            )[:, :, 0]
        )
        return
    rows, heads, size = query_NHD.shape
    groups = key.shape[1], heads // key.shape[1]
    output = functional.scaled_dot_product_attention(
        query_NHD.reshape(rows, *groups, size), key, value, attn_mask=mask, scale=call.scale
    )
    output_NHD.view(rows, *groups, -1).copy_(output)
