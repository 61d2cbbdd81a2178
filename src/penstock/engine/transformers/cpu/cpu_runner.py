"""Runs a transformers model on a CPU for the requests that sit in slots.

Each step is one forward pass over rows: one per running request, then the prompts of new ones. Rows are padded to a multiple that makes each row's bits independent of the others
(`invariance.py` measures it). Knows nothing of threads, events or weight versions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from penstock.engine.transformers.cpu.buckets import BucketedKV, DecodeStep, KVShape, round_up
from penstock.engine.transformers.cpu.invariance import find_row_quantum
from penstock.engine.transformers.cpu.mkl import Product, Products, product_kind
from penstock.engine.transformers.fuse import fuse_norms, fuse_projections
from penstock.engine.transformers.kv_attention import AttentionCall, ShapeProbe, StepCache, running
from penstock.engine.transformers.loading import TransformersOptions
from penstock.engine.transformers.prefill import PrefillStep, Span
from penstock.engine.transformers.runner import Finished, end_ids
from penstock.engine.transformers.sampling import sample
from penstock.engine.transformers.sequences import Sequence, SlotTable, TextOf
from penstock.errors import UserError
from penstock.weights.model_weights import load_weights


@dataclass(slots=True)
class Prefilled:
    """A prompt's keys, values and last logits, kept while equal prompts still wait."""

    keys: torch.Tensor
    values: torch.Tensor
    logits_V: torch.Tensor


class CpuRunner:
    """The model, its key-value buckets and its slots. One forward pass a step, prefill included."""

    def __init__(
        self, model: torch.nn.Module, options: TransformersOptions, text_of: TextOf
    ) -> None:
        self.model: Any = model
        self.table = SlotTable(options.max_slots, end_ids(model))
        self.vocabulary = model.get_input_embeddings().weight.shape[0]
        self.longest = longest_request(model, options)
        self._text_of = text_of
        shape = probe_shape(model)
        self._products = Products(product_kind(model) if options.pack else Product)
        fused = fuse_projections(model, self._products.make) if options.fuse else []
        if options.fuse:
            fuse_norms(model)
        self._products.take_linears(model)
        self._quantum, self.batch_invariant = find_row_quantum(
            model, fused, shape, options.threads, self._products.kind
        )
        self._kv = BucketedKV(shape)
        self._prompts: dict[bytes, Prefilled] = {}
        self._cache = StepCache()

    def admit(self, sequence: Sequence) -> bool:
        if not self.table.free:
            return False
        self.table.seat(sequence)
        return True

    def rows_of(self, sequence: Sequence) -> int:
        if sequence.prompt_key in self._prompts:
            return 0
        return len(sequence.request.prompt_ids) + len(sequence.request.response_ids)

    def step(self, new: list[Sequence], keep_prompts: set[bytes]) -> Finished:
        table = self.table
        self._kv.make_room(table.length)
        decode = DecodeStep(self._kv, table.length)
        unique: dict[bytes | int, Sequence] = {}
        for sequence in new:
            if sequence.prompt_key not in self._prompts:
                unique.setdefault(sequence.prompt_key or id(sequence), sequence)
        prefill = PrefillStep(lay_out(list(unique.values()), len(decode.slots_N)))
        logits_KV = self._forward(decode, prefill, list(unique.values()))
        table.length[decode.slots_N] += 1
        slots_N, logits_NV = self._seat(new, unique, decode, prefill, logits_KV, keep_prompts)
        token_N, logprob_N = sample(logits_NV, table.row_sampling(slots_N))
        return table.record(slots_N, token_N.numpy(), logprob_N.numpy(), self._text_of)

    def settle(self) -> Finished:
        return []

    def output(self, slot: int) -> tuple[np.ndarray, np.ndarray]:
        return self.table.output(slot)

    def release(self, slot: int) -> None:
        self._kv.remove(slot)
        self.table.leave(slot)

    def load(self, weights: dict[str, torch.Tensor]) -> None:
        load_weights(self.model, weights)
        self._products.refresh()
        self.forget_prompts()

    def forget_prompts(self) -> None:
        self._prompts.clear()

    def sleep(self) -> None:
        self.forget_prompts()
        self._kv.clear()

    def wake(self) -> None:
        """Buckets grow again by themselves."""

    def _forward(
        self, decode: DecodeStep, prefill: PrefillStep, fresh: list[Sequence]
    ) -> torch.Tensor:
        """Logits of the decoded rows, then of the last row of each prefilled sequence."""
        decoded = len(decode.slots_N)
        used = prefill.spans[-1].end if prefill.spans else decoded
        if not used:
            return torch.zeros(0, self.vocabulary)
        rows = round_up(used, self._quantum)
        ids, positions = np.zeros((2, 1, rows), np.int64)
        ids[0, :decoded] = self.table.last_token[decode.slots_N]
        positions[0, :decoded] = self.table.length[decode.slots_N]
        for span, sequence in zip(prefill.spans, fresh, strict=True):
            ids[0, span.start : span.end] = sequence.token_ids
            positions[0, span.start : span.end] = np.arange(span.length)
        wanted = [*range(decoded), *(span.end - 1 for span in prefill.spans)]
        kept = np.zeros(round_up(len(wanted), self._quantum), np.int64)
        kept[: len(wanted)] = wanted
        with running(RowsStep(decode, prefill)):
            output = self.model(
                input_ids=torch.from_numpy(ids),
                position_ids=torch.from_numpy(positions),
                past_key_values=self._cache,
                use_cache=True,
                logits_to_keep=torch.from_numpy(kept) if prefill.spans else 0,
            )
        return output.logits[0, : len(wanted)]

    def _seat(
        self,
        new: list[Sequence],
        unique: dict[bytes | int, Sequence],
        decode: DecodeStep,
        prefill: PrefillStep,
        logits_KV: torch.Tensor,
        keep_prompts: set[bytes],
    ) -> tuple[np.ndarray, torch.Tensor]:
        """Store what was prefilled for each new request; the rows that are sampled now."""
        decoded = len(decode.slots_N)
        if not new:
            return decode.slots_N, logits_KV
        known: dict[bytes | int, Prefilled] = dict(self._prompts.items())
        if prefill.spans:
            keys, values = prefill.finish()
            for i, (key, span) in enumerate(zip(unique, prefill.spans, strict=True)):
                first, end = span.start - decoded, span.end - decoded
                known[key] = Prefilled(
                    keys[:, first:end], values[:, first:end], logits_KV[decoded + i]
                )
        first_logits = []
        for sequence in new:
            state = known[sequence.prompt_key or id(sequence)]
            self._kv.add(sequence.slot, state.keys, state.values)
            first_logits.append(state.logits_V)
        self._prompts = {
            key: state
            for key, state in known.items()
            if isinstance(key, bytes) and key in keep_prompts
        }
        slots_N = np.concatenate([decode.slots_N, [sequence.slot for sequence in new]])
        return slots_N, torch.cat([logits_KV[:decoded], torch.stack(first_logits)])


class RowsStep:
    """Decoded rows first, prefilled rows after them, then padding."""

    def __init__(self, decode: DecodeStep, prefill: PrefillStep) -> None:
        self._decode, self._prefill = decode, prefill

    def store(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self._decode.store(layer, key, value)
        if self._prefill.spans:
            self._prefill.store(layer, key, value)

    def attend(self, layer: int, call: AttentionCall) -> torch.Tensor:
        heads, rows = call.query.shape[1:3]
        output = call.query.new_zeros(1, rows, heads, call.value.shape[3])
        self._decode.attend(layer, call, output)
        self._prefill.attend(layer, call, output)
        return output


def lay_out(sequences: list[Sequence], start: int) -> list[Span]:
    spans = []
    for sequence in sequences:
        prompt_length = len(sequence.request.prompt_ids)
        length = prompt_length + len(sequence.request.response_ids)
        spans.append(Span(start, prompt_length, length))
        start += length
    return spans


def longest_request(model: torch.nn.Module, options: TransformersOptions) -> int:
    """Most tokens that one request may have, by the model's positions and by the budget."""
    positions = getattr(model.config, "max_position_embeddings", None) or 1 << 30
    return min(positions, options.max_tokens_in_flight or positions)


def probe_shape(model: torch.nn.Module) -> KVShape:
    """Run two tokens and see what each layer stores; refuse models that keep other state."""
    probe = ShapeProbe()
    device = next(model.parameters()).device
    ids = torch.zeros(1, 2, dtype=torch.int64, device=device)
    try:
        with running(probe):
            model(
                input_ids=ids,
                position_ids=torch.arange(2, device=device)[None],
                past_key_values=StepCache(),
                use_cache=True,
                logits_to_keep=1,
            )
    except (AttributeError, LookupError, NotImplementedError, TypeError) as error:
        raise UserError(
            f"engine transformers: got {type(model).__name__}, which asks for another cache "
            f"({type(error).__name__}: {error}); "
            "allowed: decoders with plain attention; use engine vllm for this model"
        ) from error
    layers = model.config.num_hidden_layers
    shapes = set(probe.shapes.values())
    if sorted(probe.shapes) != list(range(layers)) or len(shapes) != 1:
        raise UserError(
            f"engine transformers: got {type(model).__name__} with {len(probe.shapes)} attention "
            f"layers of {layers} and {len(shapes)} shapes, allowed: the same attention in every "
            "layer; use engine vllm for this model"
        )
    heads, key_size, value_size = shapes.pop()
    return KVShape(
        layers=layers,
        heads=heads,
        key_size=key_size,
        value_size=value_size,
        dtype=next(model.parameters()).dtype,
    )
