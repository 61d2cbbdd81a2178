"""Requests on their way through an engine, and the table of slots they sit in.

The table holds one column per property of a running request, so that sampling and the search for
finished requests are array operations over all rows. It knows neither models nor devices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from penstock.engine.protocol import FinishReason, Generation, GenerationRequest
from penstock.engine.transformers.randomness import stream_key, uniforms
from penstock.engine.transformers.sampling import RowSampling
from penstock.errors import UserError
from penstock.types import VersionSegment, extend_segments

TextOf = Callable[[list[int]], str]


@dataclass(slots=True, eq=False)
class Sequence:
    """One request inside an engine."""

    request: GenerationRequest
    deliver: Callable[[Generation], None]
    slot: int = -1  # -1: waiting
    marks: list[tuple[int, int]] = field(default_factory=list)  # (new tokens so far, version)
    prompt_key: bytes = b""  # equal prompts have equal keys and share one prefill

    def __post_init__(self) -> None:
        if not len(self.request.response_ids):
            self.prompt_key = self.request.prompt_ids.astype(np.int32).tobytes()

    @property
    def token_ids(self) -> np.ndarray:
        """Prompt and partial response: what is prefilled."""
        return np.concatenate([self.request.prompt_ids, self.request.response_ids])

    def mark_version(self, made: int, version: int) -> None:
        """Tokens from `made` on are sampled under `version`."""
        if self.marks and self.marks[-1][0] == made:
            self.marks[-1] = (made, version)
        else:
            self.marks.append((made, version))

    def segments(self, made: int) -> tuple[VersionSegment, ...]:
        """The versions of the first `made` new tokens."""
        found: tuple[VersionSegment, ...] = ()
        if not made:
            return found
        ends = [start for start, _ in self.marks[1:]] + [made]
        for (start, version), end in zip(self.marks, ends, strict=True):
            found = extend_segments(found, version, max(0, min(end, made) - start))
        return found

    def generation(
        self, ids: np.ndarray, logprobs: np.ndarray, reason: FinishReason, error: str = ""
    ) -> Generation:
        return Generation(
            request_id=self.request.request_id,
            token_ids=ids.astype(np.int32),
            logprobs=logprobs.astype(np.float32),
            segments=self.segments(len(ids)),
            finish_reason=reason,
            error=error,
        )

    def empty(self, reason: FinishReason, error: str = "") -> Generation:
        return self.generation(np.zeros(0, np.int32), np.zeros(0, np.float32), reason, error)


def check_request(request: GenerationRequest, *, vocabulary: int, longest: int) -> None:
    """Raise a UserError for a request that no engine of this size could ever serve."""
    name, sampling = f"request {request.request_id}", request.sampling
    if not len(request.prompt_ids):
        raise UserError(f"{name}: got an empty prompt, allowed: at least 1 token")
    if request.num_tokens > longest:
        raise UserError(
            f"{name}: got {len(request.prompt_ids)} prompt + {sampling.max_tokens} new tokens, "
            f"allowed: {longest} together"
        )
    for ids in (request.prompt_ids, request.response_ids):
        if len(ids) and not (ids.min() >= 0 and ids.max() < vocabulary):
            raise UserError(
                f"{name}: got token ids from {ids.min()} to {ids.max()}, "
                f"allowed: 0 to {vocabulary - 1}"
            )
    if sampling.max_tokens < 1 or sampling.min_tokens > sampling.max_tokens:
        raise UserError(
            f"{name}: got min_tokens {sampling.min_tokens} and max_tokens {sampling.max_tokens}, "
            "allowed: max_tokens >= 1 and not below min_tokens"
        )
    if sampling.temperature < 0 or not 0 < sampling.top_p <= 1 or sampling.top_k < 0:
        raise UserError(
            f"{name}: got temperature {sampling.temperature}, top_p {sampling.top_p}, top_k "
            f"{sampling.top_k}, allowed: temperature >= 0, 0 < top_p <= 1, top_k >= 0"
        )


class SlotTable:
    """Columns over slots; `made` counts the new tokens of a request, `index` all of its response."""

    def __init__(self, num_slots: int, end_ids: tuple[int, ...]) -> None:
        self.end_ids = end_ids
        self.sequences: list[Sequence | None] = [None] * num_slots
        self.free = list(range(num_slots - 1, -1, -1))
        self.key = np.zeros(num_slots, np.uint64)
        self.temperature = np.ones(num_slots, np.float32)
        self.greedy = np.zeros(num_slots, np.bool_)
        self.top_k = np.zeros(num_slots, np.int64)
        self.top_p = np.ones(num_slots, np.float32)
        self.min_index = np.zeros(num_slots, np.int64)
        self.max_made = np.zeros(num_slots, np.int64)
        self.start_index = np.zeros(num_slots, np.int64)
        self.made = np.zeros(num_slots, np.int64)
        self.watches_text = np.zeros(num_slots, np.bool_)
        self.last_token = np.zeros(num_slots, np.int64)
        self.length = np.zeros(num_slots, np.int64)  # tokens whose keys and values are stored
        self.stop_ids = np.full((num_slots, max(1, len(end_ids))), -1, np.int64)
        self.out_ids = np.zeros((num_slots, 256), np.int32)
        self.out_logprobs = np.zeros((num_slots, 256), np.float32)

    def seat(self, sequence: Sequence) -> int:
        """Give a sequence a free slot and fill its columns."""
        request, sampling = sequence.request, sequence.request.sampling
        slot = self.free.pop()
        sequence.slot = slot
        self.sequences[slot] = sequence
        stops = self._make_room(sampling.max_tokens, sampling.stop_token_ids)
        self.key[slot] = stream_key(request.seed)
        self.greedy[slot] = sampling.temperature == 0
        self.temperature[slot] = sampling.temperature or 1.0
        self.top_k[slot], self.top_p[slot] = sampling.top_k, sampling.top_p
        self.min_index[slot] = sampling.min_tokens
        self.start_index[slot] = len(request.response_ids)
        self.max_made[slot] = sampling.max_tokens - len(request.response_ids)
        self.made[slot] = 0
        self.length[slot] = len(request.prompt_ids) + len(request.response_ids)
        self.watches_text[slot] = bool(sampling.stop)
        self.stop_ids[slot] = -1
        self.stop_ids[slot, : len(stops)] = stops
        return slot

    def _make_room(self, max_tokens: int, stop_token_ids: tuple[int, ...]) -> list[int]:
        width = self.out_ids.shape[1]
        if max_tokens > width:
            more = ((0, 0), (0, max(max_tokens, 2 * width) - width))
            self.out_ids, self.out_logprobs = (
                np.pad(self.out_ids, more),
                np.pad(self.out_logprobs, more),
            )
        stops = sorted({*self.end_ids, *stop_token_ids})
        if len(stops) > self.stop_ids.shape[1]:
            more = ((0, 0), (0, len(stops) - self.stop_ids.shape[1]))
            self.stop_ids = np.pad(self.stop_ids, more, constant_values=-1)
        return stops

    def leave(self, slot: int) -> None:
        self.sequences[slot] = None
        self.free.append(slot)

    def row_sampling(
        self,
        slots_N: np.ndarray,
        device: torch.device | str = "cpu",
        made_N: np.ndarray | None = None,
    ) -> RowSampling:
        """The sampling parameters of these slots for the token after `made_N` (those recorded)."""

        def column(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array[slots_N]).to(device)

        index_N = self.start_index[slots_N] + (self.made[slots_N] if made_N is None else made_N)
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
        self, slots_N: np.ndarray, token_N: np.ndarray, logprob_N: np.ndarray, text_of: TextOf
    ) -> list[tuple[int, FinishReason]]:
        """Append one token to each slot; returns the slots that are finished by it, and why."""
        made_N = self.made[slots_N]
        self.out_ids[slots_N, made_N] = token_N
        self.out_logprobs[slots_N, made_N] = logprob_N
        self.last_token[slots_N] = token_N
        self.made[slots_N] = made_N + 1
        stopped_N = (self.stop_ids[slots_N] == token_N[:, None]).any(axis=1)
        watched = np.flatnonzero(self.watches_text[slots_N] & ~stopped_N)
        for row in watched:
            stopped_N[row] = self._text_stops(int(slots_N[row]), text_of)
        full_N = made_N + 1 >= self.max_made[slots_N]
        ended = np.flatnonzero(stopped_N | full_N)
        return [(int(slots_N[row]), "stop" if stopped_N[row] else "length") for row in ended]

    def _text_stops(self, slot: int, text_of: TextOf) -> bool:
        """Whether the newest token completed a stop string: only the end of the text is decoded."""
        sequence = self.sequences[slot]
        assert sequence is not None
        request, made = sequence.request, int(self.made[slot])
        if self.start_index[slot] + made < self.min_index[slot]:
            return False
        window = 4 * max(len(stop) for stop in request.sampling.stop) + 4
        new_ids = self.out_ids[slot, max(0, made - window) : made].tolist()
        missing = window - len(new_ids)
        old_ids = request.response_ids[-missing:].tolist() if missing > 0 else []
        text = text_of(old_ids + new_ids)
        return any(stop in text for stop in request.sampling.stop)

    def output(self, slot: int) -> tuple[np.ndarray, np.ndarray]:
        """Copies of the new ids and log-probs so far."""
        made = int(self.made[slot])
        return self.out_ids[slot, :made].copy(), self.out_logprobs[slot, :made].copy()

    @property
    def occupied(self) -> list[int]:
        return [slot for slot, sequence in enumerate(self.sequences) if sequence is not None]
