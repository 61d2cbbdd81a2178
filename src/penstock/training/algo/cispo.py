"""CISPO: the clipped ratio is a weight without gradient, so every token keeps its gradient."""

from __future__ import annotations

from penstock.training.algo.method import Algorithm, Surrogate, TokenView
from penstock.training.algo.settings import AlgorithmSettings


class CISPO(Algorithm):
    defaults = AlgorithmSettings(clip_low=1.0, clip_high=4.0, aggregation="token", kl_in="none")

    def surrogate(self, view: TokenView) -> Surrogate:
        ratio_N = self.log_ratio(view).exp().detach()
        weight_N = ratio_N.clamp(1 - self.settings.clip_low, 1 + self.settings.clip_high)
        loss_N = -weight_N * view.advantages_N * view.logprobs_N
        return Surrogate(loss_N=loss_N, ratio_N=ratio_N, clipped_N=weight_N != ratio_N)
