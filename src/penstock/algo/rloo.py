"""RLOO: the baseline of a rollout is the mean reward of the other rollouts in its group."""

from __future__ import annotations

from penstock.algo.method import Algorithm
from penstock.algo.settings import AlgorithmSettings


class RLOO(Algorithm):
    defaults = AlgorithmSettings(
        baseline="leave_one_out", normalize="none", kl_in="loss", kl_estimator="k3"
    )
