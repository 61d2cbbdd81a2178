"""DAPO: clip-higher, token-level loss, dynamic sampling, soft overlong penalty, no KL."""

from __future__ import annotations

from penstock.training.algo.method import Algorithm
from penstock.training.algo.settings import AlgorithmSettings


class DAPO(Algorithm):
    defaults = AlgorithmSettings(
        clip_low=0.2,
        clip_high=0.28,
        aggregation="token",
        kl_in="none",
        mask_truncated=True,
        filter_groups=True,
        overlong_penalty=1.0,
    )
