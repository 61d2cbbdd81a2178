"""The algorithms: their base, the built-in methods, and how a config chooses one.

A method is a class that overrides `defaults` and, if its maths differs, `log_ratio` or `surrogate`.
Tensors come in flat, one entry per trained token of whole sequences; packing, ranks and the weighted sum
over tokens are the trainer's part. Imports no torch: the control plane reads settings too.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, ClassVar

from penstock.config import AlgorithmConfig, Config, plugins
from penstock.errors import UserError
from penstock.training.algo import ALGORITHMS
from penstock.training.algo.ratios import MAX_LOG_RATIO, sequence_mean, sequence_sum
from penstock.training.algo.settings import AlgorithmSettings, CorrectionKind

if TYPE_CHECKING:
    from torch import Tensor

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

    def __init__(self, settings: AlgorithmSettings) -> None:
        self.settings = settings

    def log_ratio(self, view: TokenView) -> Tensor:
        """log(policy / anchor) of each token."""
        return (view.logprobs_N - view.anchor_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)

    def surrogate(self, view: TokenView) -> Surrogate:
        """The clipped policy-gradient loss, with an optional second bound (dual clip)."""
        advantages_N = view.advantages_N
        ratio_N = self.log_ratio(view).exp()
        bounded_N = ratio_N.clamp(1 - self.settings.clip_low, 1 + self.settings.clip_high)
        free_N, held_N = ratio_N * advantages_N, bounded_N * advantages_N
        objective_N = free_N.minimum(held_N)
        clipped_N = held_N.detach() < free_N.detach()
        return self.bounded(objective_N, advantages_N, ratio_N.detach(), clipped_N)

    def bounded(
        self, objective_N: Tensor, advantages_N: Tensor, ratio_N: Tensor, clipped_N: Tensor
    ) -> Surrogate:
        """The loss of an objective, which a negative advantage lowers by at most dual_clip times itself."""
        if self.settings.dual_clip:
            floor_N = self.settings.dual_clip * advantages_N
            dual_N = (advantages_N < 0) & (objective_N.detach() < floor_N)
            objective_N = objective_N.where(~dual_N, floor_N)
            clipped_N = clipped_N | dual_N
        return Surrogate(loss_N=-objective_N, ratio_N=ratio_N, clipped_N=clipped_N)


class GRPO(Algorithm):
    """GRPO: rewards normalised within the group, clipped ratio, mean over all tokens.

    `aggregation = "sequence"` is the mean over samples of token means, as the paper has it (docs/algorithms.md).
    """

    defaults = AlgorithmSettings(kl_in="loss", kl_estimator="k3", kl_beta=0.0)


class DAPO(Algorithm):
    """DAPO: clip-higher, token-level loss, dynamic sampling, soft overlong penalty, no KL."""

    defaults = AlgorithmSettings(
        clip_low=0.2,
        clip_high=0.28,
        aggregation="token",
        kl_in="none",
        mask_truncated=True,
        filter_groups=True,
        overlong_penalty=1.0,
    )


class DrGRPO(Algorithm):
    """Dr. GRPO: no division by the group's deviation, and a constant length in the denominator."""

    defaults = AlgorithmSettings(normalize="none", aggregation="constant", kl_in="none")


class RLOO(Algorithm):
    """RLOO: the whole completion is one action, and its baseline is the mean reward of the others.

    The ratio is that of the whole response, the product of its token ratios, so a response weighs the same
    whatever its length. The KL to the reference is taken from the reward of the response.
    """

    defaults = AlgorithmSettings(
        baseline="leave_one_out",
        normalize="none",
        aggregation="sequence",  # of equal token losses: each is the loss of the whole response
        kl_in="reward",
        kl_estimator="k1",
        correction="sequence_truncate",  # one action, one weight
    )

    def log_ratio(self, view: TokenView) -> Tensor:
        token_N = view.logprobs_N - view.anchor_N
        total_S = sequence_sum(token_N, view.sequence_N, view.num_sequences)
        return total_S.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)[view.sequence_N]


class ReinforcePP(Algorithm):
    """REINFORCE++: no group baseline, advantages normalised over the whole batch, KL in the reward."""

    defaults = AlgorithmSettings(
        baseline="none",
        normalize="batch",
        aggregation="token",
        kl_in="reward",
        kl_estimator="k1",
    )


class PPO(Algorithm):
    """PPO: a value model of its own is the baseline, advantages by GAE, KL in the reward of each token."""

    defaults = AlgorithmSettings(
        has_critic=True,
        baseline="none",
        normalize="batch",
        aggregation="token",
        kl_in="reward",
        kl_estimator="k1",
    )


class ReinforcePPBaseline(Algorithm):
    """REINFORCE++ with a group baseline: centred in the group, normalised over the whole batch."""

    defaults = AlgorithmSettings(
        baseline="group_mean",
        normalize="batch",
        aggregation="token",
        kl_in="loss",
        kl_estimator="k2",
    )


class GSPO(Algorithm):
    """GSPO: one ratio per sequence, the geometric mean of its token ratios, clipped very tightly."""

    defaults = AlgorithmSettings(
        clip_low=3e-4,
        clip_high=4e-4,
        aggregation="sequence",
        kl_in="none",
        correction="token_truncate",  # noise between engine and trainer alone would pass the clip
    )

    def log_ratio(self, view: TokenView) -> Tensor:
        token_N = super().log_ratio(view)
        return sequence_mean(token_N, view.sequence_N, view.num_sequences)[view.sequence_N]


class CISPO(Algorithm):
    """CISPO: the clipped ratio is a weight without gradient, so every token keeps its gradient."""

    defaults = AlgorithmSettings(clip_low=1.0, clip_high=4.0, aggregation="token", kl_in="none")

    def surrogate(self, view: TokenView) -> Surrogate:
        ratio_N = self.log_ratio(view).exp().detach()
        weight_N = ratio_N.clamp(1 - self.settings.clip_low, 1 + self.settings.clip_high)
        loss_N = -weight_N * view.advantages_N * view.logprobs_N
        return Surrogate(loss_N=loss_N, ratio_N=ratio_N, clipped_N=weight_N != ratio_N)


class SAPO(Algorithm):
    """SAPO: a smooth gate in the place of the clip, 4 / t sigmoid(t (ratio - 1)), whose slope at 1 is 1.

    Tokens far from the sampling policy fade out, those of a negative advantage a little sooner.
    """

    defaults = AlgorithmSettings(aggregation="sequence", kl_in="none")
    TEMPERATURE, TEMPERATURE_OF_BAD = 1.0, 1.05

    def surrogate(self, view: TokenView) -> Surrogate:
        ratio_N = self.log_ratio(view).exp()
        t_N = view.advantages_N.new_full(view.advantages_N.shape, self.TEMPERATURE_OF_BAD)
        t_N = t_N.masked_fill(view.advantages_N > 0, self.TEMPERATURE)
        gate_N = (t_N * (ratio_N - 1)).sigmoid() * 4 / t_N
        ratio_N = ratio_N.detach()
        loss_N = -gate_N * view.advantages_N
        return Surrogate(loss_N=loss_N, ratio_N=ratio_N, clipped_N=ratio_N != ratio_N)


class GMPO(Algorithm):
    """GMPO: the geometric mean of a response's token ratios, each of which is clipped, in logarithms."""

    defaults = AlgorithmSettings(clip_low=0.4, clip_high=0.4, aggregation="sequence", kl_in="none")

    def surrogate(self, view: TokenView) -> Surrogate:
        log_N, good_N = self.log_ratio(view), view.advantages_N > 0
        bounded_N = log_N.clamp(-self.settings.clip_low, self.settings.clip_high)
        held_N = log_N.minimum(bounded_N).where(good_N, log_N.maximum(bounded_N))
        mean_S = sequence_mean(held_N, view.sequence_N, view.num_sequences)
        objective_N = mean_S.exp()[view.sequence_N] * view.advantages_N
        clipped_N = held_N.detach() != log_N.detach()
        return self.bounded(objective_N, view.advantages_N, log_N.detach().exp(), clipped_N)


class DPPO(Algorithm):
    """DPPO (binary TV): a token is masked once its probability moved away by more than the bound.

    The bound is on the difference of the two probabilities, not on their ratio, so rare tokens are not cut early:
    a larger ratio than `MAX_RATIO` weighs as much as that.
    """

    defaults = AlgorithmSettings(clip_low=0.15, clip_high=0.15, aggregation="token", kl_in="none")
    MAX_RATIO = 20.0

    def surrogate(self, view: TokenView) -> Surrogate:
        log_N, good_N = self.log_ratio(view), view.advantages_N > 0
        moved_N = view.logprobs_N.detach().exp() - view.anchor_N.exp()
        too_high_N = good_N & (moved_N > self.settings.clip_high)
        too_low_N = (view.advantages_N < 0) & (moved_N < -self.settings.clip_low)
        masked_N = too_high_N | too_low_N
        full_N, own_N = log_N.detach().exp(), view.logprobs_N
        ratio_N = full_N.clamp(max=self.MAX_RATIO)
        moving_N = ratio_N * (own_N - own_N.detach()).exp()  # keeps its gradient at the bound
        loss_N = -(moving_N * view.advantages_N).masked_fill(masked_N, 0.0)
        clipped_N = masked_N | (full_N > self.MAX_RATIO)
        return Surrogate(loss_N=loss_N, ratio_N=ratio_N, clipped_N=clipped_N)


class GDPO(Algorithm):
    """GDPO: each reward of a task is normalised in its group by itself, then their sum over the batch.

    So a reward that varies little is heard beside one that varies much.
    """

    defaults = AlgorithmSettings(
        normalizes_each_reward=True,
        baseline="batch_mean",
        normalize="batch_rewards",
        aggregation="token",
        kl_in="loss",
    )


class MaxRL(Algorithm):
    """MaxRL: centred rewards over the group's mean reward: hard prompts count more. For rewards of 0 and 1."""

    defaults = AlgorithmSettings(normalize="mean", kl_in="none")


class Reinforce(Algorithm):
    """Plain REINFORCE: log-probability times reward, no ratio, no clip, no baseline."""

    defaults = AlgorithmSettings(
        baseline="none", normalize="none", aggregation="token", kl_in="none"
    )

    def surrogate(self, view: TokenView) -> Surrogate:
        ratio_N = self.log_ratio(view).exp().detach()
        loss_N = -view.advantages_N * view.logprobs_N
        return Surrogate(loss_N=loss_N, ratio_N=ratio_N, clipped_N=ratio_N != ratio_N)


class SFT(Reinforce):
    """Supervised fine-tuning: the cross-entropy of demonstrations, whose reward of 1 is their weight."""

    defaults = replace(Reinforce.defaults, imitates=True)

    def log_ratio(self, view: TokenView) -> Tensor:
        return view.logprobs_N.detach() * 0.0


class Distill(Algorithm):
    """On-policy distillation: the divergence from a teacher, on tokens that the policy sampled. No rewards."""

    defaults = AlgorithmSettings(
        distills=True, teacher_beta=1.0, baseline="none", normalize="none", kl_in="none"
    )


def algorithm_class(name: str) -> type[Algorithm]:
    """The class that `algorithm.name` names."""
    method = plugins.load("algorithm.name", name, ALGORITHMS)
    if not isinstance(getattr(method, "defaults", None), AlgorithmSettings):
        raise UserError(
            f"algorithm.name: got {name!r}, allowed: a class with `defaults` (AlgorithmSettings), "
            "see penstock.training.algo.method.Algorithm"
        )
    return method


def run_settings(config: Config, task: str | None = None) -> AlgorithmSettings:
    """The settings of a run, or of one of its tasks: those of its algorithm, for its engine."""
    algorithm = config.algorithm if task is None else config.task_algorithm(task)
    return resolve_settings(algorithm, exact_engine=config.has_own_engines)


def task_algorithms(config: Config) -> dict[str, Algorithm]:
    """The algorithm of each task; tasks with equal settings share one, and its denominators."""
    settings = {task: run_settings(config, task) for task in config.tasks}
    algorithms = {each: algorithm_class(each.name)(each) for each in settings.values()}
    return {task: algorithms[each] for task, each in settings.items()}


def resolve_settings(config: AlgorithmConfig, *, exact_engine: bool = True) -> AlgorithmSettings:
    """The named algorithm's defaults, overridden by the fields that the config sets."""
    overrides = {
        name: value for name in _OVERRIDES if (value := getattr(config, name, None)) is not None
    }
    defaults = algorithm_class(config.name).defaults
    kind: CorrectionKind = "none"
    if defaults.imitates:
        pass  # no policy sampled the tokens
    elif config.correction.kind != "auto":
        kind = config.correction.kind
    elif defaults.correction != "none":
        kind = defaults.correction
    elif config.decoupled or not exact_engine:
        kind = "token_truncate"
    # A correction weighs the trainer's policy against the behaviour policy, so the ratio that is
    # left to clip is that of the update alone: every correction is a decoupled objective.
    decoupled = (config.decoupled and not defaults.imitates) or kind != "none"
    return replace(
        defaults,
        name=config.name,
        decoupled=decoupled,
        correction="token" if decoupled and kind == "none" else kind,
        correction_cap=config.correction.cap,
        correction_floor=config.correction.floor,
        newest_from_trainer=config.correction.newest == "trainer",
        **overrides,
    )


def _check_normalization(settings: AlgorithmSettings, key: str) -> None:
    """Refuse to divide rewards by a deviation around a mean that was not subtracted: near-equal rewards explode."""
    if settings.normalize in ("group", "mean") and not settings.group_relative:
        raise UserError(
            f"{key}.normalize: got {settings.normalize} with baseline {settings.baseline}, allowed: baseline group_mean | "
            "leave_one_out, or normalize batch | none"
        )
    if settings.normalize == "mean" and settings.normalizes_each_reward:
        raise UserError(
            f"{key}.normalize: got mean with {settings.name}, whose rewards have the mean 0 in each group, "
            "allowed: group | batch | batch_rewards | none"
        )
    if settings.normalize == "batch_rewards" and settings.baseline == "none":
        raise UserError(
            f"{key}.normalize: got batch_rewards with baseline none, allowed: another baseline, or "
            "normalize batch | none"
        )


def _check_critic(config: Config, settings: AlgorithmSettings, key: str) -> None:
    """Refuse a second baseline beside the value model, and ranks that share one copy of it."""
    if settings.has_critic and settings.baseline != "none":
        raise UserError(
            f"{key}.baseline: got {settings.baseline} with {settings.name}, whose value model is the baseline, "
            "allowed: none"
        )
    if settings.has_critic and (copies := config.train.parallel.copies) > 1:
        raise UserError(
            f"{key}.name: got {settings.name} with {copies} ranks for one copy of the model, allowed: "
            "train.parallel with one rank per copy (data-parallel ranks share the value model), or an algorithm "
            "without one"
        )


def _check_teacher(config: Config, task: str, settings: AlgorithmSettings, key: str) -> None:
    """Refuse a teacher that is not there or teaches nothing, and terms that these ranks cannot compute."""
    if (settings.teacher or settings.distills) and settings.teacher not in config.teachers:
        names = ", ".join(config.teachers) or "none is defined: add [teachers.NAME] with its path"
        raise UserError(f"{key}.teacher: got {settings.teacher!r}, allowed: {names}")
    if bool(settings.teacher) != (settings.teacher_beta > 0):
        raise UserError(
            f"{key}.teacher_beta: got {settings.teacher_beta:g} with teacher {settings.teacher!r}, "
            "allowed: above 0 with a teacher, 0 without one"
        )
    if settings.imitates and (settings.teacher or settings.entropy_beta):
        raise UserError(
            f"{key}: got a teacher or entropy_beta with {settings.name}, allowed: with an algorithm that samples"
        )
    copies = config.train.parallel.copies
    if (settings.compares_vocabulary or settings.entropy_beta) and copies > 1:
        raise UserError(
            f"{key}: got divergence {settings.divergence} and entropy_beta {settings.entropy_beta:g} with "
            f"{copies} ranks for one copy of the model, allowed: divergence sampled and entropy_beta 0, or one rank"
        )
    if config.asks_server(task):
        _check_server(config, task, settings, key)


def _check_server(config: Config, task: str, settings: AlgorithmSettings, key: str) -> None:
    """Refuse what a server cannot tell: it knows the log-probs of the sampled tokens, at temperature 1."""
    if settings.compares_vocabulary:
        raise UserError(
            f"{key}.divergence: got {settings.divergence} with teachers.{settings.teacher}, a server, which tells "
            "the log-probs of the sampled tokens alone, allowed: sampled, or a teacher with a path"
        )
    sampling = config.task_sampling(task)
    anneals = sampling.anneal.end is not None
    if sampling.temperature != 1 or sampling.cuts_tokens or sampling.min_tokens or anneals:
        raise UserError(
            f"tasks.{task}.sampling: got other settings than temperature 1, all tokens and min_tokens 0 with "
            f"teachers.{settings.teacher}, a server, whose log-probs are those, allowed: these, or a teacher with a path"
        )


def _check_own_teacher(config: Config, task: str, settings: AlgorithmSettings, key: str) -> None:
    """Refuse a policy that is its own teacher where it has no prompt of its own, and a prompt that nobody reads."""
    agent, template = config.tasks[task].agent, config.tasks[task].teacher_template
    is_policy = bool(settings.teacher) and config.teachers[settings.teacher].is_policy
    if not (is_policy == bool(template) == ("{prompt}" in template)):
        teacher = "the policy itself" if is_policy else settings.teacher or "none"
        raise UserError(
            f"tasks.{task}.teacher_template: got {template!r} with teacher {teacher}, allowed: a text with {{prompt}}, "
            "such as '{prompt} Hint: {answer}', with a teacher whose path is policy, else empty"
        )
    if is_policy and settings.divergence != "sampled":
        raise UserError(
            f"{key}.divergence: got {settings.divergence} with the policy itself as teacher, allowed: sampled"
        )
    if is_policy and agent != "single_turn":
        raise UserError(
            f"tasks.{task}.agent: got {agent} with the policy itself as teacher, allowed: single_turn"
        )


def _check_targets(settings: AlgorithmSettings, key: str) -> None:
    """Refuse a target without a coefficient that could follow it."""
    if settings.kl_target and not settings.needs_reference:
        raise UserError(
            f"{key}.kl_target: got {settings.kl_target:g} with kl_beta {settings.kl_beta:g} and kl_in {settings.kl_in}, "
            "allowed: kl_beta above 0, from which it is adapted, and kl_in loss | reward"
        )
    if settings.entropy_target and not settings.entropy_beta:
        raise UserError(
            f"{key}.entropy_target: got {settings.entropy_target:g} with entropy_beta 0, allowed: entropy_beta "
            "above 0, from which it is adapted"
        )


def _check_task(config: Config, task: str) -> None:
    """Refuse an algorithm that cannot train this task."""
    settings = run_settings(config, task)
    key = f"tasks.{task}.algorithm" if config.tasks[task].algorithm else "algorithm"
    if config.tasks[task].demonstrates != settings.imitates:
        raise UserError(
            f"tasks.{task}.agent: got {config.tasks[task].agent} with algorithm {settings.name}, allowed: "
            "demonstration with algorithm sft, another agent with another algorithm"
        )
    sampling = config.task_sampling(task)
    if sampling.temperature == 0:
        raise UserError(
            f"tasks.{task}: sampling.temperature got 0, allowed: above 0 for training (greedy groups have no variance)"
        )
    generations = sampling.num_generations
    if settings.needs_groups and generations < 2:
        raise UserError(
            f"tasks.{task}: sampling.num_generations got {generations} with algorithm "
            f"{settings.name}, allowed: at least 2 (it compares the rollouts of one prompt)"
        )
    if settings.filter_groups and generations < 2:
        raise UserError(
            f"{key}.filter_groups: got true with tasks.{task} sampling.num_generations {generations}, "
            "allowed: false, or at least 2 (one rollout is all right or all wrong, so every group is refused)"
        )
    _check_normalization(settings, key)
    _check_critic(config, settings, key)
    _check_teacher(config, task, settings, key)
    _check_own_teacher(config, task, settings, key)
    _check_targets(settings, key)
    if settings.kl_beta > 0 and settings.kl_in == "none":
        raise UserError(
            f"{key}.kl_beta: got {settings.kl_beta} with kl_in none, "
            "allowed: 0, or kl_in loss | reward"
        )
    if settings.newest_from_trainer and any(map(config.hides_cuts, config.tasks)):
        raise UserError(
            f"{key}.correction.newest: got trainer with top_k or top_p, allowed: engine, whose log-probs "
            "alone know which tokens were cut"
        )
    if settings.kl_estimator == "k3_weighted" and settings.kl_in_reward:
        raise UserError(
            f"{key}.kl_estimator: got k3_weighted with kl_in reward, allowed: k1, k2, k3 (only a term "
            "of the loss has a gradient to weigh), or kl_in loss"
        )


def check_algorithm(config: Config) -> None:
    """Refuse settings that cannot be trained, before any weight is loaded."""
    for task in config.tasks:
        _check_task(config, task)
    algorithms = task_algorithms(config).values()
    unused = config.teachers.keys() - {method.settings.teacher for method in algorithms}
    if unused:
        raise UserError(
            f"teachers.{min(unused)}: got a teacher of no task, allowed: teachers that algorithm.teacher names"
        )
    train = config.train
    ranks = config.launch.num_consumers // train.parallel.copies
    if train.reference and not any(method.settings.needs_reference for method in algorithms):
        names = ", ".join(dict.fromkeys(method.settings.name for method in algorithms))
        raise UserError(
            f"train.reference: got {train.reference!r}, allowed: empty unless "
            f"algorithm.kl_beta > 0 (it is 0 for {names})"
        )
    if train.reference_moves:
        key = "reference_every" if train.reference_every else "reference_decay"
        got = f"train.{key}: got {train.reference_every or train.reference_decay:g}"
        if not any(method.settings.needs_reference for method in algorithms):
            raise UserError(f"{got}, allowed: 0 unless algorithm.kl_beta > 0")
        if train.reference:
            raise UserError(
                f"{got} with train.reference {train.reference!r}, allowed: one of the two (a reference that moves "
                "begins as the policy)"
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
