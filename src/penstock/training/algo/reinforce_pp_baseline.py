"""REINFORCE++ with a group baseline: centred in the group, normalised over the whole batch."""

from __future__ import annotations

from penstock.training.algo.method import Algorithm
from penstock.training.algo.settings import AlgorithmSettings


class ReinforcePPBaseline(Algorithm):
    defaults = AlgorithmSettings(
        baseline="group_mean",
        normalize="batch",
        aggregation="token",
        kl_in="loss",
        kl_estimator="k2",
    )
