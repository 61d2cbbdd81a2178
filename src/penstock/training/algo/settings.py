"""The settings of an algorithm, with every value concrete.

`method.py` makes them from a config. The control plane (dynamic sampling, group sizes) and the
consumer both read them, so this file imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from penstock.types import Rollout

Baseline = Literal["group_mean", "leave_one_out", "batch_mean", "none"]
Normalize = Literal["group", "mean", "batch", "batch_rewards", "none"]
Divergence = Literal["sampled", "forward", "reverse", "jsd"]
CorrectionKind = Literal[
    "none", "token", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmSettings:
    """All settings of one algorithm. The defaults are those of GRPO."""

    name: str = ""
    weight: float = 1.0  # of its loss beside those of other tasks' algorithms
    imitates: bool = False  # the tokens are demonstrations: sampled by nobody, right by assumption
    baseline: Baseline = "group_mean"  # baseline that is subtracted from a reward
    normalize: Normalize = "group"  # whose deviation divides rewards; mean: the group's mean does
    normalizes_each_reward: bool = False  # in its group, before the rewards of a task are added
    has_critic: bool = False  # a value model is the baseline: advantages by GAE
    gamma: float = 1.0  # discount of the rewards of later tokens
    gae_lambda: float = 1.0  # 1: the whole return counts; 0: the next token's value alone
    value_clip: float = 0.5  # most that a value may move from that before the batch; 0: off
    clip_low: float = 0.2  # the ratio is clipped to [1 - clip_low, ...
    clip_high: float = 0.2  # ... 1 + clip_high]
    dual_clip: float = 3.0  # the loss of a negative advantage is at most this times |A|; 0: off
    aggregation: Literal["token", "sequence", "constant"] = "token"
    kl_in: Literal["loss", "reward", "none"] = "loss"
    kl_estimator: Literal["k1", "k2", "k3", "k3_weighted"] = "k3"
    kl_beta: float = 0.0
    kl_target: float = 0.0  # kl_beta is adapted so that the mean KL stays near this; 0: it is not
    entropy_beta: float = 0.0  # the mean entropy, times this, is subtracted from the loss
    entropy_target: float = 0.0  # entropy_beta is adapted to this mean entropy; 0: it is not
    distills: bool = False  # rewards count for nothing: the teacher is the only one who teaches
    teacher: str = ""  # one of [teachers]
    teacher_beta: float = 0.0  # factor of the divergence from the teacher
    divergence: Divergence = "sampled"
    mask_truncated: bool = False  # leave responses cut at max_tokens out of the loss
    filter_groups: bool = False  # dynamic sampling: refuse groups without a learning signal
    filter_range: tuple[float, float] = (0.01, 0.99)  # kept: accuracy strictly between these
    overlong_penalty: float = 0.0  # subtracted from the reward of responses close to max_tokens
    overlong_window: int = 0  # penalised tokens before max_tokens; 0: min(1024, a quarter of it)
    decoupled: bool = False  # ratio against the trainer's own log-probs before the update
    correction: CorrectionKind = "none"  # importance weight: trainer against behaviour policy
    correction_cap: float = 2.0
    correction_floor: float = 0.0
    newest_from_trainer: bool = (
        False  # tokens of the newest weights: old log-probs are the trainer's
    )

    @property
    def group_relative(self) -> bool:
        """Whether the baseline is that of the rollouts of one prompt."""
        return self.baseline in ("group_mean", "leave_one_out")

    @property
    def needs_groups(self) -> bool:
        """Whether the rollouts of one prompt are compared, so that there must be two."""
        return self.group_relative or self.normalizes_each_reward

    @property
    def needs_reference(self) -> bool:
        return self.kl_beta > 0 and self.kl_in != "none"

    @property
    def needs_teacher(self) -> bool:
        return bool(self.teacher) and self.teacher_beta > 0

    @property
    def compares_vocabulary(self) -> bool:
        """Whether the divergence from the teacher is that of whole distributions."""
        return self.needs_teacher and self.divergence != "sampled"

    @property
    def teaches_every_token(self) -> bool:
        """Whether tokens without an advantage have a gradient, too."""
        return self.kl_in_loss or self.needs_teacher or self.entropy_beta > 0

    @property
    def kl_in_loss(self) -> bool:
        return self.needs_reference and self.kl_in == "loss"

    @property
    def kl_in_reward(self) -> bool:
        return self.needs_reference and self.kl_in == "reward"


def keep_group(rollouts: Sequence[Rollout], settings: AlgorithmSettings) -> bool:
    """Whether a finished group has a learning signal (dynamic sampling).

    If every answer has a verdict, the mean accuracy decides; otherwise, whether the rewards differ.
    """
    if not settings.filter_groups:
        return True
    scores = [rollout.score for rollout in rollouts if rollout.score is not None]
    verdicts = [score.answer_ok for score in scores if score.answer_ok is not None]
    if len(verdicts) == len(rollouts):
        low, high = settings.filter_range
        return low < sum(verdicts) / len(verdicts) < high
    return len({score.value for score in scores}) > 1
