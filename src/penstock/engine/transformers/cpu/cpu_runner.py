"""Runs a transformers model on a CPU for the requests in slots.

Each step is one forward pass over rows: one row per running request, then the prompts of new requests.
Rows are padded to a multiple that makes each row's bits independent of the others (`invariance.py`
measures it). Knows no threads, events or weight versions.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from penstock.engine.transformers.adapters import NONE, LoopedAdapters
from penstock.engine.transformers.cpu.buckets import BucketedKV
from penstock.engine.transformers.cpu.cpu_steps import DecodeRows, PrefillRows, RowsStep, round_up
from penstock.engine.transformers.cpu.invariance import find_row_quantum, linear_sizes
from penstock.engine.transformers.cpu.packed_linear import ModelLinears, choose_linear
from penstock.engine.transformers.kv_attention import KVShape, own_logits, probe_shape
from penstock.engine.transformers.options import (
    TransformersOptions,
    check_router_replay,
    longest_request,
)
from penstock.engine.transformers.prefix_tree import Node, PrefixTree
from penstock.engine.transformers.sequences import Finished, Sequence, SlotTable, TextOf
from penstock.errors import UserError
from penstock.model.decoder import hidden_states, logits
from penstock.model.decoder_check import check_decoder
from penstock.model.decoder_weights import read_weights
from penstock.model.families import family_of
from penstock.model.joint_weights import PlainLinear
from penstock.model.loading import end_ids
from penstock.model.ops import TorchOps
from penstock.model.sampling import sample
from penstock.store.space import available_mib
from penstock.types import Choices
from penstock.weights.model_weights import load_weights

_KEPT_SHARE = (
    0.25  # of an engine's memory for keys and values: what the prefix tree keeps of ended requests
)
_UNKNOWN_MIB = 4096  # where the system does not tell how much memory is free


class CpuRunner:
    """The model, its KV cache and its slots; see `Runner`."""

    def __init__(
        self, model: torch.nn.Module, options: TransformersOptions, text_of: TextOf
    ) -> None:
        self.model: Any = model
        self.vocabulary = model.get_input_embeddings().weight.shape[0]
        self.longest = longest_request(model, options)
        self._text_of = text_of
        longest = min(self.longest, options.load.longest or self.longest)
        self._family = family_of(model.config, longest) if options.fuse else None
        if options.router_replay:
            check_router_replay(model, self._family)
        self._linears = ModelLinears(choose_linear(model) if options.pack else PlainLinear)
        self.adapters: LoopedAdapters | None = None
        plain = False
        if self._family is None:
            shape, sizes, kind = probe_shape(model, longest), linear_sizes(model), PlainLinear
        else:
            if options.adapters:
                self.adapters = LoopedAdapters(model, self._linears, self._quantum_of)
            self._weights = read_weights(model, self._family, self.adapters or self._linears)
            check_decoder(model, self._family, self._weights, longest)
            dtype = self._weights.embedding.dtype
            shape = KVShape.of(self._family, dtype, records=options.router_replay)
            sizes, kind = self._linears.sizes, self._linears.kind
            plain = self._family.softcap is not None or self._family.has_sinks
        self.table = SlotTable(options.max_slots, end_ids(model), self.adapters)
        self._threads, self._plain = options.threads, plain
        self._quantum, self.batch_invariant = find_row_quantum(
            sizes, shape, options.threads, kind, plain
        )
        if options.arithmetic == "exact" and (self._family is None or not self.batch_invariant):
            raise UserError(
                f"model.arithmetic: got exact with {type(model).__name__} on this CPU, where bits change with "
                "the batch, allowed: deterministic"
            )
        self._ops = TorchOps(self._quantum)
        self._kv = BucketedKV(shape)
        memory = _tokens_in_memory(shape, options)
        self.kv_tokens = max(self.longest, memory)
        self._tree: PrefixTree = PrefixTree(int(_KEPT_SHARE * memory))
        self._keeps_sessions = options.keep_sessions

    def known(self, sequence: Sequence) -> int:
        return sequence.known(self._tree)

    def admit(self, sequence: Sequence, expected: int) -> bool:
        if not self.table.free_slots:
            return False
        sequence.root = sequence.root_in(self._tree)
        self.table.occupy(sequence)
        return True

    def _quantum_of(self, sizes: set[tuple[int, int]]) -> int:
        """The row multiple of an adapter's products."""
        if not self.batch_invariant:
            return 1
        return find_row_quantum(sizes, self._kv.shape, self._threads, plain=self._plain)[0]

    def make_room(self) -> bool:
        return True  # buckets grow on demand

    def step(self, new: list[Sequence], keep_prompts: set[bytes]) -> Finished:
        table = self.table
        prefilled = [sequence for sequence in new if not self._join_decode(sequence)]
        self._kv.make_room(table.length)
        decode = DecodeRows(self._kv, table.length)
        ends = [self._tree.path(sequence.token_ids, sequence.root)[-1] for sequence in prefilled]
        missing: dict[Node, int] = {}  # with the adapter of each
        for sequence, end in zip(prefilled, ends, strict=True):
            path, adapter = [*end.ancestors, end], int(table.adapter[sequence.slot])
            missing |= {node: adapter for node in path if node.kv is None}
        prefill = PrefillRows(list(missing), len(decode.slots_N), self._kv.shape)
        logits_NV = self._forward(decode, prefill, ends, missing)
        table.length[decode.slots_N] += 1
        for node, stored in prefill.finish():
            self._tree.store(node, stored)
        for sequence in prefilled:
            parts = self._tree.read(sequence.token_ids, sequence.root)
            self._kv.add(sequence.slot, sequence.num_prefill_tokens, parts)
        self._tree.trim()
        new_slots = [sequence.slot for sequence in prefilled]
        slots_N = np.concatenate([decode.slots_N, np.array(new_slots, np.int64)])
        token_N, logprob_N, kept = sample(logits_NV, table.row_sampling(slots_N))
        return table.record(slots_N, token_N.numpy(), logprob_N.numpy(), self._text_of, kept)

    def choices(self, slot: int) -> Choices | None:
        return self.table.choices(slot, self._kv.read(slot).experts)

    def _join_decode(self, sequence: Sequence) -> bool:
        """Make a new request of which all but the last token is stored a row to decode."""
        ids = sequence.token_ids
        before = len(ids) - 1
        if not before or self._tree.known(ids[:-1], sequence.root) < before:
            return False
        self._kv.add(sequence.slot, before, self._tree.read(ids[:-1], sequence.root))
        self.table.length[sequence.slot] = before
        self.table.last_token[sequence.slot] = ids[-1]
        return True

    def synchronize(self) -> Finished:
        return []

    def release(self, slot: int) -> None:
        """Free the slot; the keys and values of the request go to the prefix tree."""
        sequence, length = self.table.sequences[slot], int(self.table.length[slot])
        assert sequence is not None
        if sequence.root is not None:
            row, ids = self._kv.read(slot), self.table.stored_ids(slot)
            for node in self._tree.end(sequence.request.session, sequence.root, ids, length):
                if node.kv is None:
                    self._tree.store(node, row[node.start : node.end])
            self._tree.trim()
        self._kv.remove(slot)
        self.table.vacate(slot)

    def load(self, weights: dict[str, torch.Tensor]) -> None:
        load_weights(self.model, weights)
        self._linears.refresh()
        self._tree.renew(keep_sessions=self._keeps_sessions)
        self.table.outdate(keep_sessions=self._keeps_sessions)

    def hold_adapter(self, name: str, weights: dict[str, torch.Tensor]) -> None:
        assert self.adapters is not None
        self.adapters.hold(name, weights)

    def sleep(self) -> None:
        self._tree.clear()
        self._kv.clear()

    def wake(self) -> None:
        """Do nothing: buckets grow again on demand."""

    def _forward(
        self, decode: DecodeRows, prefill: PrefillRows, ends: list[Node], adapters: dict[Node, int]
    ) -> torch.Tensor:
        """Logits of the decoded rows, then of the last token of each node in `ends`."""
        decoded = len(decode.slots_N)
        num_rows = prefill.spans[-1].end if prefill.spans else decoded
        if not num_rows:
            return torch.zeros(0, self.vocabulary)
        rows = round_up(num_rows, self._quantum)
        ids, positions = np.zeros((2, rows), np.int64)
        adapter_R = np.full(rows, NONE)
        adapter_R[:decoded] = self.table.adapter[decode.slots_N]
        ids[:decoded] = self.table.last_token[decode.slots_N]
        positions[:decoded] = self.table.length[decode.slots_N]
        last_row = {}
        for number, span in enumerate(prefill.spans):
            ids[span.start : span.end] = span.node.ids
            positions[span.start : span.end] = np.arange(span.node.start, span.node.end)
            adapter_R[span.start : span.end] = adapters[span.node]
            last_row[span.node] = decoded + number
        logit_rows = [*range(decoded), *(span.end - 1 for span in prefill.spans)]
        padded_rows = np.zeros(round_up(len(logit_rows), self._quantum), np.int64)
        padded_rows[: len(logit_rows)] = logit_rows
        rows_K = torch.from_numpy(padded_rows) if prefill.spans else None
        if self.adapters is not None:
            self.adapters.assign(adapter_R, padded_rows if prefill.spans else None)
        logits_KV = self._logits(
            RowsStep(decode, prefill), torch.from_numpy(ids), torch.from_numpy(positions), rows_K
        )
        wanted = [*range(decoded), *(last_row[node] for node in ends)]
        return logits_KV[:decoded] if len(wanted) == decoded else logits_KV[wanted]

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
        return own_logits(self.model, step, ids_R, position_R, kept_K)


def _tokens_in_memory(shape: KVShape, options: TransformersOptions) -> int:
    """The tokens that the engine's share of the memory holds, of what is free when it starts."""
    mib = available_mib() or _UNKNOWN_MIB
    share = options.kv_memory_share / options.load.engines
    return int(mib * 2**20 * share) // shape.bytes_per_token
