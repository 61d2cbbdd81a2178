"""Estimators of the KL divergence from the log-probs of sampled tokens.

k1 is unbiased but may be negative, k2 has the right gradient near the reference, k3 is unbiased and
never negative. As a term of the loss k1 has no useful gradient (its mean is zero).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.algo.method import MAX_LOG_RATIO

if TYPE_CHECKING:
    from torch import Tensor


def estimate(kind: str, logprobs_N: Tensor, reference_N: Tensor) -> Tensor:
    """Estimate KL(policy || reference) at each sampled token."""
    log_ratio_N = (reference_N - logprobs_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if kind == "k1":
        return -log_ratio_N
    if kind == "k2":
        return log_ratio_N.square() / 2
    assert kind == "k3", kind
    return log_ratio_N.exp() - log_ratio_N - 1
