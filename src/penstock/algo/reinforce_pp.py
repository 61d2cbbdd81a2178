"""REINFORCE++: no group baseline, advantages normalised over the whole batch, KL in the reward."""

from __future__ import annotations

from penstock.algo.method import Algorithm
from penstock.algo.settings import AlgorithmSettings


class ReinforcePP(Algorithm):
    defaults = AlgorithmSettings(
        baseline="none",
        normalize="batch",
        aggregation="token",
        kl_in="reward",
        kl_estimator="k1",
    )
