"""The base of every algorithm: an advantage for each rollout and a loss for each token.

A method overrides `defaults` and, where its maths differs, `log_ratio` or `surrogate`. Tensors come
in flat, one entry per trained token of whole sequences; how they were packed, split over ranks or
weighted into one number is the trainer's business and cannot be seen from here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from penstock.algo.settings import AlgorithmSettings

if TYPE_CHECKING:
    from torch import Tensor

MAX_LOG_RATIO = 20.0  # exp of it is 5e8: beyond any clip, yet finite


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenView:
    """The trained tokens of some whole sequences, as the loss sees them."""

    logprobs_N: Tensor  # of the policy that is trained; carries the gradient
    anchor_N: Tensor  # what the ratio is taken against: behaviour or proximal policy
    advantages_N: Tensor
    sequence_N: Tensor  # int64: which sequence each token belongs to
    num_sequences: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Surrogate:
    """The policy loss of each token, and what the metrics want to know of it."""

    loss_N: Tensor
    ratio_N: Tensor
    clipped_N: Tensor  # bool: the clip took this token's gradient (or bounded its weight)


class Algorithm:
    """GRPO's objective; the other methods say how they differ."""

    defaults: ClassVar[AlgorithmSettings] = AlgorithmSettings()

    def __init__(self, settings: AlgorithmSettings) -> None:
        self.settings = settings

    def log_ratio(self, view: TokenView) -> Tensor:
        """log of (policy / anchor), one per token."""
        return (view.logprobs_N - view.anchor_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)

    def surrogate(self, view: TokenView) -> Surrogate:
        """The clipped policy-gradient loss, with an optional second bound (dual clip)."""
        advantages_N = view.advantages_N
        ratio_N = self.log_ratio(view).exp()
        bounded_N = ratio_N.clamp(1 - self.settings.clip_low, 1 + self.settings.clip_high)
        free_N, held_N = ratio_N * advantages_N, bounded_N * advantages_N
        objective_N = free_N.minimum(held_N)
        clipped_N = held_N.detach() < free_N.detach()
        if self.settings.dual_clip is not None:
            floor_N = self.settings.dual_clip * advantages_N
            dual_N = (advantages_N < 0) & (objective_N.detach() < floor_N)
            objective_N = objective_N.where(~dual_N, floor_N)
            clipped_N = clipped_N | dual_N
        return Surrogate(loss_N=-objective_N, ratio_N=ratio_N.detach(), clipped_N=clipped_N)


def sequence_sum(values_N: Tensor, sequence_N: Tensor, num_sequences: int) -> Tensor:
    """Sum over the tokens of each sequence."""
    return values_N.new_zeros(num_sequences).index_add(0, sequence_N, values_N)


def sequence_mean(values_N: Tensor, sequence_N: Tensor, num_sequences: int) -> Tensor:
    """Mean over the tokens of each sequence."""
    counts_S = sequence_sum(values_N.detach().new_ones(len(values_N)), sequence_N, num_sequences)
    return sequence_sum(values_N, sequence_N, num_sequences) / counts_S.clamp(min=1)
