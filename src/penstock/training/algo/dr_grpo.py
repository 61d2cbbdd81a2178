"""Dr. GRPO: no division by the group's deviation, and a constant length in the denominator."""

from __future__ import annotations

from penstock.training.algo.method import Algorithm
from penstock.training.algo.settings import AlgorithmSettings


class DrGRPO(Algorithm):
    defaults = AlgorithmSettings(normalize="none", aggregation="constant", kl_in="none")
