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
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from penstock.engine.transformers.adapters import NONE
from penstock.engine.transformers.cuda.cuda_decoder import CudaDecoder
from penstock.engine.transformers.cuda.cuda_steps import (
    DecodeStep,
    PrefillStep,
    Prompt,
    joined_ranges,
)
from penstock.engine.transformers.cuda.regions import KVPool, Regions, Rows
from penstock.engine.transformers.kv_attention import own_logits, probe_shape
from penstock.engine.transformers.options import (
    TransformersOptions,
    check_router_replay,
    choose_sizes,
    describe,
    longest_request,
)
from penstock.engine.transformers.prefix_tree import Node, PrefixTree
from penstock.engine.transformers.sequences import Finished, Sequence, SlotTable, TextOf
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
        self.adapter = torch.full((slots + 1,), NONE, dtype=torch.int32, device=device)
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
        self.batch_invariant = False
        self._exact = options.arithmetic == "exact"
        self._decoder = self._make_decoder()
        self.adapters = None if self._decoder is None else self._decoder.adapters
        self._shape = (
            probe_shape(model, self._longest) if self._decoder is None else self._decoder.shape
        )
        self._slots, self._tokens = self._choose_sizes()
        self.kv_tokens = self._tokens - 1
        self.table = SlotTable(self._slots, end_ids(model), self.adapters)
        self._serial = np.zeros(self._slots, np.int64)
        self._launched = np.zeros(self._slots, np.int64)  # tokens, whether read yet or not
        self._start, self._size = np.zeros((2, self._slots), np.int64)  # regions
        self._known = np.zeros(self._slots, np.int64)  # tokens that a new request need not compute
        self._tree = PrefixTree(self._tokens)
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
        if self._options.router_replay:
            check_router_replay(self.model, family)
        decoder = None
        line = "the model's own code runs, which is slower than the decoder of a family"
        if self._exact and (family is None or self._options.adapters):
            raise UserError(
                f"model.arithmetic: got exact with {type(self.model).__name__} and its own code or adapters, "
                "allowed: deterministic or fast"
            )
        if family is not None:
            how = {"records": self._options.router_replay, "adapters": self._options.adapters}
            decoder = CudaDecoder(self.model, family, **how, exact=self._exact)
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
        with _no_collection():
            self._capture_all()

    def _can_capture(self) -> bool:
        """Whether a decode step needs nothing of the host, as a graph requires."""
        own_code_can = _fixed_rope(self.model) and not has_experts(self.model)
        return self._decoder is not None or own_code_can

    # ---- calls from the engine

    def known(self, sequence: Sequence) -> int:
        return sequence.known(self._tree)

    def admit(self, sequence: Sequence, expected: int) -> bool:
        if not self.table.free_slots:
            return False
        longest = sequence.request.num_tokens + 1  # the host reads one step late
        size = min(longest, max(expected + 1, self.kv_tokens // self._slots))
        start = self._reserve(size)
        if start is None:
            return False
        slot = self.table.occupy(sequence)
        self._start[slot], self._size[slot] = start, size
        self._serial[slot] += 1
        self._launched[slot] = 0
        self._take_known(sequence)
        return True

    def make_room(self) -> bool:
        active_N = np.array(self._active, np.int64)
        full_N = active_N[self.table.length[active_N] >= self._size[active_N]]
        return all(self._grow(int(slot)) for slot in full_N)

    def step(self, new: list[Sequence], keep_prompts: set[bytes]) -> Finished:
        if new:
            self._open_slots(new, keep_prompts)
        if self._active:
            self._decode()
        return self._read(_LAG)

    def choices(self, slot: int) -> Choices | None:
        return self.table.choices(slot, self._pool.experts[:, int(self._start[slot]) :])

    def synchronize(self) -> Finished:
        return self._read(0)

    def release(self, slot: int) -> None:
        """Free the slot; a session leaves its tokens to the prefix tree."""
        sequence, start, size = (
            self.table.sequences[slot],
            int(self._start[slot]),
            int(self._size[slot]),
        )
        assert sequence is not None
        path, session = list[Node](), sequence.request.session
        if session and sequence.root is not None:
            ids, length = self.table.stored_ids(slot), int(self.table.length[slot])
            path = self._tree.end(session, sequence.root, ids, length)
        self._give(path, start, size)
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
        keep = self._options.keep_sessions
        self._free(self._tree.renew(keep_sessions=keep))
        self.table.outdate(keep_sessions=keep)

    def hold_adapter(self, name: str, weights: dict[str, torch.Tensor]) -> None:
        assert self.adapters is not None
        if self.adapters.widen(weights) and self._graphs:  # which read the old stacks
            torch.cuda.synchronize(self._device)
            self._graphs = {}
            self._state.rows.fill_(len(self._state.rows))  # capturing runs steps, of padding
            self._rows_changed = True
            with _no_collection():
                self._capture_all()
        self.adapters.hold(name, weights)

    def sleep(self) -> None:
        """Release the KV cache and the graphs; move the weights to the host."""
        self._tree.clear()
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

    # ---- memory

    def _reserve(self, size: int) -> int | None:
        """Reserve a region; what the prefix tree keeps makes room for it."""
        while (start := self._regions.reserve(size)) is None and self._tree.tokens:
            self._free([self._tree.forget_one()])
        return start

    def _free(self, forgotten: list[Rows]) -> None:
        for rows in forgotten:
            self._regions.free(rows.start, rows.count)

    def _give(self, path: list[Node], start: int, size: int) -> None:
        """Give the tree the tokens of a region that begins with those of a path; free the rest.

        What the path had elsewhere is freed too: a session stays in one piece, or holes would be small.
        """
        used = path[-1].end if path else 0
        self._regions.free(start + used, size - used)
        self._free([node.kv for node in path if node.kv is not None])
        for node in path:
            self._tree.store(node, Rows(start + node.start, len(node.ids)))
        self._free(self._tree.trim())

    def _take_known(self, sequence: Sequence) -> None:
        """Copy what is stored for a request into its region."""
        ids, slot = sequence.token_ids, sequence.slot
        sequence.root = sequence.root_in(self._tree)
        known = 0
        for rows, count in self._tree.read(ids[:-1], sequence.root):
            self._pool.copy(rows.start, int(self._start[slot]) + known, count)
            known += count
        self._known[slot] = known

    def _grow(self, slot: int) -> bool:
        """Make a request's region twice as large, in its place or in another; False: there is none."""
        sequence, start, size = (
            self.table.sequences[slot],
            int(self._start[slot]),
            int(self._size[slot]),
        )
        assert sequence is not None
        larger = min(2 * size, sequence.request.num_tokens + 1)
        if self._regions.extend(start, size, larger - size):
            self._size[slot] = larger
            return True
        target = self._reserve(larger)
        if target is None:
            return False
        self._pool.copy(start, target, size)
        self._regions.free(start, size)
        self._start[slot], self._size[slot] = target, larger
        self._state.start[slot] = target
        return True

    # ---- prefill and decode

    def _open_slots(self, new: list[Sequence], keep_prompts: set[bytes]) -> None:
        """Compute the first token of new requests; those that lack only one prompt token decode with the others."""
        groups: dict[tuple[bytes | int, int], list[Sequence]] = {}
        decoding = []
        for sequence in new:
            known = int(self._known[sequence.slot])
            if known and known == sequence.num_prefill_tokens - 1:
                decoding.append(sequence)
            else:
                key = sequence.prompt_key or id(sequence), known
                groups.setdefault(key, []).append(sequence)
        if groups:
            self._prefill(list(groups.values()), keep_prompts)
        if decoding:
            slots = [sequence.slot for sequence in decoding]
            self.table.length[slots] -= 1
            self._set_state(slots, first=-1)
            last = np.array([sequence.token_ids[-1] for sequence in decoding], np.int64)
            self._state.token[self._on_device(np.array(slots))] = self._on_device(last)
            self._active += slots
        self._rows_changed = True

    def _prefill(self, groups: list[list[Sequence]], keep_prompts: set[bytes]) -> None:
        """Compute each group's prompt once, store it in the region of each member, and sample."""
        prompts, kept = [], []
        for group in groups:
            sequence, known = group[0], int(self._known[group[0].slot])
            regions = [int(self._start[member.slot]) for member in group]
            size = sequence.num_prefill_tokens
            if not known and sequence.prompt_key in keep_prompts:
                start = self._reserve(size)
                if start is not None:
                    regions.append(start)
                    kept.append((sequence, start, size))
            adapter = int(self.table.adapter[sequence.slot])
            prompts.append(Prompt(sequence.token_ids, known, regions, adapter))
        logits_UV = self._prompt_logits(prompts)
        for sequence, start, size in kept:
            self._give(self._tree.path(sequence.token_ids, sequence.root), start, size)
        order = [member.slot for group in groups for member in group]
        source = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
        self._set_state(order, first=0)
        slots_N = np.array(order, np.int64)
        logits_NV = logits_UV[self._on_device(source)]
        self._launch(self._sample(logits_NV, self._on_device(slots_N), 0), slots_N)
        self._active += order

    def _prompt_logits(self, prompts: list[Prompt]) -> torch.Tensor:
        """Compute the prompts in passes of so many rows as one may have; return their last logits."""
        logits: list[torch.Tensor] = []
        together: list[Prompt] = []
        room = limit = self._options.prefill_limit
        for prompt in prompts:
            while prompt.rows > limit:
                part = replace(prompt, ids=prompt.ids[: prompt.before + limit])
                self._pass([part])
                prompt = replace(prompt, before=len(part.ids))
            if prompt.rows > room:
                logits.append(self._pass(together))
                together, room = [], limit
            together.append(prompt)
            room -= prompt.rows
        return torch.cat([*logits, self._pass(together)])

    def _pass(self, prompts: list[Prompt]) -> torch.Tensor:
        """Compute and store prompts; return their last logits."""
        rows, before = (np.array([[p.rows, p.before] for p in prompts])).T
        ids = np.concatenate([p.ids[p.before :] for p in prompts]).astype(np.int64)
        arrays = (ids, joined_ranges(before, rows), np.cumsum(rows) - 1)
        step = PrefillStep(self._pool, prompts, exact=self._exact)
        return self._logits(step, *map(self._on_device, arrays))

    def _set_state(self, slots: list[int], *, first: int) -> None:
        """Write the new requests in `slots` to the device state; `first` is -1 if their next pass is a decode step."""
        table, state = self.table, self._state
        at = self._on_device(np.array(slots))

        def put(column: torch.Tensor, values: np.ndarray) -> None:
            column[at] = self._on_device(values)

        put(state.start, self._start[slots])
        put(state.position, table.length[slots])
        put(state.index, table.start_index[slots] + first)
        put(state.key, table.key[slots].view(np.int64))
        temperature = np.where(table.greedy[slots], np.float32(0), table.temperature[slots])
        put(state.temperature, temperature.astype(np.float32))
        put(state.min_index, table.min_index[slots])
        put(state.adapter, table.adapter[slots].astype(np.int32))
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
        self.table.length[self._active_N] += 1

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
        if not self._options.cuda_graphs or not self._can_capture():
            return
        tell_stage("capturing CUDA graphs")
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
