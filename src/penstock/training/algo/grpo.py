"""GRPO: rewards normalised within the group, clipped ratio, mean over all tokens.

`aggregation = "sequence"` is the mean over samples of token means, as the paper has it (docs/algorithms.md).
"""

from __future__ import annotations

from penstock.training.algo.method import Algorithm
from penstock.training.algo.settings import AlgorithmSettings


class GRPO(Algorithm):
    defaults = AlgorithmSettings(kl_in="loss", kl_estimator="k3", kl_beta=0.0)
