"""The batch as flat arrays: entries per rollout (R), per row (S) and per trained token (N). Numpy only.

Lays out groups and their rollouts in the order they came, so that everything after it is arithmetic
on arrays. A rollout is one row, an agent's may be several; advantages, weights and means are per
rollout (`objective.py`), forward passes are per row (`pack.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.algo.settings import AlgorithmSettings
from penstock.types import Group, Rollout, staleness


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatBatch:
    """R rollouts of one batch, their S rows and their N trained tokens, laid end to end."""

    rollouts: tuple[Rollout, ...]
    token_ids: tuple[np.ndarray, ...]  # prompt and response of each row
    predictors: tuple[np.ndarray, ...]  # of each row: positions whose next token is trained
    rollout_S: np.ndarray  # which rollout each row belongs to
    bounds_S1: np.ndarray  # trained tokens of row s are bounds[s] .. bounds[s + 1]
    group_R: np.ndarray  # which group each rollout belongs to
    bounds_R1: np.ndarray  # trained tokens of rollout r are bounds[r] .. bounds[r + 1]
    truncated_R: np.ndarray  # the response was cut at max_tokens
    behaviour_N: np.ndarray  # log-probs the tokens were sampled with
    temperature_N: np.ndarray
    early_N: np.ndarray  # bool: sampled without the end tokens, because of min_tokens
    staleness_N: np.ndarray  # updates between each token's policy and this step
    rollout_N: np.ndarray  # which rollout each token belongs to
    earned_N: np.ndarray | None  # reward that the rollout had before each token; None: 0 for all

    @classmethod
    def from_groups(
        cls,
        groups: Sequence[Group],
        step: int,
        settings: AlgorithmSettings,
        end_ids: Sequence[int] = (),
    ) -> FlatBatch:
        """Lay out the groups. With `mask_truncated`, truncated responses have no trained tokens.

        `end_ids` are the tokens that an engine bans from the first `min_tokens` of a response.
        """
        rollouts = tuple(rollout for group in groups for rollout in group.rollouts)
        group_R = np.repeat(np.arange(len(groups)), [len(group.rollouts) for group in groups])
        truncated_R = np.array([rollout.finish_reason == "length" for rollout in rollouts], bool)
        trained = []  # positions in each response
        for rollout, truncated in zip(rollouts, truncated_R, strict=True):
            masked = truncated and settings.mask_truncated
            empty = np.zeros(0, dtype=np.int64)
            trained.append(empty if masked else np.flatnonzero(rollout.loss_mask))
        pairs = list(zip(rollouts, trained, strict=True))
        counts_R = np.array([len(index) for index in trained], dtype=np.int64)
        versions = [_token_versions(rollout)[index] for rollout, index in pairs]
        temperatures_R = np.array([rollout.temperature or 1.0 for rollout in rollouts])
        rows = [_rows(rollout, index) for rollout, index in pairs]
        predictors = tuple(predictor for parts in rows for _, predictor in parts)
        return cls(
            rollouts=rollouts,
            token_ids=tuple(ids for parts in rows for ids, _ in parts),
            predictors=predictors,
            rollout_S=np.repeat(np.arange(len(rollouts)), [len(parts) for parts in rows]),
            bounds_S1=np.cumsum([0, *(len(predictor) for predictor in predictors)]),
            group_R=group_R,
            bounds_R1=np.concatenate([[0], np.cumsum(counts_R)]),
            truncated_R=truncated_R,
            behaviour_N=_joined([rollout.logprobs[index] for rollout, index in pairs]),
            temperature_N=np.repeat(temperatures_R, counts_R),
            early_N=_joined([_early(rollout, index, end_ids) for rollout, index in pairs]) > 0,
            staleness_N=staleness(step, 0) - _joined(versions).astype(np.int64),
            rollout_N=np.repeat(np.arange(len(rollouts)), counts_R),
            earned_N=_earned(pairs),
        )

    @property
    def counts_R(self) -> np.ndarray:
        """Trained tokens of each rollout."""
        return np.diff(self.bounds_R1)

    @property
    def num_tokens(self) -> int:
        return int(self.bounds_R1[-1])

    @property
    def num_groups(self) -> int:
        return int(self.group_R.max(initial=-1)) + 1

    @property
    def rewards_R(self) -> np.ndarray:
        return np.array([rollout.reward for rollout in self.rollouts], dtype=np.float64)

    @property
    def response_lengths_R(self) -> np.ndarray:
        """Sampled tokens of each rollout: the results of an agent's tools have no length."""
        return np.array([rollout.num_sampled for rollout in self.rollouts], dtype=np.int64)

    @property
    def answer_lengths_R(self) -> np.ndarray:
        """Sampled tokens of each rollout's longest answer, which `sampling.max_tokens` limits."""
        return np.array([rollout.longest_answer for rollout in self.rollouts], dtype=np.int64)

    def rows_of(self, chosen_R: np.ndarray) -> np.ndarray:
        """Return the numbers of the chosen rollouts' rows, in order."""
        return np.flatnonzero(np.isin(self.rollout_S, chosen_R))


def _token_versions(rollout: Rollout) -> np.ndarray:
    """Return the policy version of every token of the response."""
    versions = np.array([segment.version for segment in rollout.segments], dtype=np.int64)
    lengths = np.array([segment.length for segment in rollout.segments], dtype=np.int64)
    return np.repeat(versions, lengths)


def _rows(rollout: Rollout, index: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return (token ids, predictors) of each row; `index` are the trained places in the response."""
    if not rollout.rows:
        ids = np.concatenate([rollout.prompt_ids, rollout.response_ids])
        return [(ids, index + (len(rollout.prompt_ids) - 1))]
    return [
        (
            np.concatenate([prompt_ids, rollout.response_ids[place]]),
            index[(index >= place.start) & (index < place.stop)]
            - place.start
            + len(prompt_ids)
            - 1,
        )
        for prompt_ids, place in rollout.sequences()
    ]


def _earned(pairs: Sequence[tuple[Rollout, np.ndarray]]) -> np.ndarray | None:
    """Return the reward that each trained token's rollout had earned before it."""
    if not any(rollout.earned for rollout, _ in pairs):
        return None
    parts = []
    for rollout, index in pairs:
        runs = rollout.earned or ((len(rollout.response_ids), 0.0),)
        values = np.repeat([value for _, value in runs], [tokens for tokens, _ in runs])
        parts.append(values[index])
    return _joined(parts)


def _early(rollout: Rollout, index: np.ndarray, end_ids: Sequence[int]) -> np.ndarray:
    """Return which tokens were sampled without the end tokens; an end token itself was not."""
    if not rollout.min_tokens:
        return np.zeros(len(index), dtype=bool)
    return (index < rollout.min_tokens) & ~np.isin(rollout.response_ids[index], end_ids)


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0), *parts]).astype(np.float64)


def mini_batches(
    total: int, parts: int, *, seed: int, rank: int = 0, world: int = 1
) -> list[np.ndarray]:
    """Return this rank's group numbers for each of the `parts` updates of a batch of `total` groups.

    Groups that lie an update's size apart are dealt to different updates at random. So updates mix the
    tasks, which stand side by side in a batch; each rank, which holds every world-th group, has as
    many groups as the others in every update; and all ranks together make the updates of a single rank.
    """
    size = max(1, math.ceil(total / parts))
    update_SP = np.random.default_rng(seed).permuted(np.tile(np.arange(parts), (size, 1)), axis=1)
    number_G = np.arange(rank, total, world)
    update_G = update_SP[number_G % size, number_G // size]
    return [np.flatnonzero(update_G == update) for update in range(parts)]
