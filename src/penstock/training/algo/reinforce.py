"""Plain REINFORCE: log-probability times reward, no ratio, no clip, no baseline."""

from __future__ import annotations

from penstock.training.algo.method import Algorithm, Surrogate, TokenView
from penstock.training.algo.settings import AlgorithmSettings


class Reinforce(Algorithm):
    defaults = AlgorithmSettings(
        baseline="none", normalize="none", aggregation="token", kl_in="none"
    )

    def surrogate(self, view: TokenView) -> Surrogate:
        ratio_N = self.log_ratio(view).exp().detach()
        loss_N = -view.advantages_N * view.logprobs_N
        return Surrogate(loss_N=loss_N, ratio_N=ratio_N, clipped_N=ratio_N != ratio_N)
