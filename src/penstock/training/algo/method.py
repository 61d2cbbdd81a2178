"""The base of every algorithm, and how a config chooses one.

A method overrides `defaults` and, if its maths differs, `log_ratio` or `surrogate`. Tensors come in
flat, one entry per trained token of whole sequences; packing, ranks and the weighted sum over tokens
are the trainer's part. Imports no torch: the control plane reads settings too.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, ClassVar

from penstock.config import AlgorithmConfig, Config, plugins
from penstock.errors import UserError
from penstock.training.algo import ALGORITHMS
from penstock.training.algo.settings import AlgorithmSettings, CorrectionKind

if TYPE_CHECKING:
    from torch import Tensor

MAX_LOG_RATIO = 20.0  # its exp is 5e8: above any clip, yet finite

_OVERRIDES = frozenset(field.name for field in fields(AlgorithmSettings)) & frozenset(
    AlgorithmConfig.model_fields
) - {"name", "decoupled", "correction"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenView:
    """The trained tokens of some whole sequences: the inputs of the loss."""

    logprobs_N: Tensor  # under the policy that is trained; carry the gradient
    anchor_N: Tensor  # log-probs of the ratio's denominator: behaviour or proximal policy
    advantages_N: Tensor
    sequence_N: Tensor  # int64: which rollout each token belongs to
    num_sequences: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Surrogate:
    """The policy loss of each token, and what the metrics report of it."""

    loss_N: Tensor
    ratio_N: Tensor
    clipped_N: Tensor  # bool: the clip removed this token's gradient or bounded its weight


class Algorithm:
    """GRPO's objective; other methods override what differs."""

    defaults: ClassVar[AlgorithmSettings] = AlgorithmSettings()
    joins_tokens: ClassVar[bool] = False  # a token's loss depends on its rollout's other tokens

    def __init__(self, settings: AlgorithmSettings) -> None:
        self.settings = settings

    def log_ratio(self, view: TokenView) -> Tensor:
        """Return log(policy / anchor) of each token."""
        return (view.logprobs_N - view.anchor_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)

    def surrogate(self, view: TokenView) -> Surrogate:
        """Return the clipped policy-gradient loss, with an optional second bound (dual clip)."""
        advantages_N = view.advantages_N
        ratio_N = self.log_ratio(view).exp()
        bounded_N = ratio_N.clamp(1 - self.settings.clip_low, 1 + self.settings.clip_high)
        free_N, held_N = ratio_N * advantages_N, bounded_N * advantages_N
        objective_N = free_N.minimum(held_N)
        clipped_N = held_N.detach() < free_N.detach()
        if self.settings.dual_clip:
            floor_N = self.settings.dual_clip * advantages_N
            dual_N = (advantages_N < 0) & (objective_N.detach() < floor_N)
            objective_N = objective_N.where(~dual_N, floor_N)
            clipped_N = clipped_N | dual_N
        return Surrogate(loss_N=-objective_N, ratio_N=ratio_N.detach(), clipped_N=clipped_N)


def sequence_sum(values_N: Tensor, sequence_N: Tensor, num_sequences: int) -> Tensor:
    """Return the sum over the tokens of each sequence."""
    return values_N.new_zeros(num_sequences).index_add(0, sequence_N, values_N)


def sequence_mean(values_N: Tensor, sequence_N: Tensor, num_sequences: int) -> Tensor:
    """Return the mean over the tokens of each sequence."""
    counts_S = sequence_sum(values_N.detach().new_ones(len(values_N)), sequence_N, num_sequences)
    return sequence_sum(values_N, sequence_N, num_sequences) / counts_S.clamp(min=1)


def algorithm_class(name: str) -> type[Algorithm]:
    """Return the class that `algorithm.name` names."""
    method = plugins.load("algorithm.name", name, ALGORITHMS)
    if not isinstance(getattr(method, "defaults", None), AlgorithmSettings):
        raise UserError(
            f"algorithm.name: got {name!r}, allowed: a class with `defaults` (AlgorithmSettings), "
            "see penstock.training.algo.method.Algorithm"
        )
    return method


def run_settings(config: Config) -> AlgorithmSettings:
    """Return the settings of a run: those of its algorithm, for its engine and its sampling.

    Only Penstock's own engine computes as the trainer does, and only while every token may be sampled.
    """
    cuts = any(config.task_sampling(task).cuts_tokens for task in config.tasks)
    own = all(engine.name == "transformers" for engine in config.engine_kinds())
    exact = own and not cuts
    return resolve_settings(config.algorithm, exact_sampling=exact)


def resolve_settings(config: AlgorithmConfig, *, exact_sampling: bool = True) -> AlgorithmSettings:
    """Return the named algorithm's defaults, overridden by the fields that the config sets."""
    given = {
        name: value for name in _OVERRIDES if (value := getattr(config, name, None)) is not None
    }
    defaults = algorithm_class(config.name).defaults
    kind: CorrectionKind = "none"
    if config.correction.kind != "auto":
        kind = config.correction.kind
    elif defaults.correction != "none":
        kind = defaults.correction
    elif config.decoupled or not exact_sampling:
        kind = "token_truncate"
    # A correction weighs the trainer's policy against the behaviour policy, so the ratio that is
    # left to clip is that of the update alone: every correction is a decoupled objective.
    decoupled = config.decoupled or kind != "none"
    return replace(
        defaults,
        name=config.name,
        decoupled=decoupled,
        correction="token" if decoupled and kind == "none" else kind,
        correction_cap=config.correction.cap,
        correction_floor=config.correction.floor,
        **given,
    )


def check_algorithm(config: Config) -> None:
    """Refuse settings that cannot be trained, before any weight is loaded."""
    settings = run_settings(config)
    for task in config.tasks:
        generations = config.task_sampling(task).num_generations
        if settings.group_relative and generations < 2:
            raise UserError(
                f"tasks.{task}: sampling.num_generations got {generations} with algorithm "
                f"{settings.name}, allowed: at least 2 (it compares the rollouts of one prompt)"
            )
    if settings.kl_beta > 0 and settings.kl_in == "none":
        raise UserError(
            f"algorithm.kl_beta: got {settings.kl_beta} with kl_in none, "
            "allowed: 0, or kl_in loss | reward"
        )
    if settings.kl_estimator == "k3_weighted" and settings.kl_in_reward:
        raise UserError(
            "algorithm.kl_estimator: got k3_weighted with kl_in reward, allowed: k1, k2, k3 (only a term "
            "of the loss has a gradient to weigh), or kl_in loss"
        )
    train = config.train
    ranks = config.launch.num_consumers // train.parallel.copies
    if train.reference and not settings.needs_reference:
        raise UserError(
            f"train.reference: got {train.reference!r}, allowed: empty unless "
            f"algorithm.kl_beta > 0 (it is {settings.kl_beta} for {settings.name})"
        )
    if train.groups_per_step % (train.mini_batches * ranks):
        raise UserError(
            f"train.mini_batches x data-parallel ranks: got {train.mini_batches} x {ranks}, "
            f"allowed: a divisor of train.groups_per_step = {train.groups_per_step}"
        )
    if train.schedule != "constant" and not (train.steps or train.episodes):
        raise UserError(
            f"train.schedule: got {train.schedule!r} without train.steps or train.episodes, "
            "allowed: constant, or one of these two keys"
        )
