"""Runs a transformers model on a GPU for the requests in slots.

Decode steps, sampling included, are CUDA graphs, one per batch size (and one for long contexts). Their inputs (last token, position,
region) live on the device, so the next step starts before the host has read the last one. The host therefore learns one step
late that a request has finished, and drops the token sampled in between.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from penstock.engine.transformers.cuda.cuda_decoder import CudaDecoder
from penstock.engine.transformers.cuda.cuda_steps import (
    ChunkStep,
    DecodeStep,
    PrefillStep,
    joined_ranges,
)
from penstock.engine.transformers.cuda.regions import KVPool, Regions
from penstock.engine.transformers.kv_attention import own_logits, probe_shape
from penstock.engine.transformers.options import (
    TransformersOptions,
    choose_sizes,
    describe,
    longest_request,
)
from penstock.engine.transformers.sequences import (
    CachedPrompt,
    Finished,
    Sequence,
    SlotTable,
    TextOf,
)
from penstock.errors import UserError
from penstock.model.arithmetic import any_order, has_experts
from penstock.model.attention import Step
from penstock.model.families import family_of
from penstock.model.kernels.decode_kernels import next_rows, sample_rows
from penstock.model.loading import end_ids
from penstock.model.sampling import sample
from penstock.model.transfer import to_device
from penstock.types import Choices
from penstock.waits import tell_stage
from penstock.weights.model_weights import load_weights, named_weights
from penstock.weights.offload import HostOffload, explain_out_of_memory

_LAG = 1  # launches that the host may not have read yet
_STOPS = 8  # stop tokens of a request that the device bans until min_tokens; the host bans more


@dataclass(slots=True, frozen=True)
class SampledTokens:
    """What a decode step returns, on the device."""

    token_B: torch.Tensor
    logprob_B: torch.Tensor
    logits_BV: torch.Tensor


@dataclass(slots=True)
class Launch:
    """Tokens that are being copied to the host."""

    slots_N: np.ndarray
    serial_N: np.ndarray  # number of the request in each slot at the launch
    token_N: torch.Tensor  # pinned
    logprob_N: torch.Tensor
    done: torch.cuda.Event
    kept: list[np.ndarray] | None  # of each row, the ids that top_k and top_p left


class DeviceState:
    """The tensors that graphs read and write: one entry per slot, and one for padding rows."""

    def __init__(self, slots: int, num_stops: int, device: torch.device) -> None:
        def column(dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(slots + 1, dtype=dtype, device=device)

        self.token, self.position = column(torch.int64), column(torch.int64)
        self.start, self.index = column(torch.int64), column(torch.int64)
        self.key, self.temperature = column(torch.int64), column(torch.float32)
        self.min_index = column(torch.int64)
        self.stops = torch.full((slots + 1, num_stops), -1, dtype=torch.int64, device=device)
        self.rows = torch.full((slots,), slots, dtype=torch.int64, device=device)


def batch_sizes(slots: int) -> list[int]:
    """The batch sizes to capture: dense for small batches, in steps of 32 and 64 for large ones."""
    sizes = {1, 2, 4, 8, 16, 24, *range(32, 257, 32), *range(320, slots, 64), slots}
    return sorted(size for size in sizes if size <= slots)


class CudaRunner:
    """The model, its KV cache, its slots and its graphs; see `Runner`."""

    def __init__(
        self, model: torch.nn.Module, options: TransformersOptions, text_of: TextOf
    ) -> None:
        self.model: Any = model
        self._options, self._text_of = options, text_of
        self._device = next(model.parameters()).device
        torch.cuda.set_device(self._device)
        self.vocabulary = model.get_input_embeddings().weight.shape[0]
        self.batch_invariant, self.kv_tokens = False, 0
        self._decoder = self._make_decoder()
        self._shape = (
            probe_shape(model, self._longest) if self._decoder is None else self._decoder.shape
        )
        self._slots, self._tokens = self._choose_sizes()
        self.table = SlotTable(self._slots, end_ids(model))
        self._serial = np.zeros(self._slots, np.int64)
        self._launched = np.zeros(self._slots, np.int64)  # tokens, whether read yet or not
        self._region: dict[int, tuple[int, int]] = {}
        self.prompts: dict[bytes, CachedPrompt] = {}
        if options.router_replay:
            raise UserError(
                "engine.options.router_replay: got true with an engine on a GPU, whose kernels record no experts "
                "yet, allowed: false, or model.device=cpu"
            )
        self._pending: deque[Launch] = deque()
        self._active: list[int] = []
        self._rows_changed = True
        self._host_offload = HostOffload(self._tensors)
        self.longest = min(longest_request(model, options), self._tokens - 2)
        with explain_out_of_memory("engine", self._advice):
            self._open()

    def _make_decoder(self) -> CudaDecoder | None:
        """The family's decoder, checked against the model; None: the model's own code runs."""
        longest = self._longest
        family = family_of(self.model.config, longest) if self._options.fuse else None
        decoder, line = (
            None,
            "the model's own code runs, which is slower than the decoder of a family",
        )
        if family is not None:
            decoder = CudaDecoder(self.model, family)
            decoder.check(longest)
            line = f"{decoder.shape.layers} layers decode by kernels"
        print(f"engine on {self._device}: {line}", file=sys.stderr, flush=True)
        return decoder

    @property
    def _longest(self) -> int:
        """The longest sequence of the run."""
        positions = longest_request(self.model, self._options)
        return min(positions, self._options.load.longest or positions)

    def _choose_sizes(self) -> tuple[int, int]:
        """The number of slots and the tokens of the KV cache; write them to the log."""
        options = self._options
        torch.cuda.empty_cache()  # free what joining the weights and the check left
        free, total = torch.cuda.mem_get_info(self._device)
        size = self._shape.bytes_per_token
        sizes = choose_sizes(
            options.load,
            free=free,
            total=total,
            bytes_per_token=size,
            positions=longest_request(self.model, options),
            max_slots=options.max_slots,
            max_tokens_in_flight=options.max_tokens_in_flight,
            kv_memory_share=options.kv_memory_share,
        )
        line = describe(sizes, options.load, free=free, bytes_per_token=size)
        print(f"engine on {self._device}: {line}", file=sys.stderr, flush=True)
        return sizes.slots, sizes.tokens

    def _open(self) -> None:
        """Allocate what `sleep` releases, and capture the graphs."""
        self._regions = Regions(self._tokens - 1)
        stops = max(_STOPS, len(self.table.end_ids))
        self._state = DeviceState(self._slots, stops, self._device)
        self._state.start[-1] = self._tokens - 1  # padding rows write to the pool's last token
        self._pool = KVPool.allocate(self._shape, self._tokens, self._device)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, SampledTokens]] = {}
        if self._decoder is not None:
            self._decoder.open(self.longest + 2)  # the host reads one step late
        if self._options.cuda_graphs and self._can_capture():
            tell_stage("capturing CUDA graphs")
            with _no_collection():
                self._capture_all()

    def _can_capture(self) -> bool:
        """Whether a decode step needs nothing of the host, as a graph requires."""
        own_code_can = _fixed_rope(self.model) and not has_experts(self.model)
        return self._decoder is not None or own_code_can

    # ---- calls from the engine

    def admit(self, sequence: Sequence) -> bool:
        if not self.table.free_slots:
            return False
        size = sequence.request.num_tokens + 1  # the host reads one step late
        start = self._regions.reserve(size)
        if start is None:
            return False
        slot = self.table.occupy(sequence)
        self._region[slot] = (start, size)
        self._serial[slot] += 1
        self._launched[slot] = 0
        return True

    def known(self, sequence: Sequence) -> int:
        return sequence.num_prefill_tokens if sequence.prompt_key in self.prompts else 0

    def step(self, new: list[Sequence], keep_prompts: set[bytes]) -> Finished:
        if new:
            self._prefill(new, keep_prompts)
        if self._active:
            self._decode()
        return self._read(_LAG)

    def choices(self, slot: int) -> Choices | None:
        return self.table.choices(slot)

    def synchronize(self) -> Finished:
        return self._read(0)

    def release(self, slot: int) -> None:
        self._regions.free(*self._region.pop(slot))
        self._serial[slot] += 1
        self.table.vacate(slot)
        self._active.remove(slot)
        self._rows_changed = True

    def load(self, weights: dict[str, torch.Tensor]) -> None:
        if self._host_offload.is_offloaded:
            for name, tensor in named_weights(self.model):
                self._host_offload.current(tensor).copy_(weights[name])
        else:
            load_weights(self.model, weights)
        self.prompts.clear()

    def sleep(self) -> None:
        """Release the KV cache and the graphs; move the weights to the host."""
        self.prompts.clear()
        for released in ("_pool", "_graphs", "_state"):
            self.__dict__.pop(released, None)
        if self._decoder is not None:
            self._decoder.close()
        self._host_offload.offload()

    def wake(self) -> None:
        """Undo `sleep`, with its weights or those loaded since; sleep again if memory is short."""
        with explain_out_of_memory("engine", self._advice):
            self._host_offload.reload()
            try:
                self._open()
            except torch.OutOfMemoryError:
                self.sleep()
                raise

    @property
    def _advice(self) -> str:
        share = self._options.kv_memory_share
        return (
            f"lower engine.options.kv_memory_share (now {share:g}) or engine.max_slots; a trainer on "
            "this device gives its memory back only with launch.colocate=true"
        )

    def _tensors(self) -> list[torch.Tensor]:
        return [*self.model.parameters(), *self.model.buffers()]

    # ---- prefill and decode

    def _prefill(self, new: list[Sequence], keep_prompts: set[bytes]) -> None:
        unique: dict[bytes | int, list[Sequence]] = {}
        cached_logits: dict[int, torch.Tensor] = {}
        for sequence in new:
            cached = self.prompts.get(sequence.prompt_key)
            if cached is None:
                unique.setdefault(sequence.prompt_key or id(sequence), []).append(sequence)
            else:
                start, length = self._region[sequence.slot][0], cached.keys.shape[1]
                self._pool.keys[:, start : start + length] = cached.keys
                self._pool.values[:, start : start + length] = cached.values
                cached_logits[sequence.slot] = cached.logits_V
        groups = list(unique.values())
        logits_UV = self._prefill_rows(groups) if groups else None
        order, source, logits = [], [], []
        for i, group in enumerate(groups):
            order += [sequence.slot for sequence in group]
            source += [i] * len(group)
        if logits_UV is not None:
            logits.append(logits_UV[self._on_device(np.array(source))])
        if cached_logits:
            order += list(cached_logits)
            logits.append(torch.stack(list(cached_logits.values())))
        self._keep(groups, logits_UV, keep_prompts)
        self._set_state(order)
        slots_N = np.array(order, np.int64)
        self._launch(self._sample(torch.cat(logits), self._on_device(slots_N), 0), slots_N)
        self._active += order
        self._rows_changed = True

    def _prefill_rows(self, groups: list[list[Sequence]]) -> torch.Tensor:
        """Compute each group's prompt once, store it in the region of each member; return its last logits."""
        limit = self._options.prefill_limit
        if len(groups) == 1 and groups[0][0].num_prefill_tokens > limit:
            return self._prefill_in_chunks(groups[0], limit)
        lengths = np.array([group[0].num_prefill_tokens for group in groups])
        starts = np.cumsum(lengths) - lengths
        members = [len(group) for group in groups]
        regions = np.array([self._region[member.slot][0] for group in groups for member in group])
        stored = np.repeat(lengths, members)
        source = joined_ranges(np.repeat(starts, members), stored)
        step = PrefillStep(self._pool, lengths, source, joined_ranges(regions, stored))
        ids = np.concatenate([group[0].token_ids for group in groups]).astype(np.int64)
        positions = joined_ranges(np.zeros_like(starts), lengths)
        rows = [self._on_device(array) for array in (ids, positions, starts + lengths - 1)]
        return self._logits(step, *rows)

    def _prefill_in_chunks(self, group: list[Sequence], limit: int) -> torch.Tensor:
        """The same for one long prompt, whose rows do not all fit in one pass."""
        ids, pool = group[0].token_ids.astype(np.int64), self._pool
        start, *others = (self._region[member.slot][0] for member in group)
        for first in range(0, len(ids), limit):
            part = ids[first : first + limit]
            positions = np.arange(first, first + len(part))
            rows = [
                self._on_device(array) for array in (part, positions, np.array([len(part) - 1]))
            ]
            logits = self._logits(ChunkStep(pool, start, first, len(part)), *rows)
        for other in others:
            for stored in (pool.keys, pool.values):
                stored[:, other : other + len(ids)] = stored[:, start : start + len(ids)]
        return logits

    def _keep(
        self,
        groups: list[list[Sequence]],
        logits_UV: torch.Tensor | None,
        keep_prompts: set[bytes],
    ) -> None:
        self.prompts = {k: v for k, v in self.prompts.items() if k in keep_prompts}
        for i, group in enumerate(groups):
            if group[0].prompt_key and group[0].prompt_key in keep_prompts:
                assert logits_UV is not None
                start, length = self._region[group[0].slot][0], len(group[0].request.prompt_ids)
                region = slice(start, start + length)
                self.prompts[group[0].prompt_key] = CachedPrompt(
                    self._pool.keys[:, region].clone(),
                    self._pool.values[:, region].clone(),
                    logits_UV[i].clone(),
                )

    def _set_state(self, slots: list[int]) -> None:
        """Write the new requests in `slots` to the device state."""
        table, state = self.table, self._state
        at = self._on_device(np.array(slots))

        def put(column: torch.Tensor, values: np.ndarray) -> None:
            column[at] = self._on_device(values)

        put(state.start, np.array([self._region[slot][0] for slot in slots]))
        put(state.position, table.length[slots])
        put(state.index, table.start_index[slots])
        put(state.key, table.key[slots].view(np.int64))
        temperature = np.where(table.greedy[slots], np.float32(0), table.temperature[slots])
        put(state.temperature, temperature.astype(np.float32))
        put(state.min_index, table.min_index[slots])
        stops = np.full((len(slots), state.stops.shape[1]), -1, np.int64)
        width = min(state.stops.shape[1], table.stop_ids.shape[1])
        stops[:, :width] = table.stop_ids[slots, :width]
        put(state.stops, stops)

    def _decode(self) -> None:
        count = len(self._active)
        if self._rows_changed:
            rows = np.full(len(self._state.rows), len(self._state.rows), np.int64)
            rows[:count] = self._active
            self._state.rows.copy_(self._on_device(rows))
            self._active_N = np.array(self._active, np.int64)
            self._rows_changed = False
        size = next((size for size in self._graphs if size >= count), None)
        if size is None:
            sampled = self._decode_step(count)
        else:
            graph, sampled = self._graphs[size]
            graph.replay()
        self._launch(sampled, self._active_N)

    def _on_device(self, array: np.ndarray) -> torch.Tensor:
        return to_device(array, self._device)

    def _decode_step(self, size: int) -> SampledTokens:
        """Decode one token for the first `size` rows; a graph captures this."""
        state = self._state
        slot_B = state.rows[:size]
        if self._decoder is not None:
            logits_BV = self._decoder.decode(state, self._pool, slot_B)
        else:
            start_B, position_B = state.start[slot_B], state.position[slot_B]
            step = DecodeStep(self._pool, start_B, start_B + position_B, position_B + 1)
            logits_BV = self._logits(step, state.token[slot_B], position_B, None)
        return self._sample(logits_BV, slot_B, 1)

    def _sample(self, logits_BV: torch.Tensor, slot_B: torch.Tensor, by: int) -> SampledTokens:
        """Sample a token for each row; `by` is 0 for a request's first one."""
        key_B, index_B, temperature_B = next_rows(logits_BV, slot_B, self._state, by)
        token_B, logprob_B = sample_rows(logits_BV, key_B, index_B, temperature_B)
        with any_order():  # no slot comes twice, but that of padding
            self._state.token.index_copy_(0, slot_B, token_B)
        return SampledTokens(token_B, logprob_B, logits_BV)

    def _logits(
        self, step: Step, ids_R: torch.Tensor, position_R: torch.Tensor, kept_K: torch.Tensor | None
    ) -> torch.Tensor:
        """The logits of the kept rows; None: of all."""
        if self._decoder is not None:
            return self._decoder.logits(step, ids_R, position_R, kept_K)
        return own_logits(self.model, step, ids_R, position_R, kept_K)

    def _capture_all(self) -> None:
        """Capture graphs for every batch size, largest first, so that smaller ones reuse its memory."""
        memory = None
        for size in reversed(batch_sizes(self._slots)):
            stream = torch.cuda.Stream(self._device)
            with torch.cuda.stream(stream):
                self._decode_step(size)
            torch.cuda.current_stream(self._device).wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=memory, capture_error_mode="thread_local"):
                sampled = self._decode_step(size)
            memory = memory or graph.pool()
            self._graphs[size] = (graph, sampled)
        self._graphs = dict(sorted(self._graphs.items()))

    def _launch(self, sampled: SampledTokens, slots_N: np.ndarray) -> None:
        """Sample the rows that the kernel cannot sample, then send all tokens to the host."""
        token_N, logprob_N = sampled.token_B[: len(slots_N)], sampled.logprob_B[: len(slots_N)]
        special, kept = self._special_rows(slots_N), None
        if len(special):
            at = torch.from_numpy(special).to(self._device)
            slots = slots_N[special]
            how = self.table.row_sampling(slots, self._device, self._launched[slots])
            token_N[at], logprob_N[at], left = sample(sampled.logits_BV[at], how)
            if left is not None:
                rows = dict(zip(special.tolist(), left, strict=True))
                kept = [rows.get(row, left[0][:0]) for row in range(len(slots_N))]
            self._state.token[torch.from_numpy(slots).to(self._device)] = token_N[at]
        self._launched[slots_N] += 1
        self._send(token_N, logprob_N, slots_N, kept)

    def _special_rows(self, slots_N: np.ndarray) -> np.ndarray:
        """The rows that the kernel cannot sample: top_k, top_p, or too many tokens to ban."""
        table = self.table
        special_N = (table.top_k[slots_N] > 0) | (table.top_p[slots_N] < 1)
        width = self._state.stops.shape[1]
        if table.stop_ids.shape[1] > width:
            index_N = table.start_index[slots_N] + self._launched[slots_N]
            more_N = (table.stop_ids[slots_N, width:] >= 0).any(axis=1)
            special_N |= more_N & (index_N < table.min_index[slots_N])
        return np.flatnonzero(special_N)

    def _send(
        self,
        token_N: torch.Tensor,
        logprob_N: torch.Tensor,
        slots_N: np.ndarray,
        kept: list[np.ndarray] | None,
    ) -> None:
        tokens = torch.empty(len(token_N), dtype=torch.int64, pin_memory=True)
        logprobs = torch.empty(len(token_N), dtype=torch.float32, pin_memory=True)
        tokens.copy_(token_N, non_blocking=True)
        logprobs.copy_(logprob_N, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        serial_N = self._serial[slots_N].copy()
        self._pending.append(Launch(slots_N, serial_N, tokens, logprobs, done, kept))

    def _read(self, lag: int) -> Finished:
        """Record all launches but the last `lag`; return what they finished."""
        finished: Finished = []
        while len(self._pending) > lag:
            launch = self._pending.popleft()
            launch.done.synchronize()
            live = self._serial[launch.slots_N] == launch.serial_N
            if finished:
                live &= ~np.isin(launch.slots_N, [slot for slot, _ in finished])
            slots_N = launch.slots_N[live]
            if len(slots_N):
                finished += self.table.record(
                    slots_N, launch.token_N.numpy()[live], launch.logprob_N.numpy()[live],
                    self._text_of,
                    launch.kept and [launch.kept[row] for row in np.flatnonzero(live)],
                )  # fmt: skip
        return finished


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Free an earlier engine's graphs now: a collection that frees one during a capture ends the capture."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _fixed_rope(model: Any) -> bool:
    """Whether rotary positions are independent of the data."""
    parameters = getattr(model.config, "rope_parameters", None) or {}
    return parameters.get("rope_type", "default") not in ("dynamic", "longrope")
