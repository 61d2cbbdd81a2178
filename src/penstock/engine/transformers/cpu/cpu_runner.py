"""Runs a transformers model on a CPU for the requests in slots.

Each step is one forward pass over rows: one row per running request, then the prompts of new requests.
Rows are padded to a multiple that makes each row's bits independent of the others (`invariance.py`
measures it). Knows no threads, events or weight versions.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from penstock.engine.transformers.cpu.buckets import BucketedKV
from penstock.engine.transformers.cpu.cpu_steps import DecodeRows, PrefillRows, RowsStep, round_up
from penstock.engine.transformers.cpu.invariance import find_row_quantum, linear_sizes
from penstock.engine.transformers.cpu.packed_linear import ModelLinears, choose_linear
from penstock.engine.transformers.fuse import PlainLinear
from penstock.engine.transformers.kv_attention import KVShape, StepCache, probe_shape, running
from penstock.engine.transformers.options import (
    TransformersOptions,
    longest_request,
)
from penstock.engine.transformers.sequences import (
    CachedPrompt,
    Finished,
    Sequence,
    SlotTable,
    TextOf,
    lay_out,
)
from penstock.model.decoder import hidden_states, logits
from penstock.model.decoder_check import check_decoder
from penstock.model.decoder_weights import read_weights
from penstock.model.families import Family, family_of
from penstock.model.loading import end_ids
from penstock.model.ops import TorchOps
from penstock.model.sampling import sample
from penstock.weights.model_weights import load_weights


class CpuRunner:
    """The model, its KV cache and its slots; see `Runner`."""

    def __init__(
        self, model: torch.nn.Module, options: TransformersOptions, text_of: TextOf
    ) -> None:
        self.model: Any = model
        self.table = SlotTable(options.max_slots, end_ids(model))
        self.vocabulary = model.get_input_embeddings().weight.shape[0]
        self.longest = longest_request(model, options)
        self._text_of = text_of
        longest = min(self.longest, options.load.longest or self.longest)
        self._family = family_of(model.config, longest) if options.fuse else None
        self._linears = ModelLinears(choose_linear(model) if options.pack else PlainLinear)
        plain = False
        if self._family is None:
            shape, sizes, kind = probe_shape(model), linear_sizes(model), PlainLinear
        else:
            self._weights = read_weights(model, self._family, self._linears)
            check_decoder(model, self._family, self._weights, longest)
            shape = _shape_of(self._family, self._weights.embedding.dtype)
            sizes, kind = self._linears.sizes, self._linears.kind
            plain = self._family.softcap is not None or self._family.has_sinks
        self._quantum, self.batch_invariant = find_row_quantum(
            sizes, shape, options.threads, kind, plain
        )
        self._ops = TorchOps(self._quantum)
        self._kv = BucketedKV(shape)
        self.prompts: dict[bytes, CachedPrompt] = {}
        self._cache = StepCache()

    def admit(self, sequence: Sequence) -> bool:
        if not self.table.free_slots:
            return False
        self.table.occupy(sequence)
        return True

    def step(self, new: list[Sequence], keep_prompts: set[bytes]) -> Finished:
        table = self.table
        self._kv.make_room(table.length)
        decode = DecodeRows(self._kv, table.length)
        unique: dict[bytes | int, Sequence] = {}
        for sequence in new:
            if sequence.prompt_key not in self.prompts:
                unique.setdefault(sequence.prompt_key or id(sequence), sequence)
        # prompts of one length beside each other attend in one call
        unique = dict(sorted(unique.items(), key=lambda item: item[1].num_prefill_tokens))
        prefill = PrefillRows(lay_out(list(unique.values()), len(decode.slots_N)))
        logits_KV = self._forward(decode, prefill, list(unique.values()))
        table.length[decode.slots_N] += 1
        slots_N, logits_NV = self._store_new(new, unique, decode, prefill, logits_KV, keep_prompts)
        token_N, logprob_N = sample(logits_NV, table.row_sampling(slots_N))
        return table.record(slots_N, token_N.numpy(), logprob_N.numpy(), self._text_of)

    def synchronize(self) -> Finished:
        return []

    def release(self, slot: int) -> None:
        self._kv.remove(slot)
        self.table.vacate(slot)

    def load(self, weights: dict[str, torch.Tensor]) -> None:
        load_weights(self.model, weights)
        self._linears.refresh()
        self.prompts.clear()

    def sleep(self) -> None:
        self.prompts.clear()
        self._kv.clear()

    def wake(self) -> None:
        """Do nothing: buckets grow again on demand."""

    def _forward(
        self, decode: DecodeRows, prefill: PrefillRows, fresh: list[Sequence]
    ) -> torch.Tensor:
        """Logits of the decoded rows, then of the last row of each prefilled sequence."""
        decoded = len(decode.slots_N)
        num_rows = prefill.spans[-1].end if prefill.spans else decoded
        if not num_rows:
            return torch.zeros(0, self.vocabulary)
        rows = round_up(num_rows, self._quantum)
        ids, positions = np.zeros((2, rows), np.int64)
        ids[:decoded] = self.table.last_token[decode.slots_N]
        positions[:decoded] = self.table.length[decode.slots_N]
        for span, sequence in zip(prefill.spans, fresh, strict=True):
            ids[span.start : span.end] = sequence.token_ids
            positions[span.start : span.end] = np.arange(span.length)
        logit_rows = [*range(decoded), *(span.end - 1 for span in prefill.spans)]
        padded_rows = np.zeros(round_up(len(logit_rows), self._quantum), np.int64)
        padded_rows[: len(logit_rows)] = logit_rows
        rows_K = torch.from_numpy(padded_rows) if prefill.spans else None
        logits_KV = self._logits(
            RowsStep(decode, prefill), torch.from_numpy(ids), torch.from_numpy(positions), rows_K
        )
        return logits_KV[: len(logit_rows)]

    def _logits(
        self,
        step: RowsStep,
        ids_R: torch.Tensor,
        position_R: torch.Tensor,
        kept_K: torch.Tensor | None,
    ) -> torch.Tensor:
        """The logits of the kept rows; None: of all."""
        family = self._family
        if family is not None:
            hidden_KD = hidden_states(
                self._ops, family, self._weights, step, ids_R, position_R, kept_K
            )
            return logits(family, self._weights, hidden_KD)
        with running(step):
            output = self.model(
                input_ids=ids_R[None],
                position_ids=position_R[None],
                past_key_values=self._cache,
                use_cache=True,
                logits_to_keep=0 if kept_K is None else kept_K,
            )
        return output.logits[0]

    def _store_new(
        self,
        new: list[Sequence],
        unique: dict[bytes | int, Sequence],
        decode: DecodeRows,
        prefill: PrefillRows,
        logits_KV: torch.Tensor,
        keep_prompts: set[bytes],
    ) -> tuple[np.ndarray, torch.Tensor]:
        """Store the prefilled keys and values of new requests; return the slots and logits to sample."""
        decoded = len(decode.slots_N)
        if not new:
            return decode.slots_N, logits_KV
        prompts: dict[bytes | int, CachedPrompt] = dict(self.prompts.items())
        if prefill.spans:
            keys, values = prefill.finish()
            for i, (key, span) in enumerate(zip(unique, prefill.spans, strict=True)):
                first, end = span.start - decoded, span.end - decoded
                prompts[key] = CachedPrompt(
                    keys[:, first:end], values[:, first:end], logits_KV[decoded + i]
                )
        first_logits = []
        for sequence in new:
            state = prompts[sequence.prompt_key or id(sequence)]
            self._kv.add(sequence.slot, state.keys, state.values)
            first_logits.append(state.logits_V)
        self.prompts = {
            key: state
            for key, state in prompts.items()
            if isinstance(key, bytes) and key in keep_prompts
        }
        slots_N = np.concatenate([decode.slots_N, [sequence.slot for sequence in new]])
        return slots_N, torch.cat([logits_KV[:decoded], torch.stack(first_logits)])


def _shape_of(family: Family, dtype: torch.dtype) -> KVShape:
    return KVShape(
        layers=len(family.layers),
        heads=family.kv_heads,
        key_size=family.head_size,
        value_size=family.head_size,
        dtype=dtype,
    )
