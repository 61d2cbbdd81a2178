"""Packs, the micro-batches: sequences end to end in one row, sorted by length, no padding.

Sits between `flat_batch.py` (arrays of the batch) and `policy.py` (the forward pass). Decides which
sequences share a forward pass; the loss does not depend on it. Rows that begin with the same tokens (a
group's prompt, the turns before a branch) form a tree: the pack holds each of its segments once, and a
segment attends to those before it on its way from the root. Tokens after a row's last predictor are left
out, except in a pack of one row: there the model sees the sequence as it was sampled.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from penstock.config import TrainConfig
from penstock.config.memory import GRADIENT, ModelShape, moment_bytes, pack_tokens
from penstock.model.packed_attention import Block, Copies, PackLayout, SharedKeys
from penstock.model.transfer import all_to_device
from penstock.training.parallel.ranks import Ranks
from penstock.types import Choices

_WORTH = 16  # share a segment if that saves more than this part of its rows' tokens
_LEAST_SHARED = 4  # join a row to a tree that has at least this part of its context


@dataclass(frozen=True, slots=True)
class Kept:
    """The tokens that top_k and top_p left for each trained token to be sampled from; without any: all."""

    bounds_N1: np.ndarray
    ids_M: Tensor

    def __getitem__(self, part: slice) -> Kept:
        bounds = self.bounds_N1[part.start : part.stop + 1]
        return Kept(bounds - bounds[0], self.ids_M[bounds[0] : bounds[-1]])

    def select(self, own_N: np.ndarray) -> Kept:
        """Those of some tokens."""
        counts_N = np.diff(self.bounds_N1)
        own_M = torch.from_numpy(np.repeat(own_N, counts_N)).to(self.ids_M.device)
        return Kept(np.cumsum([0, *counts_N[own_N]]), self.ids_M[own_M])

    def dropped(self, vocabulary: int) -> Tensor:
        """bool [tokens, vocabulary]: what had no chance; ids outside are those of other ranks."""
        counts_N, device = np.diff(self.bounds_N1), self.ids_M.device
        row_M = torch.from_numpy(np.repeat(np.arange(len(counts_N)), counts_N)).to(device)
        here_M = (self.ids_M >= 0) & (self.ids_M < vocabulary)
        cut_N1 = torch.from_numpy(counts_N > 0).to(device)[:, None]
        dropped_NV = cut_N1.repeat(1, vocabulary)
        dropped_NV[row_M[here_M], self.ids_M[here_M]] = False
        return dropped_NV


@dataclass(frozen=True, slots=True, kw_only=True)
class Pack:
    """One forward pass: T tokens, of which N are predicted and trained."""

    num_sequences: int  # rollouts whose rows are in the pack
    input_ids_T: Tensor
    position_ids_T: Tensor
    layout: PackLayout
    predictor_N: Tensor  # position whose hidden state predicts the trained token
    target_N: Tensor
    token_N: np.ndarray  # number of each trained token in the batch's flat arrays
    index_N: Tensor  # the same on the device
    sequence_N: Tensor  # which rollout of the pack each token belongs to
    kept: Kept | None = None  # None: every token was sampled from the whole vocabulary
    experts_TN: Tensor | None = None  # see `Choices.experts`; None: the router chooses


def join_by_context(
    units: Sequence[Sequence[int]],
    token_ids: Sequence[np.ndarray],
    predictors: Sequence[np.ndarray],
    budget: int,
) -> tuple[list[list[int]], list[int]]:
    """Join units (rows that stay together) of one tree, up to `budget` tokens; 0 joins none.

    Return the joined units and the tokens of each; what a row shares with the row before it is counted once. A
    unit goes to the rows of the same context, else to rows that share a large part of it.
    """

    def packed(number: int) -> np.ndarray:
        return token_ids[number][: int(predictors[number][-1]) + 1]

    joined: list[list[int]] = []
    costs: list[int] = []
    open_units: dict[bytes, int] = {}
    for unit in units:
        ids, length = token_ids[unit[0]], int(predictors[unit[0]][0]) + 1
        rows = [packed(number) for number in unit]
        cost = sum(map(len, rows)) - sum(map(_num_equal, itertools.pairwise(rows)))
        place, shared = _open_unit(open_units, ids, length)
        if place is not None:
            shared = max(shared, _num_equal((rows[0], packed(joined[place][-1]))))
        if place is not None and costs[place] + cost - shared <= budget:
            joined[place] += unit
            costs[place] += cost - shared
        else:
            place = len(joined)
            joined.append(list(unit))
            costs.append(cost)
        open_units[_key(ids, length)] = place
        for number in unit:
            for part in _parts(int(predictors[number][-1]) + 1):
                open_units[_key(token_ids[number], part)] = place
    return joined, costs


def _open_unit(
    open_units: dict[bytes, int], ids: np.ndarray, length: int
) -> tuple[int | None, int]:
    """The newest unit with rows that begin as this context does, and the tokens that they share at least."""
    for shared in (length, *_parts(length)):
        place = open_units.get(_key(ids, shared))
        if place is not None and shared * _LEAST_SHARED >= length:
            return place, shared
    return None, 0


def _parts(length: int) -> list[int]:
    """The lengths at which the beginnings of rows are compared: powers of two, the largest first."""
    return [1 << power for power in range(length.bit_length() - 1, -1, -1)]


def _key(ids: np.ndarray, length: int) -> bytes:
    return ids[:length].astype(np.int64).tobytes()


def split_by_tokens(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Split sequences into even bins of at most `budget` tokens, shortest first.

    A sequence longer than the budget gets a bin of its own. Return the indices of each bin.
    """
    order = sorted(range(len(lengths)), key=lambda index: (lengths[index], index))
    total = sum(lengths)
    even = total / max(math.ceil(total / budget), 1)
    bins: list[list[int]] = []
    filled = 0
    for index in order:
        if not bins or filled >= even or filled + lengths[index] > budget:
            bins.append([])
            filled = 0
        bins[-1].append(index)
        filled += lengths[index]
    return bins


class Rows(Protocol):
    """Rows of tokens, such as those of a `FlatBatch`: entries per row (S)."""

    @property
    def token_ids(self) -> tuple[np.ndarray, ...]: ...
    @property
    def predictors(self) -> tuple[np.ndarray, ...]: ...
    @property
    def bounds_S1(self) -> np.ndarray: ...
    @property
    def rollout_S(self) -> np.ndarray: ...
    @property
    def choices(self) -> Sequence[Choices | None]: ...


def make_packs(
    flat: Rows,
    units: Sequence[Sequence[int]],
    *,
    budget: int,
    joins: bool,
    device: torch.device,
    ranks: Ranks,
    replays: bool = False,
) -> Iterator[Pack]:
    """Yield packs of the rows in `units`, and empty packs up to the largest rank's count.

    `replays`: tokens take the experts that their engine took.

    No unit is split. With `joins`, units of one tree (a group, a session) share a pack where they fit. A
    sharded forward pass needs all ranks, so every rank makes the same number of passes. See `make_pack`.
    """
    rows, predictors = flat.token_ids, flat.predictors
    units, lengths = join_by_context(units, rows, predictors, budget if joins else 0)
    bins = split_by_tokens(lengths, budget)
    missing = int(ranks.max_of(len(bins))) - len(bins)
    for part in bins:
        numbers = [number for index in part for number in units[index]]
        yield make_pack(
            numbers,
            rows,
            predictors,
            flat.bounds_S1,
            device,
            flat.rollout_S,
            flat.choices,
            replays=replays,
        )
    for _ in range(missing):
        yield empty_pack(device)


def empty_pack(device: torch.device) -> Pack:
    """A pack of one token that trains nothing, for ranks with fewer packs than others."""
    nothing = torch.zeros(0, dtype=torch.int64, device=device)
    zero_T = torch.zeros(1, dtype=torch.int64, device=device)
    bounds_S1 = torch.tensor([0, 1], dtype=torch.int32, device=device)
    return Pack(
        num_sequences=0,
        input_ids_T=zero_T,
        position_ids_T=zero_T,
        layout=PackLayout(blocks=(Block(1, 1),), bounds_S1=bounds_S1, longest=1),
        predictor_N=nothing,
        target_N=nothing,
        token_N=np.zeros(0, dtype=np.int64),
        index_N=nothing,
        sequence_N=nothing,
    )


@dataclass(slots=True)
class _Segment:
    """Tokens that lie side by side in a pack; they see `context` and what it sees, then each other."""

    ids: np.ndarray
    context: _Segment | None = None
    start: int = 0  # in the pack

    @property
    def prefix(self) -> int:
        """The number of tokens before these in their rows."""
        return sum(len(segment.ids) for segment in self.way[:-1])

    @property
    def way(self) -> list[_Segment]:
        """The segments from the root to this one."""
        way: list[_Segment] = []
        segment: _Segment | None = self
        while segment is not None:
            way.append(segment)
            segment = segment.context
        return way[::-1]

    @property
    def places(self) -> np.ndarray:
        """Where the tokens of the way lie in the pack."""
        return np.concatenate([s.start + np.arange(len(s.ids)) for s in self.way])


def make_pack(
    numbers: Sequence[int],
    token_ids: Sequence[np.ndarray],
    predictors: Sequence[np.ndarray],
    first_token: Sequence[int] | np.ndarray,
    device: torch.device,
    owner: Sequence[int] | np.ndarray | None = None,
    choices: Sequence[Choices | None] = (),
    *,
    replays: bool = False,
) -> Pack:
    """Pack the rows `numbers` of a batch.

    `token_ids`, `predictors`, `first_token` (the number of its first trained token), `owner` (the number of its
    rollout; None: each row is one) and `choices` hold one entry per row of the batch.
    """
    ordered = sorted(numbers, key=lambda number: (len(token_ids[number]), number))
    segments, last_segment = _lay_out(ordered, token_ids, predictors)
    predictor = np.concatenate(
        [last_segment[number].places[predictors[number]] for number in ordered]
    )
    counts = np.array([len(predictors[number]) for number in ordered], dtype=np.int64)
    token = np.concatenate(
        [
            np.arange(first_token[number], first_token[number] + count)
            for number, count in zip(ordered, counts, strict=True)
        ]
    ).astype(np.int64)
    target = np.concatenate([token_ids[number][predictors[number] + 1] for number in ordered])
    positions = [segment.prefix + np.arange(len(segment.ids)) for segment in segments]
    places: dict[int, int] = {}  # of each rollout among those of the pack
    owners = ordered if owner is None else [int(owner[number]) for number in ordered]
    sequence = [places.setdefault(rollout, len(places)) for rollout in owners]

    arrays = [
        np.concatenate([s.ids for s in segments]).astype(np.int64),
        np.concatenate(positions),
        predictor,
        target.astype(np.int64),
        token,
        np.repeat(np.array(sequence, dtype=np.int64), counts),
    ]
    moved = all_to_device([*arrays, *_layout_arrays(segments)], device)
    input_ids_T, position_ids_T, predictor_N, target_N, index_N, sequence_N = moved[: len(arrays)]
    return Pack(
        num_sequences=len(places),
        input_ids_T=input_ids_T,
        position_ids_T=position_ids_T,
        layout=_layout(segments, moved[len(arrays) :]),
        predictor_N=predictor_N,
        target_N=target_N,
        token_N=token,
        index_N=index_N,
        sequence_N=sequence_N,
        kept=_kept([(choices[n], predictors[n]) for n in ordered], device) if choices else None,
        experts_TN=_experts([(choices[n], last_segment[n]) for n in ordered], device)
        if replays
        else None,
    )


def _experts(
    rows: Sequence[tuple[Choices | None, _Segment]], device: torch.device
) -> Tensor | None:
    """The experts of all tokens of a pack; those of a shared token are of the first row that knows them."""
    known = [(made.experts, end.places) for made, end in rows if made and made.experts.shape[1]]
    if not known:
        return None
    width, total = known[0][0].shape[1], 1 + max(int(end.places.max()) for _, end in rows)
    experts_TN = np.zeros((total, width), np.int16)
    for experts, places in known:
        if experts.shape[1] == width:
            new = places[: len(experts)]
            is_free = ~experts_TN[new].any(1)
            experts_TN[new[is_free]] = experts[: len(new)][is_free]
    return torch.from_numpy(experts_TN).to(device)


def _kept(rows: Sequence[tuple[Choices | None, np.ndarray]], device: torch.device) -> Kept | None:
    """The tokens that were left to the predictors of rows."""
    counts, parts = [], []
    for choices, predictors in rows:
        if choices is None:
            counts.append(np.zeros(len(predictors), np.int32))
            continue
        counts.append(choices.num_kept[predictors])
        is_trained = np.isin(np.arange(len(choices)), predictors)
        parts.append(choices.kept_ids[np.repeat(is_trained, choices.num_kept)])
    if not any(map(len, parts)):
        return None
    ids_M = torch.from_numpy(np.concatenate(parts).astype(np.int64)).to(device)
    return Kept(np.cumsum([0, *np.concatenate(counts)]), ids_M)


def _lay_out(
    ordered: Sequence[int], token_ids: Sequence[np.ndarray], predictors: Sequence[np.ndarray]
) -> tuple[list[_Segment], dict[int, _Segment]]:
    """The segments in the order of the pack, and the segment that ends each row.

    Segments are sorted by the lengths of their contexts and their own, so that equal ones form blocks.
    """
    alone = len(ordered) == 1
    rows = {
        number: token_ids[number][: None if alone else int(predictors[number][-1]) + 1]
        for number in ordered
    }
    segments: list[_Segment] = []
    ends: dict[int, _Segment] = {}
    for branch in _branches(rows, ordered, 0):
        _grow(rows, branch, 0, None, segments, ends)
    segments.sort(key=lambda segment: (segment.prefix, len(segment.ids)))
    start = 0
    for segment in segments:
        segment.start = start
        start += len(segment.ids)
    return segments, ends


def _grow(
    rows: dict[int, np.ndarray],
    branch: list[int],
    first: int,
    context: _Segment | None,
    segments: list[_Segment],
    ends: dict[int, _Segment],
) -> None:
    """Add the segments of rows that are equal up to token `first` and at it."""
    fork = first + _num_equal([rows[number][first:] for number in branch])
    total = sum(len(rows[number]) - first for number in branch)
    saved = (len(branch) - 1) * (fork - first)
    if len(branch) == 1 or (fork - first > 1 and saved * _WORTH > total):
        context = _Segment(rows[branch[0]][first:fork], context)
        segments.append(context)
        first = fork
    for part in _branches(rows, branch, fork):
        if len(rows[part[0]]) > first:
            _grow(rows, part, first, context, segments, ends)
        else:
            assert context is not None
            ends.update(dict.fromkeys(part, context))


def _branches(
    rows: dict[int, np.ndarray], numbers: Sequence[int], fork: int
) -> Iterator[list[int]]:
    """The rows by their token at `fork`; each row that ends there is alone."""
    branches: dict[tuple[int, int], list[int]] = {}
    for number in numbers:
        ended = len(rows[number]) == fork
        key = (-1, number) if ended else (int(rows[number][fork]), 0)
        branches.setdefault(key, []).append(number)
    yield from branches.values()


def _num_equal(rows: Sequence[np.ndarray]) -> int:
    """The number of leading tokens that all rows share."""
    first, shared = rows[0], min(map(len, rows))
    for row in rows[1:]:
        different = np.flatnonzero(row[:shared] != first[:shared])
        shared = int(different[0]) if len(different) else shared
    return shared


def _layout_arrays(segments: Sequence[_Segment]) -> list[np.ndarray]:
    """The bounds of the segments; with shared keys also their index, order, counts and bounds."""
    lengths = np.array([len(segment.ids) for segment in segments], dtype=np.int64)
    prefixes = np.array([segment.prefix for segment in segments], dtype=np.int64)
    if not prefixes.any():
        return [_bounds(lengths)]
    index = np.concatenate([segment.places for segment in segments])
    counts_T = np.bincount(index, minlength=int(lengths.sum()))
    order = np.argsort(index, kind="stable")
    return [_bounds(lengths), index, order, _bounds(counts_T), _bounds(prefixes + lengths)]


def _layout(segments: Sequence[_Segment], moved: Sequence[Tensor]) -> PackLayout:
    """The layout of the segments, whose arrays are on the device."""
    pairs = Counter((segment.prefix, len(segment.ids)) for segment in segments)
    bounds_S1, *others = moved
    shared = None
    if others:
        index_K, order_K, bounds_T1, seen_S1 = others
        shared = SharedKeys(
            index_K=index_K,
            copies=Copies(order_K=order_K, bounds_T1=bounds_T1),
            bounds_S1=seen_S1,
            longest=max(prefix + length for prefix, length in pairs),
        )
    return PackLayout(
        blocks=tuple(Block(pairs[pair], pair[1], pair[0]) for pair in sorted(pairs)),
        bounds_S1=bounds_S1,
        longest=max(length for _, length in pairs),
        shared=shared,
    )


def _bounds(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


# ---- how many tokens a pack takes, if the user does not say
# On a CPU small packs are faster: their activations stay in the cache. On a GPU they are bounded by the free memory,
# and by what keeps it at work on a layer while the host starts the next one.

CPU_TOKENS = 2048


def token_budget(
    config: TrainConfig,
    model: Any,
    each: int,
    trained: int,
    device: torch.device,
    ranks: Ranks,
) -> int:
    """The tokens of a pack on this device, where all ranks together train `trained` numbers; a choice is logged.

    They have no gradient and no moments yet. model: its config. each: bytes of a number as it computes.
    """
    if config.micro_batch_tokens:
        return config.micro_batch_tokens
    if device.type != "cuda":
        return CPU_TOKENS
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    shape = ModelShape.of(model)
    bytes_per_token = shape.bytes_per_token(each, checkpointing=config.gradient_checkpointing)
    share = trained // (ranks.data_world * ranks.context.size)
    moments = 0 if config.offload_moments else moment_bytes(config.moments)
    tokens = pack_tokens(free, share * (GRADIENT + moments), bytes_per_token, shape.useful_tokens)
    print(
        f"trainer on {device}: micro-batches of {tokens:,} tokens ({free / 2**30:.1f} GiB free, "
        f"{bytes_per_token / 2**10:,.0f} KiB of activations per token)",
        file=sys.stderr,
        flush=True,
    )
    return tokens * ranks.context.size  # which share a pack
