"""From rewards to advantages: baselines, normalisation, overlong penalty. Numpy only.

Group baselines need only the rewards of the group. Normalisation over the whole batch takes two
functions, `moments` and `standardize`, so that ranks can add up their moments in between.
"""

from __future__ import annotations

import numpy as np

from penstock.training.algo.settings import AlgorithmSettings

GROUP_EPSILON = 1e-4
BATCH_EPSILON = 1e-8


def group_advantages(rewards_G: np.ndarray, settings: AlgorithmSettings) -> np.ndarray:
    """One group's rewards less the group's baseline, over their deviation if the settings say so."""
    return centred(rewards_G, settings) / group_scale(rewards_G, rewards_G, settings)


def centred(rewards_G: np.ndarray, settings: AlgorithmSettings) -> np.ndarray:
    """One group's rewards less the group's baseline, if the method has one.

    With a group baseline, equal rewards and a group of one give zeros, never NaN.
    """
    rewards_G = np.asarray(rewards_G, dtype=np.float64)
    size = len(rewards_G)
    if not settings.group_relative:
        return rewards_G.copy()
    if np.ptp(rewards_G) == 0:
        return np.zeros(size)
    centred_G = rewards_G - rewards_G.mean()
    if settings.baseline == "leave_one_out":
        centred_G *= size / (size - 1)
    return centred_G


def group_scale(rewards_G: np.ndarray, returns_K: np.ndarray, settings: AlgorithmSettings) -> float:
    """What the advantages of a group are divided by; infinite if all its rewards are equal: they teach nothing.

    `returns_K` are the rewards that were still to come at each turn. They may differ much where the rewards
    of whole rollouts hardly do, and must not be divided by less than their own deviation.
    """
    if settings.normalize not in ("group", "mean"):
        return 1.0
    if np.ptp(rewards_G) == 0:
        return np.inf
    if settings.normalize == "mean":
        # rewards that are never negative have at least this mean; others must not be divided by less
        least = np.ptp(rewards_G) / len(rewards_G)
        return float(max(rewards_G.mean(), least)) if rewards_G.mean() > 0 else np.inf
    return float(max(rewards_G.std(ddof=1), returns_K.std(ddof=1))) + GROUP_EPSILON


def sum_of_normalized(rewards_GK: np.ndarray, weights_K: np.ndarray) -> np.ndarray:
    """The weighted sum of one group's rewards, each centred and divided by its own deviation in the group."""
    centred_GK = np.where(
        np.ptp(rewards_GK, axis=0) == 0, 0.0, rewards_GK - rewards_GK.mean(axis=0)
    )
    if len(rewards_GK) > 1:
        centred_GK /= rewards_GK.std(axis=0, ddof=1) + GROUP_EPSILON
    total_G: np.ndarray = centred_GK @ weights_K
    return total_G


def batch_scale(total: np.ndarray) -> float:
    """What `normalize = "batch_rewards"` divides by, from the summed moments of all rewards; infinite if all are equal."""
    count = float(total[0])
    _, deviation = batch_mean_and_deviation(total)
    if deviation <= BATCH_EPSILON:
        return np.inf
    return deviation * float(np.sqrt(count / max(count - 1, 1.0))) + GROUP_EPSILON


def moments(values_N: np.ndarray) -> np.ndarray:
    """(count, sum, sum of squares), which ranks add up before `standardize`."""
    return np.array([len(values_N), values_N.sum(), np.square(values_N).sum()], dtype=np.float64)


def batch_mean_and_deviation(total: np.ndarray) -> tuple[float, float]:
    """Mean and population deviation from summed moments; (0, 0) if the count is 0.

    Moments of equal values leave a variance of some 1e-16 of their square, which is rounding and counts as none.
    """
    count, first, second = (float(value) for value in total)
    if count == 0:
        return 0.0, 0.0
    mean, square = first / count, second / count
    variance = square - mean * mean
    return mean, float(np.sqrt(variance)) if variance > 1e-14 * square else 0.0


def standardize(values_N: np.ndarray, mean: float, deviation: float) -> np.ndarray:
    """Normalise over the whole batch; a batch without variance gives zeros."""
    if deviation <= BATCH_EPSILON:
        return np.zeros_like(values_N)
    return (values_N - mean) / (deviation + BATCH_EPSILON)


def overlong_penalties(
    lengths_R: np.ndarray,
    truncated_R: np.ndarray,
    max_tokens_R: np.ndarray,
    settings: AlgorithmSettings,
) -> np.ndarray:
    """The soft overlong penalty of each response, 0 or below.

    The penalty grows linearly over the last tokens before max_tokens and is full for a truncated
    response, so that running into the limit never beats finishing late.
    """
    quarter_R = np.minimum(1024, max_tokens_R // 4)
    window_R = np.minimum(settings.overlong_window or quarter_R, max_tokens_R).clip(min=1)
    excess_R = (lengths_R - (max_tokens_R - window_R)) / window_R
    share_R = np.where(truncated_R, 1.0, np.clip(excess_R, 0.0, 1.0))
    return -settings.overlong_penalty * share_R
