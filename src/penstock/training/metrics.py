"""The metrics of one step, from flat per-token arrays.

Every metric is a sum over a count or a maximum, combined over ranks at the end, so no split of the
batch changes a metric. Metric names are public: docs/algorithms.md lists them.
"""

from __future__ import annotations

import resource
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from penstock.training.algo.controller import Controller
from penstock.training.algo.kl import K3_BOUND
from penstock.training.flat_batch import FlatBatch
from penstock.training.loss_part import LossPart
from penstock.training.parallel.ranks import Ranks
from penstock.training.stats import TokenStats, mean_of_finite


@dataclass(slots=True)
class MetricSums:
    """Sums, counts and maxima by metric name, to be combined over ranks."""

    sums: dict[str, tuple[float, float]] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)

    def mean(self, name: str, values: np.ndarray) -> None:
        """Record a mean; NaN marks a token without a forward pass and does not count."""
        numbers = values[~np.isnan(values)]
        total, count = self.sums.get(name, (0.0, 0.0))
        self.sums[name] = (total + float(numbers.sum()), count + len(numbers))

    def max(self, name: str, values: np.ndarray) -> None:
        """Record a maximum; NaN does not count."""
        numbers = values[~np.isnan(values)]
        self.maxima[name] = float(numbers.max(initial=self.maxima.get(name, -np.inf)))

    def reduce(self, ranks: Ranks) -> dict[str, float]:
        """The metrics over all ranks, without those of which no rank counted anything."""
        mean_names, max_names = sorted(self.sums), sorted(self.maxima)
        table = np.array([self.sums[name] for name in mean_names], np.float64).reshape(-1, 2)
        summed = ranks.sum(table)
        maxima = ranks.max(np.array([self.maxima[name] for name in max_names], np.float64))
        metrics = {
            name: float(total / count)
            for name, (total, count) in zip(mean_names, summed, strict=True)
            if count
        }
        metrics |= {
            name: float(value)
            for name, value in zip(max_names, maxima, strict=True)
            if np.isfinite(value)
        }
        return metrics


def step_metrics(parts: Sequence[LossPart], ranks: Ranks) -> dict[str, float]:
    """The metrics of the batch and its tokens; the consumer adds those of its optimizer.

    Beside sampled rollouts, demonstrations are in `loss/demonstration` and `tokens/trained` alone.
    """
    sums, losses = MetricSums(), dict[str, list[float]]()
    sampled = [part for part in parts if not part.algorithm.settings.imitates]
    for part in sampled or parts:
        _add_tokens(sums, part)
    for part in sampled:
        _add_rewards(sums, part.flat, part.advantages_N)
        _add_mismatch(sums, part.flat, part.stats)
        sums.mean("ratio/mean", part.stats.ratio_N)
        sums.max("ratio/max", part.stats.ratio_N)
        sums.mean("clip/fraction", part.stats.clipped_N)
        settings = part.algorithm.settings
        if settings.kl_target:
            sums.mean("kl/beta", np.array([settings.kl_beta]))
        if settings.entropy_target:
            sums.mean("entropy/beta", np.array([settings.entropy_beta]))
    metrics = sums.reduce(ranks)
    for name in ("reward", "advantage"):
        if (square := metrics.pop(f"_{name}/square", None)) is not None:
            variance = square - metrics[f"{name}/mean"] ** 2
            metrics[f"{name}/std"] = float(np.sqrt(max(variance, 0.0)))
    if square := metrics.pop("_importance/square", None):
        metrics["importance/ess"] = metrics["importance/mean"] ** 2 / square
    for part in parts:
        losses.setdefault(part.name, []).extend(part.stats.losses)
    trained = {name: values for name, values in losses.items() if not np.isnan(values).all()}
    # a step without a token to train has a loss of 0
    metrics |= {f"loss/{name}": mean_of_finite(of) for name, of in (trained or losses).items()}
    metrics |= _log_gap_by_staleness(sampled, ranks)
    metrics["tokens/trained"] = ranks.sum_of(sum(part.flat.num_tokens for part in parts))
    return metrics


def adapt(controllers: Iterable[Controller], parts: Sequence[LossPart], ranks: Ranks) -> None:
    """Adapt the coefficients that have a target to what the step has measured."""
    for controller in controllers:
        sums = MetricSums()
        for part in parts:
            if part.algorithm is controller.algorithm:
                sums.mean("kl", part.stats.kl_N)
                sums.mean("entropy", part.stats.entropy_N)
        means = sums.reduce(ranks)
        controller.follow(kl=means.get("kl", np.nan), entropy=means.get("entropy", np.nan))


def _add_tokens(sums: MetricSums, part: LossPart) -> None:
    flat, stats = part.flat, part.stats
    lengths_R = flat.response_lengths_R.astype(np.float64)
    sums.mean("response_length/mean", lengths_R)
    sums.max("response_length/max", lengths_R)
    sums.mean("truncated/share", flat.truncated_R.astype(np.float64))
    sums.mean("entropy/mean", stats.entropy_N)
    sums.mean("kl/mean", stats.kl_N)
    sums.mean("teacher/kl", stats.teacher_N)
    if part.algorithm.settings.kl_estimator == "k3":
        is_bounded_N = (stats.kl_N >= K3_BOUND).astype(np.float64)
        sums.mean("kl/bounded", np.where(np.isnan(stats.kl_N), np.nan, is_bounded_N))
    sums.mean("staleness/mean", flat.staleness_N.astype(np.float64))
    sums.max("staleness/max", flat.staleness_N.astype(np.float64))


def _add_rewards(sums: MetricSums, flat: FlatBatch, advantages_N: np.ndarray) -> None:
    sums.mean("advantage/mean", advantages_N)
    sums.mean("_advantage/square", np.square(advantages_N))
    scores = [rollout.score for rollout in flat.rollouts if rollout.score is not None]
    rewards_R = flat.rewards_R
    sums.mean("reward/mean", rewards_R)
    sums.mean("_reward/square", np.square(rewards_R))
    for name, verdicts in (
        ("accuracy/mean", [score.answer_ok for score in scores]),
        ("format/mean", [score.format_ok for score in scores]),
    ):
        sums.mean(name, np.array([v for v in verdicts if v is not None], dtype=np.float64))
    with_text = [
        rollout for rollout in flat.rollouts if rollout.text or len(rollout.response_ids) <= 1
    ]
    empty = [not rollout.text.strip() for rollout in with_text]  # others came without their text
    sums.mean("empty/share", np.array(empty, dtype=np.float64))
    equal = [np.ptp(rewards_R[flat.group_R == group]) == 0 for group in range(flat.num_groups)]
    sums.mean("groups/zero_variance", np.array(equal, dtype=np.float64))


def _add_mismatch(sums: MetricSums, flat: FlatBatch, stats: TokenStats) -> None:
    """Compare the sampling policy with the trainer's before the update: k3 and importance weights."""
    known_N = stats.before_update_N
    log_N = np.clip(stats.logprob_N[known_N] - flat.behaviour_N[known_N], -20, 20)
    weight_N = np.exp(log_N)
    sums.mean("mismatch/kl", weight_N - log_N - 1)
    sums.mean("importance/mean", weight_N)
    sums.mean("_importance/square", np.square(weight_N))
    sums.max("importance/max", weight_N)


def _log_gap_by_staleness(parts: Sequence[LossPart], ranks: Ranks) -> dict[str, float]:
    """The mean |log importance weight| of the tokens of each staleness in the batch."""
    ages = [part.flat.staleness_N.max(initial=0) for part in parts]
    oldest = int(ranks.max_of(max(ages, default=0)))
    if oldest <= 0:
        return {}
    sums = MetricSums()
    for part in parts:
        known_N, flat = part.stats.before_update_N, part.flat
        gap_N = np.abs(part.stats.logprob_N[known_N] - flat.behaviour_N[known_N])
        for age in range(oldest + 1):
            sums.mean(f"ratio/log_gap_staleness_{age}", gap_N[flat.staleness_N[known_N] == age])
    return sums.reduce(ranks)


def peak_memory_mib(device: torch.device) -> float:
    """The most memory this process has held: on its GPU, or resident if it has none."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
