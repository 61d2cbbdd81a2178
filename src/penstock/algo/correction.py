"""Importance weights between the policy that sampled and the trainer's policy before the update.

They correct for stale weights and for an engine whose numbers differ from the trainer's. Weights
carry no gradient and never change a denominator, so a split of the batch cannot change them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.algo.method import MAX_LOG_RATIO, sequence_sum
from penstock.algo.settings import AlgorithmSettings

if TYPE_CHECKING:
    from torch import Tensor


def importance_weights(
    proximal_N: Tensor,
    behaviour_N: Tensor,
    sequence_N: Tensor,
    num_sequences: int,
    settings: AlgorithmSettings,
) -> Tensor:
    """The factor on each token's policy loss; all ones where nothing is to be corrected."""
    kind = settings.correction
    log_N = (proximal_N - behaviour_N).detach()
    if kind == "none":
        return log_N.new_ones(log_N.shape)
    if kind.startswith("sequence"):
        log_N = sequence_sum(log_N, sequence_N, num_sequences)[sequence_N]
    weight_N = log_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    if kind.endswith("truncate"):
        return weight_N.clamp(max=settings.correction_cap)
    if kind.endswith("mask"):
        kept_N = (weight_N >= settings.correction_floor) & (weight_N <= settings.correction_cap)
        return weight_N * kept_N
    return weight_N
