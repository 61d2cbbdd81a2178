"""Estimators of the KL divergence from the log-probs of sampled tokens.

k1 is unbiased but may be negative, k3 is unbiased and never negative. Their gradients as terms of the
loss differ: that of k1 is zero in the mean, that of k2 is the gradient of KL(policy || reference) where
the policy sampled the tokens, that of k3 is the gradient of KL(reference || policy). k3 times the ratio
policy / sampler (`k3_weighted`) has the gradient of KL(policy || reference), whoever sampled.

k3 grows exponentially with the log-ratio, and one token that fell far below the reference would decide a whole
update: it is cut at `K3_BOUND`, where its gradient ends. The gradient of k2 grows with the log-ratio itself, up to
`MAX_LOG_RATIO`, and stays there: a token that the reference finds impossible is still held. A bound on k3_weighted
would leave the gradient of its ratio alone, which has the wrong sign.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.training.algo.ratios import MAX_LOG_RATIO

if TYPE_CHECKING:
    from torch import Tensor


K3_BOUND = 10.0  # reached where the policy gives a token 1/14 of the reference's probability


def estimate(kind: str, logprobs_N: Tensor, reference_N: Tensor) -> Tensor:
    """Estimate KL(policy || reference) at each sampled token; the caller weighs `k3_weighted`."""
    away_N = logprobs_N - reference_N
    if kind == "k1":
        return away_N
    if kind == "k2":
        held_N = away_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).detach()
        return held_N * away_N - held_N.square() / 2
    assert kind in ("k3", "k3_weighted"), kind
    k3_N = (-away_N).clamp(max=MAX_LOG_RATIO).exp() + away_N - 1
    return k3_N.clamp(max=K3_BOUND) if kind == "k3" else k3_N
