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

from penstock.config import Config
from penstock.data.sampler import stable_hash
from penstock.training.algo.settings import AlgorithmSettings
from penstock.types import Choices, Group, Rollout, staleness


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatBatch:
    """R rollouts of one batch, their S rows and their N trained tokens, laid end to end."""

    rollouts: tuple[Rollout, ...]
    token_ids: tuple[np.ndarray, ...]  # prompt and response of each row
    predictors: tuple[np.ndarray, ...]  # of each row: positions whose next token is trained
    choices: tuple[Choices | None, ...]  # of each row: what its tokens were chosen from
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
    teacher_N: np.ndarray | None  # recorded log-probs of a teacher; None: not of every rollout

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
        sizes_G = np.array([len(group.rollouts) for group in groups], dtype=np.int64)
        group_R = np.repeat(np.arange(len(groups)), sizes_G)
        truncated_R = np.array([rollout.finish_reason == "length" for rollout in rollouts], bool)
        trained = _TrainedTokens.of(rollouts, truncated_R if settings.mask_truncated else None)
        rows = trained.rows()
        predictors = tuple(predictor for parts in rows for _, predictor in parts)
        num_rows_R = np.array([len(parts) for parts in rows], dtype=np.int64)
        temperatures_R = np.array([rollout.temperature or 1.0 for rollout in rollouts])
        return cls(
            rollouts=rollouts,
            token_ids=tuple(ids for parts in rows for ids, _ in parts),
            predictors=predictors,
            choices=tuple(part for rollout in rollouts for part in rollout.row_choices()),
            rollout_S=np.repeat(np.arange(len(rollouts)), num_rows_R),
            bounds_S1=np.cumsum([0, *(len(predictor) for predictor in predictors)]),
            group_R=group_R,
            bounds_R1=trained.bounds_R1,
            truncated_R=truncated_R,
            behaviour_N=trained.chosen([rollout.logprobs for rollout in rollouts]),
            temperature_N=temperatures_R[trained.rollout_N],
            early_N=trained.early(end_ids),
            staleness_N=staleness(step, 0) - trained.versions().astype(np.int64),
            rollout_N=trained.rollout_N,
            earned_N=trained.earned(),
            teacher_N=trained.taught(),
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

    def units(self, chosen_R: np.ndarray, *, joined: bool) -> list[list[int]]:
        """The numbers of the chosen rollouts' rows that have trained tokens; `joined`: a rollout's rows together."""
        units: dict[int, list[int]] = {}
        for number in np.flatnonzero(np.isin(self.rollout_S, chosen_R)).tolist():
            if len(self.predictors[number]):
                owner = int(self.rollout_S[number]) if joined else number
                units.setdefault(owner, []).append(number)
        return list(units.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class _TrainedTokens:
    """Which tokens of the responses, laid end to end, are trained.

    A batch has hundreds of rollouts, and the GPU waits for this: few operations, each on all of them.
    """

    rollouts: tuple[Rollout, ...]
    place_N: np.ndarray  # among the tokens of all responses
    index_N: np.ndarray  # in the own response
    rollout_N: np.ndarray
    bounds_R1: np.ndarray

    @classmethod
    def of(cls, rollouts: tuple[Rollout, ...], masked_R: np.ndarray | None) -> _TrainedTokens:
        """The places of the loss masks; rollouts in `masked_R` have none."""
        lengths_R = np.array([len(rollout.response_ids) for rollout in rollouts], dtype=np.int64)
        rollout_A = np.repeat(np.arange(len(rollouts)), lengths_R)  # A: all tokens of responses
        mask_A = (
            np.concatenate([np.zeros(0, bool), *(rollout.loss_mask for rollout in rollouts)]) != 0
        )
        if masked_R is not None:
            mask_A &= ~masked_R[rollout_A]
        place_N = np.flatnonzero(mask_A)
        rollout_N = rollout_A[place_N]
        counts_R = np.bincount(rollout_N, minlength=len(rollouts))
        return cls(
            rollouts=rollouts,
            place_N=place_N,
            index_N=place_N - (np.cumsum(lengths_R) - lengths_R)[rollout_N],
            rollout_N=rollout_N,
            bounds_R1=np.concatenate([[0], np.cumsum(counts_R)]),
        )

    def chosen(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """The trained tokens' values of arrays over the responses' tokens, one per rollout."""
        joined_A: np.ndarray = np.concatenate([np.zeros(0, dtype=np.float32), *parts])
        return joined_A[self.place_N].astype(np.float64)

    def versions(self) -> np.ndarray:
        """The policy version of every trained token."""
        segments = [segment for rollout in self.rollouts for segment in rollout.segments]
        versions = np.array([segment.version for segment in segments], dtype=np.int64)
        lengths = np.array([segment.length for segment in segments], dtype=np.int64)
        versions_N: np.ndarray = np.repeat(versions, lengths)[self.place_N]
        return versions_N

    def early(self, end_ids: Sequence[int]) -> np.ndarray:
        """Which tokens were sampled without the end tokens; an end token itself was not."""
        least_R = np.array([rollout.min_tokens or 0 for rollout in self.rollouts], dtype=np.int64)
        early_N: np.ndarray = self.index_N < least_R[self.rollout_N]
        if early_N.any():
            ids_N = self.chosen([rollout.response_ids for rollout in self.rollouts])
            early_N &= ~np.isin(ids_N, end_ids)
        return early_N

    def earned(self) -> np.ndarray | None:
        """The reward that each trained token's rollout had earned before it."""
        if not any(rollout.earned for rollout in self.rollouts):
            return None
        runs = [
            run
            for rollout in self.rollouts
            for run in rollout.earned or ((len(rollout.response_ids), 0.0),)
        ]
        earned_A = np.repeat(np.array([v for _, v in runs], np.float64), [n for n, _ in runs])
        earned_N: np.ndarray = earned_A[self.place_N]
        return earned_N

    def taught(self) -> np.ndarray | None:
        """The log-probs that were recorded of a teacher."""
        recorded = [rollout.teacher_logprobs for rollout in self.rollouts]
        known = [logprobs for logprobs in recorded if logprobs is not None]
        return self.chosen(known) if len(known) == len(recorded) else None

    def rows(self) -> list[list[tuple[np.ndarray, np.ndarray]]]:
        """(token ids, predictors) of each row of each rollout."""
        prompts = [len(rollout.prompt_ids) for rollout in self.rollouts]
        predictor_N = self.index_N + (np.array(prompts, dtype=np.int64) - 1)[self.rollout_N]
        parts = [
            part for rollout in self.rollouts for part in (rollout.prompt_ids, rollout.response_ids)
        ]
        joined = np.concatenate(parts) if parts else np.zeros(0)
        bounds, start, rows = self.bounds_R1.tolist(), 0, []
        for number, rollout in enumerate(self.rollouts):
            tokens = slice(bounds[number], bounds[number + 1])
            end = start + prompts[number] + len(rollout.response_ids)
            if rollout.rows:
                rows.append(_rows(rollout, self.index_N[tokens]))
            else:
                rows.append([(joined[start:end], predictor_N[tokens])])
            start = end
        return rows


def _rows(rollout: Rollout, index: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """(token ids, predictors) of each row; `index` are the trained places in the response."""
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


def batch_updates(total: int, config: Config, step: int, rank: int, world: int) -> list[np.ndarray]:
    """The numbers of a rank's groups in each update of a batch of `total` groups."""
    train = config.train
    return [
        numbers
        for epoch in range(train.num_epochs)
        for numbers in mini_batches(
            total,
            train.mini_batches,
            seed=stable_hash(config.seed, "updates", step, epoch),
            rank=rank,
            world=world,
        )
    ]


def mini_batches(
    total: int, parts: int, *, seed: int, rank: int = 0, world: int = 1
) -> list[np.ndarray]:
    """This rank's group numbers for each of the `parts` updates of a batch of `total` groups.

    Groups that lie an update's size apart are dealt to different updates at random. So updates mix the
    tasks, which stand side by side in a batch; each rank, which holds every world-th group, has as
    many groups as the others in every update; and all ranks together make the updates of a single rank.
    """
    size = max(1, math.ceil(total / parts))
    update_SP = np.random.default_rng(seed).permuted(np.tile(np.arange(parts), (size, 1)), axis=1)
    number_G = np.arange(rank, total, world)
    update_G = update_SP[number_G % size, number_G // size]
    return [np.flatnonzero(update_G == update) for update in range(parts)]
