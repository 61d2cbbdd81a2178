"""From rewards to advantages: baselines, normalisation, overlong penalty. Numpy only.

Group baselines need only the rewards of the group. Normalisation over the whole batch takes two
functions, `moments` and `standardize`, so that ranks can add up their moments in between.
"""

from __future__ import annotations

import numpy as np

from penstock.training.algo.settings import AlgorithmSettings

GROUP_EPSILON = 1e-4
BATCH_EPSILON = 1e-8
OVERLONG_WINDOW = 1024  # penalised tokens before max_tokens, at most a quarter of it


def group_advantages(rewards_G: np.ndarray, settings: AlgorithmSettings) -> np.ndarray:
    """Subtract the baseline from one group's rewards and, if configured, divide by their deviation.

    With a group baseline, equal rewards and a group of one give zeros, never NaN.
    """
    rewards_G = np.asarray(rewards_G, dtype=np.float64)
    size = len(rewards_G)
    if settings.baseline in ("group_mean", "leave_one_out"):
        if np.ptp(rewards_G) == 0:
            return np.zeros(size)
        centred_G = rewards_G - rewards_G.mean()
        if settings.baseline == "leave_one_out":
            centred_G *= size / (size - 1)
    else:
        centred_G = rewards_G.copy()
    if settings.normalize == "group" and size > 1:
        centred_G /= rewards_G.std(ddof=1) + GROUP_EPSILON
    return centred_G


def group_scale(rewards_G: np.ndarray, settings: AlgorithmSettings) -> float:
    """What `group_advantages` divides by; infinite for equal rewards, which teach nothing."""
    if settings.normalize != "group" or len(rewards_G) < 2:
        return 1.0
    deviation = float(np.asarray(rewards_G, dtype=np.float64).std(ddof=1))
    return deviation + GROUP_EPSILON if np.ptp(rewards_G) else np.inf


def moments(values_N: np.ndarray) -> np.ndarray:
    """(count, sum, sum of squares), which ranks add up before `standardize`."""
    return np.array([len(values_N), values_N.sum(), np.square(values_N).sum()], dtype=np.float64)


def batch_mean_and_deviation(total: np.ndarray) -> tuple[float, float]:
    """Mean and population deviation from summed moments; (0, 0) if the count is 0."""
    count, first, second = (float(value) for value in total)
    if count == 0:
        return 0.0, 0.0
    mean = first / count
    return mean, float(np.sqrt(max(second / count - mean * mean, 0.0)))


def standardize(values_N: np.ndarray, mean: float, deviation: float) -> np.ndarray:
    """Normalise over the whole batch; a batch without variance gives zeros."""
    if deviation <= BATCH_EPSILON:
        return np.zeros_like(values_N)
    return (values_N - mean) / (deviation + BATCH_EPSILON)


def overlong_penalties(
    lengths_R: np.ndarray, truncated_R: np.ndarray, max_tokens_R: np.ndarray, weight: float
) -> np.ndarray:
    """The soft overlong penalty of each response, 0 or below.

    The penalty grows linearly over the last tokens before max_tokens and is `weight` for a truncated
    response, so that running into the limit never beats finishing late.
    """
    window_R = np.maximum(np.minimum(OVERLONG_WINDOW, max_tokens_R // 4), 1)
    excess_R = (lengths_R - (max_tokens_R - window_R)) / window_R
    share_R = np.where(truncated_R, 1.0, np.clip(excess_R, 0.0, 1.0))
    return -weight * share_R
