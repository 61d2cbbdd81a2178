"""REINFORCE++: no group baseline, advantages normalised over the whole batch, KL in the reward."""

from __future__ import annotations

from penstock.training.algo.method import Algorithm
from penstock.training.algo.settings import AlgorithmSettings


class ReinforcePP(Algorithm):
    defaults = AlgorithmSettings(
        baseline="none",
        normalize="batch",
        aggregation="token",
        kl_in="reward",
        kl_estimator="k1",
    )
