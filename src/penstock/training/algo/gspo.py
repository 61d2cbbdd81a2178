"""GSPO: one ratio per sequence, the geometric mean of its token ratios, clipped very tightly."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.training.algo.method import Algorithm, TokenView, sequence_mean
from penstock.training.algo.settings import AlgorithmSettings

if TYPE_CHECKING:
    from torch import Tensor


class GSPO(Algorithm):
    defaults = AlgorithmSettings(
        clip_low=3e-4,
        clip_high=4e-4,
        aggregation="sequence",
        kl_in="none",
        correction="token_truncate",  # noise between engine and trainer alone would pass the clip
    )

    joins_tokens = True

    def log_ratio(self, view: TokenView) -> Tensor:
        token_N = super().log_ratio(view)
        return sequence_mean(token_N, view.sequence_N, view.num_sequences)[view.sequence_N]
