"""The requests inside an engine, the slots that the running ones occupy, and the runner that steps them.

`SlotTable` has one column per property of a running request, so that sampling parameters and finished
requests are found by array operations over all slots. `Runner` is what the engine's thread asks of a model
on a device (`cpu_runner.py`, `cuda_runner.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch

from penstock.engine.protocol import FinishReason, Generation, GenerationRequest, SamplingParams
from penstock.engine.transformers.adapters import RowAdapters
from penstock.engine.transformers.prefix_tree import Node, PrefixTree
from penstock.model.sampling import RowSampling, stream_key, uniforms
from penstock.types import Choices, VersionSegment, extend_segments

TextOf = Callable[[list[int]], str]  # decodes token ids
Finished = list[tuple[int, FinishReason]]  # (slot, reason)


@functools.lru_cache(64)  # hundreds of responses end together, most of one length
def _one_segment(version: int, num_new: int) -> tuple[VersionSegment, ...]:
    return (VersionSegment(version, num_new),)


@dataclass(slots=True, eq=False)
class Sequence:
    """One request inside an engine."""

    request: GenerationRequest
    deliver: Callable[[Generation], None]
    number: int = 0  # in the order in which requests came
    slot: int = -1  # -1: the request waits for a slot
    marks: list[tuple[int, int]] = field(default_factory=list)  # (new tokens so far, version)
    prompt_key: bytes = b""  # equal prompts have equal keys and share one prefill
    root: Node | None = (
        None  # of the prefix tree, while in a slot; None: earlier weights computed its tokens
    )
    # new tokens of its earlier turns in a slot, their log-probs, and what they were chosen from
    earlier_ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    earlier_logprobs: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    earlier_choices: Choices | None = None

    def __post_init__(self) -> None:
        if not len(self.request.response_ids):
            prompt = self.request.prompt_ids.astype(np.int32).tobytes()
            self.prompt_key = self.request.adapter.encode() + prompt

    @property
    def token_ids(self) -> np.ndarray:
        """The ids to prefill: prompt and partial response."""
        return np.concatenate([self.request.prompt_ids, self.request.response_ids])

    def known(self, tree: PrefixTree) -> int:
        """The leading tokens, all but the last at most, whose keys and values are stored."""
        ids = self.token_ids
        return tree.known(ids[:-1], self.root_in(tree))

    def root_in(self, tree: PrefixTree) -> Node:
        """Where it finds what is stored."""
        return tree.root_of(self.request.session, self.token_ids, self.request.adapter)

    @property
    def num_prefill_tokens(self) -> int:
        return len(self.request.prompt_ids) + len(self.request.response_ids)

    def send_back(self, ids: np.ndarray, logprobs: np.ndarray, choices: Choices | None) -> None:
        """Leave the slot: the request goes on after these tokens when it has one again."""
        self.earlier_choices = self._with_earlier(choices)
        self.earlier_ids = np.concatenate([self.earlier_ids, ids])
        self.earlier_logprobs = np.concatenate([self.earlier_logprobs, logprobs])
        response_ids = np.concatenate([self.request.response_ids, ids]).astype(np.int32)
        self.request = replace(self.request, response_ids=response_ids)
        self.slot, self.prompt_key = -1, b""

    def mark_version(self, num_new: int, version: int) -> None:
        """Note that tokens after the first `num_new` of this turn in a slot are sampled under `version`."""
        first = len(self.earlier_ids) + num_new
        if self.marks and self.marks[-1][0] == first:
            self.marks[-1] = (first, version)
        else:
            self.marks.append((first, version))

    def segments(self, num_new: int) -> tuple[VersionSegment, ...]:
        """The version segments of the first `num_new` new tokens."""
        segments: tuple[VersionSegment, ...] = ()
        if not num_new:
            return segments
        if len(self.marks) == 1 and not self.marks[0][0]:
            return _one_segment(self.marks[0][1], num_new)
        ends = [start for start, _ in self.marks[1:]] + [num_new]
        for (start, version), end in zip(self.marks, ends, strict=True):
            segments = extend_segments(segments, version, max(0, min(end, num_new) - start))
        return segments

    def _with_earlier(self, choices: Choices | None) -> Choices | None:
        parts = [(part, len(part)) for part in (self.earlier_choices, choices) if part is not None]
        return Choices.join(parts)

    def generation(
        self,
        ids: np.ndarray,
        logprobs: np.ndarray,
        reason: FinishReason,
        error: str = "",
        choices: Choices | None = None,
    ) -> Generation:
        """The answer: the tokens of its earlier turns in a slot, then these."""
        if len(self.earlier_ids):
            ids = np.concatenate([self.earlier_ids, ids])
            logprobs = np.concatenate([self.earlier_logprobs, logprobs])
        return Generation(
            request_id=self.request.request_id,
            token_ids=ids.astype(np.int32, copy=False),
            logprobs=logprobs.astype(np.float32, copy=False),
            segments=self.segments(len(ids)),
            finish_reason=reason,
            error=error,
            choices=self._with_earlier(choices),
        )

    def waiting(self, reason: FinishReason) -> Generation:
        """The answer of a request without a slot."""
        return self.generation(np.zeros(0, np.int32), np.zeros(0, np.float32), reason)

    def failed(self, error: str) -> Generation:
        """An answer without tokens: a fault may have corrupted them."""
        self.earlier_ids, self.earlier_logprobs = self.earlier_ids[:0], self.earlier_logprobs[:0]
        self.earlier_choices = None
        return self.generation(np.zeros(0, np.int32), np.zeros(0, np.float32), "error", error)


class SlotTable:
    """Columns indexed by slot. `num_new` counts a request's new tokens, `index` its whole response."""

    def __init__(
        self, num_slots: int, end_ids: tuple[int, ...], adapters: RowAdapters | None = None
    ) -> None:
        self.end_ids, self._adapters = end_ids, adapters
        self.sequences: list[Sequence | None] = [None] * num_slots
        self.free_slots = list(range(num_slots - 1, -1, -1))
        self.key = np.zeros(num_slots, np.uint64)
        self.temperature = np.ones(num_slots, np.float32)
        self.greedy = np.zeros(num_slots, np.bool_)
        self.top_k = np.zeros(num_slots, np.int64)
        self.top_p = np.ones(num_slots, np.float32)
        self.min_index = np.zeros(num_slots, np.int64)
        self.max_new = np.zeros(num_slots, np.int64)
        self.start_index = np.zeros(num_slots, np.int64)
        self.num_new = np.zeros(num_slots, np.int64)
        self.has_stop_strings = np.zeros(num_slots, np.bool_)
        self.last_token = np.zeros(num_slots, np.int64)
        self.adapter = np.zeros(num_slots, np.int64)  # its number in the engine
        self.length = np.zeros(num_slots, np.int64)  # tokens whose keys and values are stored
        self.stop_ids = np.full((num_slots, max(1, len(end_ids))), -1, np.int64)
        self.out_ids = np.zeros((num_slots, 256), np.int32)
        self.out_logprobs = np.zeros((num_slots, 256), np.float32)
        # of each new token, the ids that top_k and top_p left
        self.kept: list[list[np.ndarray]] = [[] for _ in range(num_slots)]

    def occupy(self, sequence: Sequence) -> int:
        """Give the sequence a free slot, fill its columns and return the slot."""
        request, sampling = sequence.request, sequence.request.sampling
        slot = self.free_slots.pop()
        sequence.slot = slot
        self.sequences[slot] = sequence
        stops = self._widen(sampling)
        self.key[slot] = stream_key(request.seed)
        self.greedy[slot] = sampling.temperature == 0
        self.temperature[slot] = sampling.temperature or 1.0
        self.top_k[slot], self.top_p[slot] = sampling.top_k, sampling.top_p
        self.min_index[slot] = sampling.min_tokens
        self.start_index[slot] = len(request.response_ids)
        self.max_new[slot] = sampling.max_tokens - len(request.response_ids)
        self.num_new[slot], self.kept[slot] = 0, []
        self.length[slot] = sequence.num_prefill_tokens
        self.has_stop_strings[slot] = bool(sampling.stop)
        self.stop_ids[slot] = -1
        self.stop_ids[slot, : len(stops)] = stops
        if self._adapters is not None:
            self.adapter[slot] = self._adapters.number(request.adapter)
        return slot

    def _widen(self, sampling: SamplingParams) -> list[int]:
        """Make the columns wide enough for this request; return its stop ids."""
        max_tokens, width = sampling.max_tokens, self.out_ids.shape[1]
        if max_tokens > width:
            more = ((0, 0), (0, max(max_tokens, 2 * width) - width))
            self.out_ids, self.out_logprobs = (
                np.pad(self.out_ids, more),
                np.pad(self.out_logprobs, more),
            )
        stops = sorted({*(self.end_ids if sampling.ends else ()), *sampling.stop_token_ids})
        if len(stops) > self.stop_ids.shape[1]:
            more = ((0, 0), (0, len(stops) - self.stop_ids.shape[1]))
            self.stop_ids = np.pad(self.stop_ids, more, constant_values=-1)
        return stops

    def stored_ids(self, slot: int) -> np.ndarray:
        """The ids of a request so far; of the first `length`, keys and values are stored."""
        sequence = self.sequences[slot]
        assert sequence is not None
        return np.concatenate([sequence.token_ids, self.output(slot)[0]])

    def outdate(self, *, keep_sessions: bool) -> None:
        """New weights: what running requests computed serves nobody, but sessions that go on."""
        for sequence in self.running:
            if not (keep_sessions and sequence.request.session):
                sequence.root = None

    def vacate(self, slot: int) -> None:
        self.sequences[slot] = None
        self.free_slots.append(slot)

    def row_sampling(
        self,
        slots_N: np.ndarray,
        device: torch.device | str = "cpu",
        num_new_N: np.ndarray | None = None,
    ) -> RowSampling:
        """These slots' parameters for their next token; `num_new_N` defaults to those recorded."""

        def column(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array[slots_N]).to(device)

        index_N = self.start_index[slots_N] + (
            self.num_new[slots_N] if num_new_N is None else num_new_N
        )
        banned = None
        early = np.flatnonzero(index_N < self.min_index[slots_N])
        if len(early):
            stops = self.stop_ids[slots_N[early]]
            row, place = np.nonzero(stops >= 0)
            banned = (
                torch.from_numpy(early[row]).to(device),
                torch.from_numpy(stops[row, place]).to(device),
            )
        return RowSampling(
            uniform_N=torch.from_numpy(uniforms(self.key[slots_N], index_N)).to(device),
            temperature_N=column(self.temperature),
            greedy_N=column(self.greedy) if self.greedy[slots_N].any() else None,
            top_k_N=column(self.top_k) if self.top_k[slots_N].any() else None,
            top_p_N=column(self.top_p) if (self.top_p[slots_N] < 1).any() else None,
            banned=banned,
        )

    def record(
        self,
        slots_N: np.ndarray,
        token_N: np.ndarray,
        logprob_N: np.ndarray,
        text_of: TextOf,
        kept: list[np.ndarray] | None = None,
    ) -> Finished:
        """Append one token to each slot; return (slot, reason) for each that it finishes.

        `kept` are the ids that each token was chosen from; None: no row has top_k or top_p.
        A row with log-prob NaN had no distribution to sample from: it finishes with an error.
        """
        num_new_N = self.num_new[slots_N]
        self.out_ids[slots_N, num_new_N] = token_N
        self.out_logprobs[slots_N, num_new_N] = logprob_N
        self.last_token[slots_N] = token_N
        invalid_N = np.isnan(logprob_N)
        self.num_new[slots_N] = num_new_N + ~invalid_N
        for slot, ids, invalid in zip(slots_N, kept or (), invalid_N, strict=False):
            if len(ids) and not invalid:
                self.kept[slot].append(ids)
        stopped_N = (self.stop_ids[slots_N] == token_N[:, None]).any(axis=1)
        for row in np.flatnonzero(self.has_stop_strings[slots_N] & ~stopped_N):
            stopped_N[row] = self._text_stops(int(slots_N[row]), text_of)
        full_N = num_new_N + 1 >= self.max_new[slots_N]
        return [
            (
                int(slots_N[row]),
                "error" if invalid_N[row] else "stop" if stopped_N[row] else "length",
            )
            for row in np.flatnonzero(stopped_N | full_N | invalid_N)
        ]

    def _text_stops(self, slot: int, text_of: TextOf) -> bool:
        """Whether the newest token completes a stop string; decodes only the end of the text."""
        sequence = self.sequences[slot]
        assert sequence is not None
        request, num_new = sequence.request, int(self.num_new[slot])
        if self.start_index[slot] + num_new < self.min_index[slot]:
            return False
        window = 4 * max(len(stop) for stop in request.sampling.stop) + 4
        new_ids = self.out_ids[slot, max(0, num_new - window) : num_new].tolist()
        missing = window - len(new_ids)
        old_ids = request.response_ids[-missing:].tolist() if missing > 0 else []
        text = text_of(old_ids + new_ids)
        stops = [stop for stop in request.sampling.stop if stop in text]
        if not stops:
            return False
        # an earlier match came before min_tokens; a cut character belongs to the newest token
        before = len(text_of((old_ids + new_ids)[:-1]).rstrip("\ufffd"))
        return any(stop in text[max(0, before - len(stop) + 1) :] for stop in stops)

    def output(self, slot: int) -> tuple[np.ndarray, np.ndarray]:
        """Copies of the new ids and log-probs so far."""
        num_new = int(self.num_new[slot])
        return self.out_ids[slot, :num_new].copy(), self.out_logprobs[slot, :num_new].copy()

    def choices(self, slot: int, experts_LPC: torch.Tensor) -> Choices | None:
        """What the new tokens so far were chosen from; the experts are those of all passes of the slot, see `StoredKV`."""
        sequence, num_new, kept = self.sequences[slot], int(self.num_new[slot]), self.kept[slot]
        assert sequence is not None
        if not num_new or not (kept or experts_LPC.shape[2]):
            return None
        prefill = sequence.num_prefill_tokens
        first = prefill - 1 if len(sequence.request.response_ids) else 0
        choices = Choices.unknown(prefill + num_new - 1 - first)
        choices.num_kept[len(choices) - len(kept) :] = [len(ids) for ids in kept]
        choices = replace(choices, kept_ids=np.concatenate([choices.kept_ids, *kept]))
        if not experts_LPC.shape[2]:
            return choices
        taken_LPC = experts_LPC[:, first : first + len(choices)]
        taken = taken_LPC.transpose(0, 1).flatten(1).cpu().numpy()
        kind = np.uint8 if taken.max(initial=0) < 256 else np.uint16
        return replace(choices, experts=taken.astype(kind))

    @property
    def running(self) -> list[Sequence]:
        """The sequences that have a slot."""
        return [sequence for sequence in self.sequences if sequence is not None]


class Runner(Protocol):
    """Runs a model over the requests in slots. Knows no threads, events or weight versions."""

    model: torch.nn.Module
    table: SlotTable
    vocabulary: int  # size of the vocabulary
    longest: int  # most tokens of one request, prompt and response
    kv_tokens: int  # most tokens of the running requests
    batch_invariant: bool

    @property
    def adapters(self) -> RowAdapters | None:
        """The adapters that requests may name; None: the engine holds none."""

    def known(self, sequence: Sequence) -> int:
        """The leading tokens of a waiting request whose keys and values are stored."""

    def admit(self, sequence: Sequence, expected: int) -> bool:
        """Reserve a slot, and memory for the tokens that are expected at the end; False: none is free now."""

    def make_room(self) -> bool:
        """Reserve memory for one token more of each running request; False: not all have it."""

    def step(self, new: list[Sequence], keep_prompts: set[bytes]) -> Finished:
        """Prefill `new` and decode one token for all others; return what has finished and why.

        Prompts in `keep_prompts` are those of requests that still wait.
        """

    def choices(self, slot: int) -> Choices | None:
        """What the new tokens of a slot were chosen from; None: nothing is recorded."""

    def synchronize(self) -> Finished:
        """Wait for device work, so that the table is exact; return what that work finished."""

    def release(self, slot: int) -> None:
        """Free a slot and its memory."""

    def load(self, weights: dict[str, torch.Tensor]) -> None:
        """Copy checked weights into the model, asleep or awake; drop stored keys and values.

        With `keep_sessions` of the options, sessions that go on keep theirs.
        """

    def hold_adapter(self, name: str, weights: dict[str, torch.Tensor]) -> None:
        """Keep an adapter that requests may name."""

    def sleep(self) -> None:
        """Release memory. No request may be in a slot."""

    def wake(self) -> None:
        """Undo `sleep`, with the newest weights."""
