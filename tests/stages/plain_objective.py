"""The objective of docs/algorithms.md, plain and slow, and the updates that it asks for.

A row is a forward pass of transformers' own model, its logits are one table, and every gradient is autograd's. Beside the
records, the resolved settings and the choice of an update's groups, nothing here is the trainer's: the formulas
are those of the pages algorithms, off-policy, value-model, teach and controls.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.training.algo.method import run_settings
from penstock.training.algo.settings import AlgorithmSettings
from penstock.training.flat_batch import batch_updates
from penstock.types import Batch, Rollout
from stages import sweep
from stages.sweep import Draw, Updates

DROPPED = -1e30  # a logit without a chance
NOTHING = torch.zeros(0, dtype=torch.float64)


@dataclasses.dataclass(slots=True, eq=False, kw_only=True)
class Sample:
    """A rollout, and what is known of its trained tokens."""

    record: Rollout
    trained: np.ndarray  # bool, of the response's tokens
    behaviour: Tensor
    versions: Tensor
    earned: Tensor  # reward before each token
    group: int = 0  # its place in the batch
    max_tokens: int = 0
    weights: list[float] = dataclasses.field(default_factory=list)  # of its task's rewards
    fresh: Tensor = NOTHING  # bool: sampled by the weights before the update
    before: Tensor = NOTHING  # log-probs before the first update
    reference: Tensor | None = None
    taught: Tensor | None = None  # the teacher's distributions
    value: Tensor | None = None  # before the first update
    returns: Tensor = NOTHING  # to which values are trained
    reward: float = 0.0
    paid: Tensor = NOTHING  # KL in the reward, times beta
    baseline: float = 0.0
    scale: float = 1.0
    advantage: Tensor = NOTHING
    kl: Tensor = NOTHING  # of the last update that had it
    entropy: Tensor | None = None  # of the first one

    @property
    def count(self) -> int:
        return int(self.trained.sum())

    def of_ids(self, log_p: Tensor) -> Tensor:
        """What a table says of the tokens that were sampled."""
        ids = torch.tensor(self.record.response_ids[self.trained].astype(np.int64))
        return log_p.gather(1, ids[:, None])[:, 0]

    def rows(self) -> Iterator[tuple[Tensor, list[int], list[int]]]:
        """Yield (ids, positions that predict trained tokens, places of these tokens in the response) of each row."""
        for prompt_ids, place in self.record.sequences():
            ids = np.concatenate([prompt_ids, self.record.response_ids[place]])
            places = [at for at in range(place.start, place.stop) if self.trained[at]]
            positions = [len(prompt_ids) + at - place.start - 1 for at in places]
            yield torch.tensor(ids.astype(np.int64)), positions, places


def sample_of(record: Rollout, trained: np.ndarray | None = None) -> Sample:
    """The sample of a rollout; `trained`: other tokens than its mask says."""
    trained = record.loss_mask if trained is None else trained
    versions = [s.version for s in record.segments for _ in range(s.length)]
    earned = [value for count, value in record.earned for _ in range(count)]
    return Sample(
        record=record,
        trained=trained,
        behaviour=torch.tensor(record.logprobs.astype(np.float64)[trained]),
        versions=torch.tensor(np.array(versions)[trained]),
        earned=torch.tensor(np.array(earned or [0.0] * len(trained))[trained]),
    )


def log_ps(model: Any, sample: Sample) -> Tensor:
    """[trained tokens, vocabulary]: the distributions that the tokens were drawn from, under this model."""
    tables, record = [], sample.record
    for (ids, positions, places), choices in zip(sample.rows(), record.row_choices(), strict=True):
        logits_TV = model(input_ids=ids[None]).logits[0] / record.temperature
        for position, at in zip(positions, places, strict=True):
            dropped = torch.zeros(logits_TV.shape[1], dtype=torch.bool)
            if at < record.min_tokens and record.response_ids[at] != sweep.END:
                dropped[sweep.END] = True
            if choices is not None and choices.num_kept[position]:
                kept = choices[position : position + 1].kept_ids.astype(np.int64)
                dropped |= ~torch.isin(torch.arange(len(dropped)), torch.tensor(kept))
            tables.append(logits_TV[position].masked_fill(dropped, DROPPED).log_softmax(0))
    return torch.stack(tables)


class PlainTrainer:
    """A policy, and what scores beside it, that moves as the documented objective asks."""

    def __init__(self, draw: Draw) -> None:
        self.draw, self.config = draw, draw.config
        self.settings = {task: run_settings(self.config, task) for task in self.config.tasks}
        self.policy = sweep.model_of(draw)
        self.critic = copy.deepcopy(self.policy)
        width = self.critic.get_output_embeddings().weight.shape[1]
        self.critic.value_head = torch.nn.Linear(width, 1, bias=False, dtype=torch.float64)
        torch.nn.init.zeros_(self.critic.value_head.weight)
        self.reference = sweep.reference_of(draw)
        if self.config.train.reference_moves:
            self.reference = copy.deepcopy(self.policy)
        elif self.reference is None:  # with LoRA, the base weights
            self.reference = sweep.plain_model(draw.family)
        self.teachers, self.texts = sweep.teachers_of(draw), sweep.texts_of(draw)
        self.factors = {each: [1.0, 1.0] for each in self.settings.values()}  # of KL and entropy

    def train(self, batch: Batch) -> tuple[Updates, dict[str, float]]:
        """Make all updates of a batch; the gradient of each, and the metrics."""
        parts = self._parts(batch)
        for settings, samples in parts.items():
            with torch.no_grad():
                for sample in samples:
                    if sample.count:
                        self._score(sample, settings)
                set_advantages(samples, self._kl_beta(settings), settings)
        taken: Updates = []
        losses: dict[str, list[float]] = {}
        updates = batch_updates(len(batch.groups), self.config, batch.step, 0, 1)
        for number, groups in enumerate(updates):
            of_policy = of_critic = torch.zeros((), dtype=torch.float64)
            for settings, samples in parts.items():
                chosen = [sample for sample in samples if sample.group in groups and sample.count]
                loss, value_loss = self._loss(settings, chosen)
                if chosen:
                    losses.setdefault(name_of_loss(settings), []).append(loss.item())
                waits = settings.has_critic and batch.step <= self.config.train.critic_warmup_steps
                share = 0.0 if waits else settings.weight * (1 - self.config.train.ptx.coefficient)
                of_policy, of_critic = of_policy + share * loss, of_critic + value_loss
            if share := self.config.train.ptx.coefficient:
                text = (batch.step - 1) * len(updates) + number
                of_policy = of_policy + share * self._text_loss(text)
            gradients = gradients_of(self.policy, of_policy)
            sweep.move(self.policy, gradients)
            taken.append(gradients)
            if any(settings.has_critic for settings in parts):
                gradients = gradients_of(self.critic, of_critic)
                sweep.move(self.critic, gradients)
                taken[-1] = taken[-1] | {f"critic/{n}": g for n, g in gradients.items()}
        metrics = {f"loss/{name}": float(np.mean(values)) for name, values in losses.items()}
        metrics |= metrics_of_tokens(parts)
        for settings, samples in parts.items():
            self._adapt(settings, samples)
        self._move_reference(batch.step)
        return taken, metrics

    def _parts(self, batch: Batch) -> dict[AlgorithmSettings, list[Sample]]:
        """The rollouts of the tasks that share their settings."""
        parts: dict[AlgorithmSettings, list[Sample]] = {each: [] for each in self.settings.values()}
        for number, group in enumerate(batch.groups):
            settings = self.settings[group.task]
            task = self.config.tasks[group.task]
            for record in group.rollouts:
                sample = sample_of(record)
                if settings.mask_truncated and record.finish_reason == "length":
                    sample = sample_of(record, np.zeros_like(record.loss_mask))
                sample.group, sample.weights = number, [reward.weight for reward in task.rewards]
                sample.max_tokens = self.config.task_sampling(group.task).max_tokens
                sample.fresh = sample.versions == batch.step - 1
                parts[settings].append(sample)
        return parts

    def _score(self, sample: Sample, settings: AlgorithmSettings) -> None:
        """Note what the models say before the first update."""
        sample.before = sample.of_ids(log_ps(self.policy, sample))
        if settings.needs_reference:
            sample.reference = sample.of_ids(log_ps(self.reference, sample))
        if settings.needs_teacher:
            sample.taught = log_ps(self.teachers[settings.teacher], sample)
        if settings.has_critic:
            sample.value = self._values(sample)

    def _values(self, sample: Sample) -> Tensor:
        """What the value model expects at each trained token."""
        values = []
        for ids, positions, _ in sample.rows():
            states_TD = self.critic.base_model(input_ids=ids[None]).last_hidden_state[0]
            values.append(self.critic.value_head(states_TD[positions])[:, 0])
        return torch.cat(values)

    def _loss(self, settings: AlgorithmSettings, chosen: list[Sample]) -> tuple[Tensor, Tensor]:
        """(loss of the policy, loss of the value model) of the rollouts of one update."""
        tokens, longest = sum(sample.count for sample in chosen), self._longest(settings)
        loss = value_loss = torch.zeros((), dtype=torch.float64)
        for sample in chosen:
            weight = {
                "token": 1 / tokens,
                "sequence": 1 / (len(chosen) * sample.count),
                "constant": 1 / (len(chosen) * longest),
            }[settings.aggregation]
            losses, entropies = self._token_losses(settings, sample)
            entropy_beta = settings.entropy_beta * self.factors[settings][1]
            loss = loss + weight * (losses - entropy_beta * entropies).sum()
            if sample.value is not None:
                values = self._values(sample)
                errors = value_errors(values, sample.value, sample.returns, settings.value_clip)
                value_loss = value_loss + weight * errors.sum()
        return loss, value_loss

    def _longest(self, settings: AlgorithmSettings) -> int:
        """`max_tokens` of the tasks that are trained so."""
        own = [task for task, each in self.settings.items() if each == settings]
        return max(self.config.task_sampling(task).max_tokens for task in own)

    def _token_losses(self, settings: AlgorithmSettings, sample: Sample) -> tuple[Tensor, Tensor]:
        """(losses, entropies) of a rollout's tokens."""
        log_p = log_ps(self.policy, sample)
        own, old = sample.of_ids(log_p), sample.behaviour
        if settings.newest_from_trainer:
            old = torch.where(sample.fresh, sample.before, old)
        weight = correction(settings, sample.before - old)
        anchor = sample.before if settings.decoupled else old
        log_ratio = own * 0 if settings.imitates else own - anchor
        loss = weight * policy_loss(settings, own, anchor, log_ratio, sample.advantage)
        if sample.reference is not None:
            sample.kl = divergence_of_samples(settings.kl_estimator, own, sample.reference)
            if settings.kl_in == "loss":
                unclipped = log_ratio.exp() * weight
                kl = sample.kl * (unclipped if settings.kl_estimator == "k3_weighted" else 1)
                loss = loss + self._kl_beta(settings) * kl
        if sample.taught is not None and settings.divergence == "sampled":
            away = (own - sample.of_ids(sample.taught)).square() / 2
            ratio = ratio_of(settings, log_ratio).detach().clamp(max=settings.correction_cap)
            loss = loss + settings.teacher_beta * ratio * weight * away
        elif sample.taught is not None:
            loss = loss + settings.teacher_beta * divergence(
                settings.divergence, log_p, sample.taught
            )
        entropy = -(log_p.exp() * log_p).sum(1)
        sample.entropy = entropy if sample.entropy is None else sample.entropy
        return loss, entropy

    def _text_loss(self, update: int) -> Tensor:
        """The cross-entropy of the texts of an update, which are read one after another."""
        count = self.config.train.ptx.sequences_per_step
        numbers = range(update * count, (update + 1) * count)
        samples = [
            sample_of(self.texts[number % len(self.texts)].rollouts[0]) for number in numbers
        ]
        return -torch.cat([s.of_ids(log_ps(self.policy, s)) for s in samples]).mean()

    # ---- between steps

    def _kl_beta(self, settings: AlgorithmSettings) -> float:
        return settings.kl_beta * self.factors[settings][0]

    def _adapt(self, settings: AlgorithmSettings, samples: Sequence[Sample]) -> None:
        """e = mean / target - 1, within 0.2: the coefficients become 1 + 0.1 e and 1 - 0.1 e times what they were."""
        targets = (settings.kl_target, settings.entropy_target)
        for place, (target, sign) in enumerate(zip(targets, (1, -1), strict=True)):
            measured = [(s.kl, s.entropy)[place].detach() for s in samples if s.count]
            if target and measured:
                error = float(torch.cat(measured).mean()) / target - 1
                self.factors[settings][place] *= 1 + sign * 0.1 * min(max(error, -0.2), 0.2)

    def _move_reference(self, step: int) -> None:
        train = self.config.train
        if train.reference_moves and step % (train.reference_every or 1) == 0:
            pairs = zip(self.reference.parameters(), self.policy.parameters(), strict=True)
            with torch.no_grad():
                for old, new in pairs:
                    decay = train.reference_decay
                    old.copy_(decay * old + (1 - decay) * new)


def gradients_of(model: Any, loss: Tensor) -> dict[str, Tensor]:
    """The gradient of each trained parameter, zero where the loss does not ask for one."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not loss.requires_grad:
        return {name: torch.zeros_like(p) for name, p in named.items()}
    got = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {
        name: torch.zeros_like(p) if gradient is None else gradient
        for (name, p), gradient in zip(named.items(), got, strict=True)
    }


def metrics_of_tokens(parts: dict[AlgorithmSettings, list[Sample]]) -> dict[str, float]:
    """The means over the tokens that were sampled; those of demonstrations where no others are."""
    samples = [
        sample
        for settings, own in parts.items()
        for sample in own
        if sample.count and (not settings.imitates or all(each.imitates for each in parts))
    ]
    tables = {
        "kl/mean": [sample.kl.detach() for sample in samples],
        "entropy/mean": [sample.entropy.detach() for sample in samples],
    }
    joined = {name: torch.cat([NOTHING, *values]) for name, values in tables.items()}
    return {name: float(values.mean()) for name, values in joined.items() if len(values)}


def name_of_loss(settings: AlgorithmSettings) -> str:
    if settings.distills:
        return "teacher"
    return "demonstration" if settings.imitates else "policy"


# ---- advantages


def set_advantages(samples: list[Sample], kl_beta: float, settings: AlgorithmSettings) -> None:
    """The advantage of every trained token, and with a value model its return."""
    for sample in samples:
        sample.reward = sample.record.score.value + overlong(sample, settings)
        if sample.reference is not None and settings.kl_in == "reward":
            kl = divergence_of_samples(settings.kl_estimator, sample.before, sample.reference)
            sample.paid = kl_beta * kl
    if settings.has_critic:
        for sample in samples:
            generalised_advantages(sample, settings)
    else:
        compared_advantages(samples, settings)
    if settings.normalize == "batch" and samples:
        tokens = torch.cat([sample.advantage for sample in samples])
        mean, spread = tokens.mean(), tokens.std(correction=0)
        for sample in samples:
            even = (sample.advantage - mean) / (spread + 1e-8)
            sample.advantage = even if spread > 1e-8 else torch.zeros_like(even)
    if settings.distills:
        for sample in samples:
            sample.advantage = torch.zeros_like(sample.earned)


def compared_advantages(samples: list[Sample], settings: AlgorithmSettings) -> None:
    """Rewards to come, less those of other rollouts, and scaled."""
    numbers = sorted({sample.group for sample in samples})
    groups = [[sample for sample in samples if sample.group == number] for number in numbers]
    relative = settings.baseline in ("group_mean", "leave_one_out")
    for group in groups:
        if settings.normalizes_each_reward:
            normalise_each_reward(group, settings)
        for sample in group:
            sample.reward -= float(sample.paid.sum()) if relative else 0.0
        set_baseline_and_scale(group, settings)
    rewards = np.array([sample.reward for sample in samples])
    for sample in samples:
        if settings.baseline == "batch_mean":
            sample.baseline = rewards.mean()
        if settings.normalize == "batch_rewards":
            spread = rewards.std(ddof=1) if len(rewards) > 1 else 0.0
            sample.scale = spread + 1e-4 if spread > 1e-8 else np.inf
        gone = 0 * sample.earned if settings.normalizes_each_reward else sample.earned
        sample.advantage = (sample.reward - gone - sample.baseline) / sample.scale
        if not relative and len(sample.paid):  # a token pays its KL and that of those after it
            sample.advantage = sample.advantage - sample.paid.flip(0).cumsum(0).flip(0)


def overlong(sample: Sample, settings: AlgorithmSettings) -> float:
    """0 up to max_tokens - W, then linear down to -weight, which a truncated response gets whole."""
    most = sample.max_tokens
    window = max(1, min(settings.overlong_window or min(1024, most // 4), most))
    late = (sample.record.longest_answer - (most - window)) / window
    share = 1.0 if sample.record.finish_reason == "length" else min(max(late, 0.0), 1.0)
    return -settings.overlong_penalty * share


def set_baseline_and_scale(group: list[Sample], settings: AlgorithmSettings) -> None:
    """What is subtracted from the rewards of a group, and what divides the difference."""
    rewards = np.array([sample.reward for sample in group])
    size, equal = len(group), np.ptp(rewards) == 0
    for sample in group:
        if settings.baseline in ("group_mean", "leave_one_out"):
            others = settings.baseline == "leave_one_out" and not equal
            sample.baseline = (
                (rewards.sum() - sample.reward) / (size - 1) if others else rewards.mean()
            )
            sample.baseline = sample.reward if equal else sample.baseline
        if settings.normalize == "group":
            still_to_come = [
                s.reward - earned for s in group for _, earned in s.record.earned or [(0, 0.0)]
            ]
            spread = 0.0 if equal else max(rewards.std(ddof=1), np.std(still_to_come, ddof=1))
            sample.scale = np.inf if equal else spread + 1e-4
        if settings.normalize == "mean":
            solved = rewards.mean() > 0 and not equal
            sample.scale = max(rewards.mean(), np.ptp(rewards) / size) if solved else np.inf


def normalise_each_reward(group: list[Sample], settings: AlgorithmSettings) -> None:
    """Each reward of a task over its own deviation; what turns earned is one more reward."""
    named = [
        [value for name, value in sample.record.score.parts.items() if "." not in name]
        for sample in group
    ]
    weights = group[0].weights
    if any(len(values) != len(weights) for values in named):
        named, weights = [[] for _ in group], []
    rest = [s.record.score.value - np.dot(v, weights) for s, v in zip(group, named, strict=True)]
    if not weights or any(sample.record.earned for sample in group):
        named = [[*values, value] for values, value in zip(named, rest, strict=True)]
        weights = [*weights, 1.0]
    values_GK = np.array(named)
    centred_GK = values_GK - values_GK.mean(0)
    if len(group) > 1:
        centred_GK /= values_GK.std(0, ddof=1) + 1e-4
    for sample, total in zip(group, centred_GK @ weights, strict=True):
        sample.reward = float(total) + overlong(sample, settings)


def generalised_advantages(sample: Sample, settings: AlgorithmSettings) -> None:
    """GAE, backwards over the trained tokens; the value behind the last one is 0."""
    if not sample.count:
        return
    earned = [*sample.earned.tolist(), sample.reward]
    values = [*sample.value.tolist(), 0.0]
    paid = sample.paid.tolist() or [0.0] * sample.count
    advantage, later = torch.zeros(sample.count, dtype=torch.float64), 0.0
    for t in reversed(range(sample.count)):
        error = earned[t + 1] - earned[t] - paid[t] + settings.gamma * values[t + 1] - values[t]
        advantage[t] = later = error + settings.gamma * settings.gae_lambda * later
    sample.advantage, sample.returns = advantage, advantage + sample.value


# ---- losses of tokens


def value_errors(values: Tensor, old: Tensor, returns: Tensor, clip: float) -> Tensor:
    errors = (values - returns) ** 2
    if clip:
        near = old + (values - old).clamp(-clip, clip)
        errors = torch.maximum(errors, (near - returns) ** 2)
    return errors / 2


def correction(settings: AlgorithmSettings, log_weight: Tensor) -> Tensor:
    """The importance weight of each token of a rollout."""
    kind = settings.correction
    if kind == "none":
        return torch.ones_like(log_weight)
    if kind.startswith("sequence"):
        log_weight = log_weight.sum().expand(len(log_weight))
    weight = log_weight.exp()
    if kind.endswith("truncate"):
        return weight.clamp(max=settings.correction_cap)
    if kind.endswith("mask"):
        kept = (weight >= settings.correction_floor) & (weight <= settings.correction_cap)
        return torch.where(kept, weight, 0.0)
    return weight


def ratio_of(settings: AlgorithmSettings, log_ratio: Tensor) -> Tensor:
    """The ratio of the policy to the old one, as the method defines it."""
    if settings.name == "rloo":
        return log_ratio.sum().exp().expand(len(log_ratio))
    if settings.name == "gspo":
        return log_ratio.mean().exp().expand(len(log_ratio))
    return log_ratio.exp()


def policy_loss(
    settings: AlgorithmSettings, own: Tensor, old: Tensor, log_ratio: Tensor, advantage: Tensor
) -> Tensor:
    """The loss of each token of a rollout, by the table of docs/algorithms.md."""
    name, low, high = settings.name, settings.clip_low, settings.clip_high
    ratio = ratio_of(settings, log_ratio)
    good = advantage > 0
    if name in ("reinforce", "sft"):
        return -advantage * own
    if name == "cispo":
        return -ratio.detach().clamp(1 - low, 1 + high) * advantage * own
    if name == "sapo":
        t = torch.where(good, 1.0, 1.05 * torch.ones_like(own))
        return -advantage * 4 / t * torch.sigmoid(t * (ratio - 1))
    if name == "dppo":
        moved = (own.exp() - old.exp()).detach()
        outside = (good & (moved > high)) | (~good & (moved < -low))
        weight = ratio.detach().clamp(max=20)
        return torch.where(outside, 0.0, -weight * advantage * (own - own.detach()).exp())
    if name == "gmpo":
        held = torch.where(good, log_ratio.clamp(max=high), log_ratio.clamp(min=-low))
        objective = held.mean().exp() * advantage
    else:
        objective = torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
    if settings.dual_clip:
        bound = settings.dual_clip * advantage
        objective = torch.where(advantage < 0, torch.maximum(objective, bound), objective)
    return -objective


def divergence_of_samples(kind: str, own: Tensor, reference: Tensor) -> Tensor:
    """An estimate of KL(policy, reference) at each sampled token."""
    if kind == "k1":
        return own - reference
    if kind == "k2":
        return (own - reference) ** 2 / 2
    k3 = (reference - own).exp() - (reference - own) - 1
    return k3.clamp(max=10) if kind == "k3" else k3


def divergence(kind: str, policy: Tensor, teacher: Tensor) -> Tensor:
    """The divergence of each token's distributions."""

    def kl(left: Tensor, right: Tensor) -> Tensor:
        return (left.exp() * (left - right)).sum(1)

    if kind == "forward":
        return kl(teacher, policy)
    if kind == "reverse":
        return kl(policy, teacher)
    mixture = ((policy.exp() + teacher.exp()) / 2).clamp(min=1e-300).log()
    return (kl(policy, mixture) + kl(teacher, mixture)) / 2
