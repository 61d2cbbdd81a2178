"""What an algorithm is made of, with every value concrete, and the checks before a run starts.

The [algorithm] table names a method and may override any of its parts; `resolve` lays those fields
over the method's own defaults. Used by the control plane (dynamic sampling, group sizes) and by the
consumer alike, so it imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Literal

from penstock import plugins
from penstock.algo import ALGORITHMS
from penstock.config import AlgorithmConfig, Config
from penstock.errors import UserError

if TYPE_CHECKING:
    from penstock.algo.method import Algorithm
    from penstock.types import Rollout

Baseline = Literal["group_mean", "leave_one_out", "batch_mean", "none"]
CorrectionKind = Literal[
    "none", "token", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmSettings:
    """One algorithm, complete. The defaults of this record are those of GRPO."""

    name: str = ""
    baseline: Baseline = "group_mean"  # what is taken from a reward to make an advantage
    normalize: Literal["group", "batch", "none"] = "group"  # whose deviation divides it
    clip_low: float = 0.2  # the ratio is clipped to 1 - this ...
    clip_high: float = 0.2  # ... and 1 + this
    dual_clip: float | None = None  # bound of the loss for negative advantages
    aggregation: Literal["token", "sequence", "constant"] = "sequence"
    kl_in: Literal["loss", "reward", "none"] = "loss"
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    kl_beta: float = 0.0
    mask_truncated: bool = False  # responses cut at max_tokens leave the loss
    filter_groups: bool = False  # dynamic sampling: refuse groups without a learning signal
    filter_low: float = 0.01  # accuracies a group must lie strictly between
    filter_high: float = 0.99
    overlong_penalty: float = 0.0  # reward taken from responses close to max_tokens
    decoupled: bool = False  # the ratio is against the trainer's own log-probs before the update
    correction: CorrectionKind = "none"  # importance weight of behaviour policy against trainer
    correction_cap: float = 2.0
    correction_floor: float = 0.0

    @property
    def group_relative(self) -> bool:
        """The advantage compares rollouts of one prompt, so a group needs at least two."""
        return self.baseline in ("group_mean", "leave_one_out") or self.normalize == "group"

    @property
    def needs_reference(self) -> bool:
        return self.kl_beta > 0 and self.kl_in != "none"

    @property
    def kl_in_loss(self) -> bool:
        return self.needs_reference and self.kl_in == "loss"

    @property
    def kl_in_reward(self) -> bool:
        return self.needs_reference and self.kl_in == "reward"


_OVERRIDES = frozenset(field.name for field in fields(AlgorithmSettings)) & frozenset(
    AlgorithmConfig.model_fields
) - {"name", "decoupled", "correction"}


def resolve(config: AlgorithmConfig) -> AlgorithmSettings:
    """The named algorithm's defaults with the config's own fields over them."""
    method = method_class(config.name)
    given = {
        name: value for name in _OVERRIDES if (value := getattr(config, name, None)) is not None
    }
    # A correction weighs the trainer's policy against the behaviour policy, so the ratio that is
    # left to clip is that of the update alone: every correction is a decoupled objective.
    kind: CorrectionKind = config.correction.kind
    decoupled = config.decoupled or kind != "none"
    return replace(
        method.defaults,
        name=config.name,
        decoupled=decoupled,
        correction="token" if decoupled and kind == "none" else kind,
        correction_cap=config.correction.cap,
        correction_floor=config.correction.floor,
        **given,
    )


def method_class(name: str) -> type[Algorithm]:
    """The class behind an algorithm's name."""
    method = plugins.load("algorithm.name", name, ALGORITHMS)
    if not isinstance(getattr(method, "defaults", None), AlgorithmSettings):
        raise UserError(
            f"algorithm.name: got {name!r}, allowed: a class with `defaults` (AlgorithmSettings), "
            "see penstock.algo.method.Algorithm"
        )
    return method


def keep_group(rollouts: Sequence[Rollout], settings: AlgorithmSettings) -> bool:
    """Dynamic sampling: is there anything to learn from this finished group?

    Judged by mean accuracy where every answer was judged, else by whether the rewards differ.
    """
    if not settings.filter_groups:
        return True
    scores = [rollout.score for rollout in rollouts if rollout.score is not None]
    verdicts = [score.answer_ok for score in scores if score.answer_ok is not None]
    if len(verdicts) == len(rollouts):
        return settings.filter_low < sum(verdicts) / len(verdicts) < settings.filter_high
    return len({score.value for score in scores}) > 1


def check(config: Config) -> None:
    """Refuse what cannot be trained, before any weight is loaded."""
    settings = resolve(config.algorithm)
    for task in config.tasks:
        generations = config.task_sampling(task).num_generations
        if settings.group_relative and generations < 2:
            raise UserError(
                f"tasks.{task}: sampling.num_generations got {generations} with algorithm "
                f"{settings.name}, allowed: at least 2 (it compares the rollouts of one prompt)"
            )
    _check_kl(config, settings)
    _check_splits(config)


def _check_kl(config: Config, settings: AlgorithmSettings) -> None:
    if settings.kl_beta > 0 and settings.kl_in == "none":
        raise UserError(
            f"algorithm.kl_beta: got {settings.kl_beta} with kl_in none, "
            "allowed: 0, or kl_in loss | reward"
        )
    if config.train.reference and not settings.needs_reference:
        raise UserError(
            f"train.reference: got {config.train.reference!r}, allowed: empty unless "
            f"algorithm.kl_beta > 0 (it is {settings.kl_beta} for {settings.name})"
        )


def _check_splits(config: Config) -> None:
    train, ranks = config.train, config.launch.num_consumers
    if train.groups_per_step % (train.mini_batches * ranks):
        raise UserError(
            f"train.mini_batches x launch.num_consumers: got {train.mini_batches} x {ranks}, "
            f"allowed: a divisor of train.groups_per_step = {train.groups_per_step}"
        )
    if train.schedule != "constant" and not (train.steps or train.episodes):
        raise UserError(
            f"train.schedule: got {train.schedule!r} without train.steps or train.episodes, "
            "allowed: constant, or a run with an end"
        )
