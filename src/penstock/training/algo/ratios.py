"""Ratios of two policies on the sampled tokens, and the importance weights that are made of them.

The weights compare the trainer's policy before the update with the policy that sampled. They correct for
stale weights and for engines whose arithmetic differs from the trainer's. They carry no gradient and
enter no denominator, so no split of the batch changes them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.training.algo.settings import AlgorithmSettings

if TYPE_CHECKING:
    from torch import Tensor

MAX_LOG_RATIO = 20.0  # its exp is 5e8: above any clip, yet finite


def sequence_sum(values_N: Tensor, sequence_N: Tensor, num_sequences: int) -> Tensor:
    """The sum over the tokens of each sequence."""
    return values_N.new_zeros(num_sequences).index_add(0, sequence_N, values_N)


def sequence_mean(values_N: Tensor, sequence_N: Tensor, num_sequences: int) -> Tensor:
    """The mean over the tokens of each sequence."""
    counts_S = sequence_sum(values_N.detach().new_ones(len(values_N)), sequence_N, num_sequences)
    return sequence_sum(values_N, sequence_N, num_sequences) / counts_S.clamp(min=1)


def importance_weights(
    proximal_N: Tensor,
    behaviour_N: Tensor,
    sequence_N: Tensor,
    num_sequences: int,
    settings: AlgorithmSettings,
) -> Tensor:
    """The factor on each token's policy loss; all ones for correction `none`."""
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
