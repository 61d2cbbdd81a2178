"""RLOO: the whole completion is one action, and its baseline is the mean reward of the others.

The ratio is that of the whole response, the product of its token ratios, so a response weighs the same
whatever its length. The KL to the reference is taken from the reward of the response.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.training.algo.method import MAX_LOG_RATIO, Algorithm, TokenView, sequence_sum
from penstock.training.algo.settings import AlgorithmSettings

if TYPE_CHECKING:
    from torch import Tensor


class RLOO(Algorithm):
    defaults = AlgorithmSettings(
        baseline="leave_one_out",
        normalize="none",
        aggregation="sequence",  # of equal token losses: each is the loss of the whole response
        kl_in="reward",
        kl_estimator="k1",
        correction="sequence_truncate",  # one action, one weight
    )

    def log_ratio(self, view: TokenView) -> Tensor:
        token_N = view.logprobs_N - view.anchor_N
        total_S = sequence_sum(token_N, view.sequence_N, view.num_sequences)
        return total_S.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)[view.sequence_N]
