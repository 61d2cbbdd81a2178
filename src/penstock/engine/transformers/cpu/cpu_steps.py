"""One forward pass of the CPU runner: decoded rows first, then tokens of new requests, then padding.

A token of a new request attends with the bits that it would have as a decoded row. So its keys and values
do not depend on who computes them: a request that goes on from stored ones changes no bit.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch.nn import functional

from penstock.engine.transformers.cpu.buckets import Bucket, BucketedKV
from penstock.engine.transformers.kv_attention import KVShape
from penstock.engine.transformers.prefix_tree import Node, StoredKV
from penstock.model.attention import AttentionCall, Step, expert_numbers, plain_attention

QUANTUM = 16  # attention lengths are multiples of it: a vector remainder would change a row's bits
_QUERIES = 128  # tokens of a run that attend together: they see no keys that only later ones need
_LEAST_PLAIN = 64  # keys of a plain attention: torch multiplies tiny matrices by other code


def round_up(value: int, quantum: int) -> int:
    return -(-value // quantum) * quantum


class RowsStep(Step):
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
        self._prefill.attend(layer, call, output)
        if self._used < rows:
            output[:, self._used :] = 0
        return output

    def choose(
        self, layer: int, kept_K: torch.Tensor | None, expert_RC: torch.Tensor
    ) -> torch.Tensor:
        """Record the router's choice."""
        number_RC = expert_numbers(expert_RC, kept_K, self._used)
        self._decode.record(layer, number_RC)
        self._prefill.record(layer, number_RC)
        return expert_RC


@dataclass(slots=True, frozen=True)
class Span:
    """The rows of one node of the prefix tree within a pass."""

    node: Node
    start: int

    @property
    def end(self) -> int:
        return self.start + len(self.node.ids)


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

    def record(self, layer: int, number_RC: torch.Tensor) -> None:
        """Store the experts of the decoded rows, if buckets have a place for them."""
        for part in self._parts:
            if part.bucket.experts.shape[-1]:
                stored = part.bucket.experts[layer].flatten(0, 1)
                stored.index_copy_(0, part.target, number_RC[part.first : part.end])

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
    """Tokens of new requests, computed together; collects the keys and values of every layer for `finish`.

    A token sees its ancestors in the prefix tree, which are stored or computed in the same pass.
    """

    def __init__(self, nodes: list[Node], start: int, shape: KVShape) -> None:
        # runs of one shape beside each other attend in one call, which costs more than a short run
        self.spans: list[Span] = []
        for node in sorted(nodes, key=lambda node: (node.start, len(node.ids))):
            self.spans.append(Span(node, start))
            start = self.spans[-1].end
        self._rows_of = {span.node: slice(span.start, span.end) for span in self.spans}
        self._masks: Masks = {}
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []
        rows = self.spans[-1].end - self.spans[0].start if self.spans else 0
        self._experts = torch.zeros(shape.layers, rows, shape.experts, dtype=torch.int16)

    def store(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        assert layer == len(self._keys), "layers store in their order"
        rows = slice(self.spans[0].start, self.spans[-1].end)
        self._keys.append(key[0, :, rows].transpose(0, 1))
        self._values.append(value[0, :, rows].transpose(0, 1))

    def record(self, layer: int, number_RC: torch.Tensor) -> None:
        """Keep the experts of the prefilled rows, if they are recorded."""
        if self._experts.numel():
            self._experts[layer] = number_RC[self.spans[0].start : self.spans[-1].end]

    def attend(self, layer: int, call: AttentionCall, output: torch.Tensor) -> None:
        """Fill the prefilled rows of `output` [1, rows, heads, value size]."""
        for (before, length), spans in groupby(self.spans, key=_shape):
            together = list(spans)
            rows = slice(together[0].start, together[-1].end)
            seen = [self._seen(layer, span.node, call) for span in together]
            keys, values = (torch.stack(tensors) for tensors in zip(*seen, strict=True))
            query = call.query[0, :, rows].transpose(0, 1).unflatten(0, (-1, length))
            target = output[0, rows].unflatten(0, (-1, length))
            attend_parts(query, keys, values, before, call, target, self._masks)

    def finish(self) -> Iterator[tuple[Node, StoredKV]]:
        """Each computed node with its keys and values."""
        if self.spans:
            first = self.spans[0].start
            computed = StoredKV(torch.stack(self._keys), torch.stack(self._values), self._experts)
            for span in self.spans:
                yield span.node, computed[span.start - first : span.end - first]

    def _seen(
        self, layer: int, node: Node, call: AttentionCall
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a node behind those of its ancestors, [kv heads, padded length, size]."""
        padded = round_up(node.end, QUANTUM)
        keys = call.key.new_zeros(call.key.shape[1], padded, call.key.shape[3])
        values = call.value.new_zeros(call.value.shape[1], padded, call.value.shape[3])
        for part in [*node.ancestors, node]:
            tokens = slice(part.start, part.end)
            if part.kv is None:
                rows = self._rows_of[part]
                keys[:, tokens], values[:, tokens] = call.key[0, :, rows], call.value[0, :, rows]
            else:
                keys[:, tokens] = part.kv.keys[layer].transpose(0, 1)
                values[:, tokens] = part.kv.values[layer].transpose(0, 1)
        return keys, values


def _shape(span: Span) -> tuple[int, int]:
    return span.node.start, len(span.node.ids)


Masks = dict[tuple[int, int, int, int | None], torch.Tensor]  # built once for all layers


def attend_parts(
    query_CLHD: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    before: int,
    call: AttentionCall,
    output_CLHD: torch.Tensor,
    masks: Masks,
) -> None:
    """Attend for runs of tokens behind `before` others, over keys padded to QUANTUM, some tokens at a time."""
    length = query_CLHD.shape[1]
    for first in range(0, length, _QUERIES):
        part = slice(first, min(length, first + _QUERIES))
        visible = round_up(before + part.stop, QUANTUM)
        shape = before + first, part.stop - first, visible, call.window
        if shape not in masks:
            masks[shape] = _mask(*shape, key.dtype)
        seen = key[:, :, :visible], value[:, :, :visible]
        attend_runs(query_CLHD[:, part], *seen, masks[shape], call, output_CLHD[:, part])


def _mask(
    first: int, count: int, visible: int, window: int | None, dtype: torch.dtype
) -> torch.Tensor:
    """The additive mask [queries, keys] of tokens from `first` on."""
    position, key_L = torch.arange(first, first + count), torch.arange(visible)
    hidden = key_L[None, :] > position[:, None]
    if window is not None:
        hidden |= key_L[None, :] <= position[:, None] - window
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)


def attend_runs(
    query_CLHD: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask_LK: torch.Tensor,
    call: AttentionCall,
    output_CLHD: torch.Tensor,
) -> None:
    """Attend for runs of tokens over [runs, kv heads, length, size], with the bits of `attend_rows`.

    All tokens of a run form one product where the machine's library gives it the bits of single rows.
    """
    count, length, heads, size = query_CLHD.shape
    kv_heads, group = key.shape[1], heads // key.shape[1]
    if call.needs_plain or not joins_rows(group, size, value.shape[3], key.dtype):
        step = 32 if call.needs_plain else length  # plain operations copy the keys of each row
        for run in range(count):
            for first in range(0, length, step):
                rows = query_CLHD[run, first : first + step]
                keys, values = (
                    stored[run].expand(len(rows), -1, -1, -1) for stored in (key, value)
                )
                mask = mask_LK[first : first + step, None, None]
                output = output_CLHD[run, first : first + step]
                attend_rows(rows, keys, values, mask, call, output)
        return
    query = query_CLHD.unflatten(2, (kv_heads, group)).transpose(1, 2).flatten(2, 3)
    mask = mask_LK.repeat_interleave(group, dim=0)
    attended = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask[None, None], scale=call.scale
    )
    output_CLHD.unflatten(2, (kv_heads, group)).copy_(
        attended.unflatten(2, (length, group)).transpose(1, 2)
    )


@functools.cache
def joins_rows(group: int, key_size: int, value_size: int, dtype: torch.dtype) -> bool:
    """Whether tokens that attend together have the bits of tokens that attend alone; tried once."""
    generator = torch.Generator().manual_seed(0)
    keys, most = 1136, _QUERIES  # more keys than the library computes at once

    def draw(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator).to(dtype)

    query = draw(most, group, key_size)
    key, value = draw(1, 1, keys, key_size), draw(1, 1, keys, value_size)
    call = AttentionCall(query, key, value, key_size**-0.5, None, None, None)
    hidden = torch.arange(keys)[None, :] > torch.arange(keys - most - 5, keys - 5)[:, None]
    mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)
    alone, together = query.new_empty(2, most, group, value_size)
    attend_rows(
        query, key.expand(most, -1, -1, -1), value.expand(most, -1, -1, -1), mask[:, None, None],
        call, alone,
    )  # fmt: skip
    for count in (1, 2, 3, 17, 33, most):
        for first in {0, most - count}:
            part = slice(first, first + count)
            attended = functional.scaled_dot_product_attention(
                query[part].reshape(1, 1, count * group, key_size), key, value,
                attn_mask=mask[part].repeat_interleave(group, dim=0)[None, None], scale=call.scale,
            )  # fmt: skip
            together[part] = attended[0, 0].unflatten(0, (count, group))
            if not torch.equal(together[part], alone[part]):
                return False
    return True


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
