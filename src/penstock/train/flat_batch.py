"""The batch as the trainer sees it: one row per rollout, one entry per trained token. Numpy only.

Turns groups into flat arrays in a fixed order (groups as they came, rollouts as they came), so that
everything after it is arithmetic on arrays. Loss weights are computed here from whole-update sums:
what a micro-batch holds can never change them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.algo.settings import AlgorithmSettings
from penstock.types import Group, Rollout, expand_segments, staleness


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """R rollouts of one batch and their N sampled tokens, laid end to end."""

    rollouts: tuple[Rollout, ...]
    token_ids: tuple[np.ndarray, ...]  # prompt and response of each rollout
    predictors: tuple[np.ndarray, ...]  # positions in token_ids whose next token is trained
    group_R: np.ndarray  # which group each rollout belongs to
    bounds_R1: np.ndarray  # trained tokens of rollout r are bounds[r] .. bounds[r + 1]
    truncated_R: np.ndarray  # the response was cut at max_tokens
    behaviour_N: np.ndarray  # log-probs the tokens were sampled with
    temperature_N: np.ndarray
    staleness_N: np.ndarray  # updates between each token's policy and this step
    row_N: np.ndarray  # the rollout of each token

    @property
    def counts_R(self) -> np.ndarray:
        return np.diff(self.bounds_R1)

    @property
    def num_tokens(self) -> int:
        return int(self.bounds_R1[-1])

    @property
    def response_lengths_R(self) -> np.ndarray:
        return np.array([len(rollout.response_ids) for rollout in self.rollouts], dtype=np.int64)


def rows_of(groups: Sequence[Group], step: int, settings: AlgorithmSettings) -> Rows:
    """Lay the groups out. Truncated responses have no trained tokens where the method masks them."""
    rollouts = tuple(rollout for group in groups for rollout in group.rollouts)
    group_R = np.repeat(np.arange(len(groups)), [len(group.rollouts) for group in groups])
    truncated_R = np.array([rollout.finish_reason == "length" for rollout in rollouts], dtype=bool)
    chosen = []
    for rollout, truncated in zip(rollouts, truncated_R, strict=True):
        masked = truncated and settings.mask_truncated
        empty = np.zeros(0, dtype=np.int64)
        chosen.append(empty if masked else np.flatnonzero(rollout.loss_mask))
    counts_R = np.array([len(index) for index in chosen], dtype=np.int64)
    versions = [np.array(expand_segments(rollout.segments), dtype=np.int64) for rollout in rollouts]
    temperatures_R = np.array([rollout.temperature or 1.0 for rollout in rollouts])
    return Rows(
        rollouts=rollouts,
        token_ids=tuple(
            np.concatenate([rollout.prompt_ids, rollout.response_ids]) for rollout in rollouts
        ),
        predictors=tuple(
            index + len(rollout.prompt_ids) - 1
            for rollout, index in zip(rollouts, chosen, strict=True)
        ),
        group_R=group_R,
        bounds_R1=np.concatenate([[0], np.cumsum(counts_R)]),
        truncated_R=truncated_R,
        behaviour_N=_joined([r.logprobs[i] for r, i in zip(rollouts, chosen, strict=True)]),
        temperature_N=np.repeat(temperatures_R, counts_R),
        staleness_N=staleness(step, 0)
        - _joined([v[i] for v, i in zip(versions, chosen, strict=True)]).astype(np.int64),
        row_N=np.repeat(np.arange(len(rollouts)), counts_R),
    )


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0), *parts]).astype(np.float64)


def mini_batches(num_groups: int, parts: int) -> list[np.ndarray]:
    """Group numbers of each update of a batch, in order; the parts differ by at most one group.

    There are always as many parts, empty or not, so that all ranks do as many updates.
    """
    return list(np.array_split(np.arange(num_groups), parts))


def update_sums(rows: Rows, chosen_R: np.ndarray) -> np.ndarray:
    """(trained tokens, sequences with at least one): what ranks add up before `loss_weights`."""
    counts_R = rows.counts_R[chosen_R]
    return np.array([counts_R.sum(), np.count_nonzero(counts_R)], dtype=np.float64)


def loss_weights(
    rows: Rows, chosen_R: np.ndarray, sums: np.ndarray, aggregation: str, constant_length: int
) -> np.ndarray:
    """The factor of every token of the batch in the loss of one update; 0 outside `chosen_R`."""
    num_tokens, num_sequences = (max(float(value), 1.0) for value in sums)
    weight_R = np.zeros(len(rows.rollouts))
    if aggregation == "token":
        weight_R[chosen_R] = 1.0 / num_tokens
    elif aggregation == "sequence":
        weight_R[chosen_R] = 1.0 / (num_sequences * np.maximum(rows.counts_R[chosen_R], 1))
    else:
        assert aggregation == "constant", aggregation
        weight_R[chosen_R] = 1.0 / (num_sequences * constant_length)
    return weight_R[rows.row_N]
