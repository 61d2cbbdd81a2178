"""The metrics of one step, from flat per-token arrays.

Every metric is a sum over a count or a maximum, combined over ranks at the end, so no split of the
batch changes a metric. Metric names are public: docs/algorithms.md lists them.
"""

from __future__ import annotations

import resource
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from penstock.model.transfer import HostCopy
from penstock.training.algo.kl import K3_BOUND
from penstock.training.algo.settings import AlgorithmSettings
from penstock.training.flat_batch import FlatBatch
from penstock.training.objective import PackResult
from penstock.training.parallel.ranks import Ranks


@dataclass(slots=True, kw_only=True)
class _PendingResult:
    """The result of a pack on its way to the host."""

    token_N: np.ndarray
    before_update: bool
    table_XN: HostCopy  # log-probs, entropies, ratios, clipped, KL if there is a reference
    loss: HostCopy
    loss_there: Tensor  # where it was computed


class TokenStats:
    """Figures of each trained token of the batch, from its first or its last forward pass."""

    def __init__(self, num_tokens: int) -> None:
        self.logprob_N = np.full(num_tokens, np.nan)  # of the first pass
        self.entropy_N = np.full(num_tokens, np.nan)  # of the first pass
        self.before_update_N = np.zeros(num_tokens, dtype=bool)  # first pass was before any update
        self.ratio_N = np.full(num_tokens, np.nan)  # of the last pass
        self.clipped_N = np.full(num_tokens, np.nan)  # of the last pass
        self.kl_N = np.full(num_tokens, np.nan)  # of the last pass
        self.losses: list[float] = []  # one per update, over all ranks
        self._pending: list[_PendingResult] = []

    def add(self, result: PackResult, before_update: bool) -> None:
        """Keep the result of a pack; its copy to the host runs beside the work on the next pack."""
        rows = [result.logprob_N, result.entropy_N, result.ratio_N, result.clipped_N]
        rows += [] if result.kl_N is None else [result.kl_N]
        table_XN = torch.stack([row.to(result.logprob_N.dtype) for row in rows])
        self._pending.append(
            _PendingResult(
                token_N=result.token_N,
                before_update=before_update,
                table_XN=HostCopy(table_XN),
                loss=HostCopy(result.loss),
                loss_there=result.loss,
            )
        )

    def loss(self) -> float:
        """Wait for the forward passes since `flush`; return the sum of their losses."""
        return float(sum(float(result.loss.wait()) for result in self._pending))

    def loss_there(self, device: torch.device) -> Tensor:
        """The same as a tensor on the device that computed it, without waiting."""
        zero = torch.zeros((), device=device)
        return torch.stack([zero, *(result.loss_there for result in self._pending)]).sum()

    def flush(self) -> None:
        """Keep the results since the last call: waits for forward passes, not for backward passes."""
        for result in self._pending:
            index = result.token_N
            logprob, entropy, ratio, clipped, *kl = result.table_XN.wait().numpy()
            fresh = np.isnan(self.logprob_N[index])
            self.logprob_N[index] = np.where(fresh, logprob, self.logprob_N[index])
            self.entropy_N[index] = np.where(fresh, entropy, self.entropy_N[index])
            self.before_update_N[index] |= fresh & result.before_update
            self.ratio_N[index] = ratio
            self.clipped_N[index] = clipped
            if kl:
                self.kl_N[index] = kl[0]
        self._pending.clear()


class UpdateLoss:
    """The loss of the passes of one update; ask for it before the next update's passes."""

    def __init__(self, stats: TokenStats, ranks: Ranks) -> None:
        self._stats, self._ranks = stats, ranks
        self._known: float | None = None

    def __call__(self) -> float:
        """Wait for the forward passes; return the loss over all ranks."""
        if self._known is None:
            self._known = self._ranks.sum_of(self._stats.loss())
        return self._known

    def there(self, device: torch.device) -> Tensor:
        """This rank's loss on the device that computed it, without waiting."""
        return self._stats.loss_there(device)


@dataclass(slots=True)
class MetricSums:
    """Sums, counts and maxima by metric name, to be combined over ranks."""

    sums: dict[str, tuple[float, float]] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)

    def mean(self, name: str, values: np.ndarray) -> None:
        """Record a mean; NaN marks a token without a forward pass and does not count."""
        numbers = values[~np.isnan(values)]
        self.sums[name] = (float(numbers.sum()), float(len(numbers)))

    def max(self, name: str, values: np.ndarray) -> None:
        """Record a maximum; NaN does not count."""
        numbers = values[~np.isnan(values)]
        self.maxima[name] = float(numbers.max(initial=-np.inf))

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


def step_metrics(
    flat: FlatBatch,
    advantages_N: np.ndarray,
    stats: TokenStats,
    settings: AlgorithmSettings,
    ranks: Ranks,
) -> dict[str, float]:
    """The metrics of the batch and its tokens; the consumer adds those of its optimizer."""
    sums = MetricSums()
    _add_lengths(sums, flat)
    if not settings.imitates:
        _add_rewards(sums, flat, advantages_N)
        _add_mismatch(sums, flat, stats)
        sums.mean("ratio/mean", stats.ratio_N)
        sums.max("ratio/max", stats.ratio_N)
        sums.mean("clip/fraction", stats.clipped_N)
    sums.mean("entropy/mean", stats.entropy_N)
    sums.mean("kl/mean", stats.kl_N)
    if settings.kl_estimator == "k3":
        is_bounded_N = (stats.kl_N >= K3_BOUND).astype(np.float64)
        sums.mean("kl/bounded", np.where(np.isnan(stats.kl_N), np.nan, is_bounded_N))
    sums.mean("staleness/mean", flat.staleness_N.astype(np.float64))
    sums.max("staleness/max", flat.staleness_N.astype(np.float64))
    metrics = sums.reduce(ranks)
    for name in ("reward", "advantage"):
        if (square := metrics.pop(f"_{name}/square", None)) is not None:
            variance = square - metrics[f"{name}/mean"] ** 2
            metrics[f"{name}/std"] = float(np.sqrt(max(variance, 0.0)))
    if square := metrics.pop("_importance/square", None):
        metrics["importance/ess"] = metrics["importance/mean"] ** 2 / square
    part = "demonstration" if settings.imitates else "policy"
    metrics[f"loss/{part}"] = mean_of_finite(stats.losses)
    if not settings.imitates:
        metrics |= _log_gap_by_staleness(flat, stats, ranks)
    metrics["tokens/trained"] = ranks.sum_of(flat.num_tokens)
    return metrics


def mean_of_finite(values: list[float]) -> float:
    """The mean of the finite values; 0 if there is none."""
    finite = [value for value in values if np.isfinite(value)]
    return float(np.mean(finite)) if finite else 0.0


def _add_lengths(sums: MetricSums, flat: FlatBatch) -> None:
    lengths_R = flat.response_lengths_R.astype(np.float64)
    sums.mean("response_length/mean", lengths_R)
    sums.max("response_length/max", lengths_R)
    sums.mean("truncated/share", flat.truncated_R.astype(np.float64))


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


def _log_gap_by_staleness(flat: FlatBatch, stats: TokenStats, ranks: Ranks) -> dict[str, float]:
    """The mean |log importance weight| of the tokens of each staleness in the batch."""
    known_N = stats.before_update_N
    oldest = int(ranks.max_of(flat.staleness_N.max(initial=0)))
    if oldest <= 0:
        return {}
    gap_N = np.abs(stats.logprob_N[known_N] - flat.behaviour_N[known_N])
    sums = MetricSums()
    for age in range(oldest + 1):
        sums.mean(f"ratio/log_gap_staleness_{age}", gap_N[flat.staleness_N[known_N] == age])
    return sums.reduce(ranks)


def peak_memory_mib(device: torch.device) -> float:
    """The most memory this process has held: on its GPU, or resident if it has none."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
