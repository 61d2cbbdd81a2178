"""Packs, the micro-batches: whole sequences end to end in one row, sorted by length, no padding.

Sits between `flat_batch.py` (arrays of the batch) and `policy.py` (the forward pass). Decides which
sequences share a forward pass; the loss does not depend on it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from penstock.training.packed_attention import PackLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class Pack:
    """One forward pass: T tokens of whole rows, of which N are predicted and trained."""

    num_sequences: int  # rollouts whose rows are in the pack
    input_ids_T: Tensor
    position_ids_T: Tensor
    layout: PackLayout
    predictor_N: Tensor  # position whose hidden state predicts the trained token
    target_N: Tensor
    token_N: np.ndarray  # number of each trained token in the batch's flat arrays
    sequence_N: Tensor  # which rollout of the pack each token belongs to


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


def empty_pack(device: torch.device) -> Pack:
    """Return a pack of one token that trains nothing, for ranks with fewer packs than others."""
    nothing = torch.zeros(0, dtype=torch.int64, device=device)
    one = torch.zeros(1, dtype=torch.int64, device=device)
    bounds_S1 = torch.tensor([0, 1], dtype=torch.int32, device=device)
    return Pack(
        num_sequences=0,
        input_ids_T=one,
        position_ids_T=one,
        layout=PackLayout(blocks=((1, 1),), bounds_S1=bounds_S1, longest=1),
        predictor_N=nothing,
        target_N=nothing,
        token_N=np.zeros(0, dtype=np.int64),
        sequence_N=nothing,
    )


def make_pack(
    numbers: Sequence[int],
    token_ids: Sequence[np.ndarray],
    predictors: Sequence[np.ndarray],
    first_token: Sequence[int] | np.ndarray,
    device: torch.device,
    owner: Sequence[int] | np.ndarray | None = None,
) -> Pack:
    """Pack the rows `numbers` of a batch.

    `token_ids`, `predictors`, `first_token` (the number of its first trained token) and `owner` (the
    number of its rollout; None: each row is one) hold one entry per row of the batch.
    """
    ordered = sorted(numbers, key=lambda number: (len(token_ids[number]), number))
    lengths = np.array([len(token_ids[number]) for number in ordered], dtype=np.int64)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    ids = np.concatenate([token_ids[number] for number in ordered]).astype(np.int64)
    predictor = np.concatenate(
        [predictors[number] + start for number, start in zip(ordered, starts[:-1], strict=True)]
    ).astype(np.int64)
    counts = np.array([len(predictors[number]) for number in ordered], dtype=np.int64)
    token = np.concatenate(
        [
            np.arange(first_token[number], first_token[number] + count)
            for number, count in zip(ordered, counts, strict=True)
        ]
    ).astype(np.int64)
    distinct, repeats = np.unique(lengths, return_counts=True)
    places: dict[int, int] = {}  # of each rollout among those of the pack
    owners = ordered if owner is None else [int(owner[number]) for number in ordered]
    sequence = [places.setdefault(rollout, len(places)) for rollout in owners]

    def move(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    return Pack(
        num_sequences=len(places),
        input_ids_T=move(ids),
        position_ids_T=move(np.arange(len(ids)) - np.repeat(starts[:-1], lengths)),
        layout=PackLayout(
            blocks=tuple(
                (int(n), int(length)) for length, n in zip(distinct, repeats, strict=True)
            ),
            bounds_S1=move(starts.astype(np.int32)),
            longest=int(lengths[-1]),
        ),
        predictor_N=move(predictor),
        target_N=move(ids[predictor + 1]),
        token_N=token,
        sequence_N=move(np.repeat(np.array(sequence, dtype=np.int64), counts)),
    )
