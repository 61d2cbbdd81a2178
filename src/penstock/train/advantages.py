"""From the scores of a batch to one advantage per trained token. Numpy only.

Applies the reward-side terms (overlong punishment, KL in the reward), the group's baseline, and
whole-batch normalisation over all ranks. Denominators come from the whole batch, never from a part.
"""

from __future__ import annotations

import numpy as np

from penstock.algo import advantage
from penstock.algo.settings import AlgorithmSettings
from penstock.train.flat_batch import Rows
from penstock.train.parallel import Ranks


def shaped_rewards(rows: Rows, max_tokens_R: np.ndarray, settings: AlgorithmSettings) -> np.ndarray:
    """The scores with the overlong punishment, where the method has one."""
    rewards_R = np.array([rollout.reward for rollout in rows.rollouts], dtype=np.float64)
    if settings.overlong_penalty:
        rewards_R += advantage.overlong_penalties(
            rows.response_lengths_R, rows.truncated_R, max_tokens_R, settings.overlong_penalty
        )
    return rewards_R


def token_advantages(
    rows: Rows,
    rewards_R: np.ndarray,
    penalty_N: np.ndarray | None,
    settings: AlgorithmSettings,
    ranks: Ranks,
) -> np.ndarray:
    """The advantage of every trained token; `penalty_N` is beta times KL where it is in the reward.

    With a group baseline a rollout's whole penalty counts in its reward, so that the baseline feels
    it too; without one each token pays for itself and what follows it (the reward to go).
    """
    to_go_N = None
    if penalty_N is not None:
        if settings.group_relative:
            rewards_R = rewards_R - np.bincount(
                rows.row_N, weights=penalty_N, minlength=len(rewards_R)
            )
        else:
            to_go_N = _sum_to_end(rows, penalty_N)
    advantages_R = np.zeros(len(rewards_R))
    for group in range(int(rows.group_R.max(initial=-1)) + 1):
        members = rows.group_R == group
        advantages_R[members] = advantage.group_advantages(rewards_R[members], settings)
    if settings.baseline == "batch_mean":
        mean, _ = advantage.batch_mean_and_deviation(ranks.sum(advantage.moments(advantages_R)))
        advantages_R -= mean
    advantages_N = advantages_R[rows.row_N]
    if to_go_N is not None:
        advantages_N = advantages_N - to_go_N
    if settings.normalize == "batch":
        total = ranks.sum(advantage.moments(advantages_N))
        advantages_N = advantage.standardize(
            advantages_N, *advantage.batch_mean_and_deviation(total)
        )
    return advantages_N


def _sum_to_end(rows: Rows, values_N: np.ndarray) -> np.ndarray:
    """At each token: the sum of the values from it to the end of its rollout."""
    upto_N1 = np.concatenate([[0.0], np.cumsum(values_N)])
    end_N = upto_N1[rows.bounds_R1[1:]][rows.row_N]
    return end_N - upto_N1[:-1]


def zero_variance_groups(rows: Rows) -> tuple[int, int]:
    """(groups whose rollouts all have the same reward, groups)."""
    rewards_R = np.array([rollout.reward for rollout in rows.rollouts], dtype=np.float64)
    count = int(rows.group_R.max(initial=-1)) + 1
    equal = sum(np.ptp(rewards_R[rows.group_R == group]) == 0 for group in range(count))
    return int(equal), count
