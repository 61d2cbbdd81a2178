"""The metrics of one step, from flat per-token arrays: no split of the batch can change them.

Every figure is a sum over a count or a maximum, added up over ranks at the end. Names are public:
docs/algorithms.md lists them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from penstock.train.advantages import zero_variance_groups
from penstock.train.flat_batch import Rows
from penstock.train.objective import Seen
from penstock.train.parallel import Ranks


class TokenRecord:
    """What was seen at each trained token of the batch: first visit and last visit."""

    def __init__(self, num_tokens: int) -> None:
        self.logprob_N = np.full(num_tokens, np.nan)  # first visit
        self.entropy_N = np.full(num_tokens, np.nan)  # first visit
        self.before_update_N = np.zeros(num_tokens, dtype=bool)  # first visit was before any update
        self.ratio_N = np.full(num_tokens, np.nan)  # last visit
        self.clipped_N = np.full(num_tokens, np.nan)  # last visit
        self.kl_N = np.full(num_tokens, np.nan)  # last visit
        self.losses: list[float] = []  # one per update, over all ranks
        self._waiting: list[tuple[Seen, bool]] = []

    def add(self, seen: Seen, before_update: bool) -> None:
        """Keep a pass; tensors stay on their device until `flush`."""
        self._waiting.append((seen, before_update))

    def flush(self) -> float:
        """End of an update: bring its passes to the host; returns the sum of their losses."""
        loss = 0.0
        for seen, before_update in self._waiting:
            index = seen.token_N
            fresh = np.isnan(self.logprob_N[index])
            logprob, entropy = seen.logprob_N.cpu().numpy(), seen.entropy_N.cpu().numpy()
            self.logprob_N[index] = np.where(fresh, logprob, self.logprob_N[index])
            self.entropy_N[index] = np.where(fresh, entropy, self.entropy_N[index])
            self.before_update_N[index] |= fresh & before_update
            self.ratio_N[index] = seen.ratio_N.cpu().numpy()
            self.clipped_N[index] = seen.clipped_N.cpu().numpy()
            if seen.kl_N is not None:
                self.kl_N[index] = seen.kl_N.cpu().numpy()
            loss += float(seen.loss)
        self._waiting.clear()
        return loss


@dataclass(slots=True)
class Tally:
    """Sums, counts and maxima by metric name, ready to be added over ranks."""

    sums: dict[str, tuple[float, float]] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)

    def mean(self, name: str, values: np.ndarray) -> None:
        """Record a mean; values that were not seen (NaN) do not count."""
        known = values[~np.isnan(values)]
        self.sums[name] = (float(known.sum()), float(len(known)))

    def top(self, name: str, values: np.ndarray) -> None:
        known = values[~np.isnan(values)]
        self.maxima[name] = float(known.max(initial=-np.inf))

    def reduce(self, ranks: Ranks) -> dict[str, float]:
        names, tops = sorted(self.sums), sorted(self.maxima)
        table = np.array([self.sums[name] for name in names], dtype=np.float64).reshape(-1, 2)
        summed = ranks.sum(table)
        highest = ranks.max(np.array([self.maxima[name] for name in tops], dtype=np.float64))
        metrics = {
            name: float(total / count) if count else 0.0
            for name, (total, count) in zip(names, summed, strict=True)
        }
        metrics |= {
            name: float(value) if np.isfinite(value) else 0.0
            for name, value in zip(tops, highest, strict=True)
        }
        return metrics


def step_metrics(
    rows: Rows, advantages_N: np.ndarray, record: TokenRecord, ranks: Ranks
) -> dict[str, float]:
    """Everything that speaks of the batch and its tokens."""
    tally = Tally()
    _tally_rollouts(tally, rows)
    tally.mean("advantage/mean", advantages_N)
    tally.mean("_advantage/square", np.square(advantages_N))
    tally.mean("entropy/mean", record.entropy_N)
    tally.mean("ratio/mean", record.ratio_N)
    tally.top("ratio/max", record.ratio_N)
    tally.mean("clip/fraction", record.clipped_N)
    tally.mean("kl/mean", record.kl_N)
    tally.mean("staleness/mean", rows.staleness_N.astype(np.float64))
    tally.top("staleness/max", rows.staleness_N.astype(np.float64))
    _tally_mismatch(tally, rows, record)
    metrics = tally.reduce(ranks)
    for name in ("reward", "advantage"):
        square = metrics.pop(f"_{name}/square")
        metrics[f"{name}/std"] = float(np.sqrt(max(square - metrics[f"{name}/mean"] ** 2, 0.0)))
    square = metrics.pop("_importance/square")
    metrics["importance/ess"] = metrics["importance/mean"] ** 2 / square if square else 0.0
    metrics["loss/policy"] = _mean_finite(record.losses)
    metrics |= _ratio_by_staleness(rows, record, ranks)
    metrics["tokens/trained"] = float(ranks.sum(np.array([float(rows.num_tokens)]))[0])
    return metrics


def _tally_rollouts(tally: Tally, rows: Rows) -> None:
    scores = [rollout.score for rollout in rows.rollouts]
    rewards_R = np.array([rollout.reward for rollout in rows.rollouts], dtype=np.float64)
    tally.mean("reward/mean", rewards_R)
    tally.mean("_reward/square", np.square(rewards_R))
    for name, verdicts in (
        ("accuracy/mean", [score.answer_ok for score in scores if score is not None]),
        ("format/mean", [score.format_ok for score in scores if score is not None]),
    ):
        tally.mean(name, np.array([v for v in verdicts if v is not None], dtype=np.float64))
    lengths_R = rows.response_lengths_R.astype(np.float64)
    tally.mean("response_length/mean", lengths_R)
    tally.top("response_length/max", lengths_R)
    tally.mean("truncated/share", rows.truncated_R.astype(np.float64))
    tally.sums["groups/zero_variance"] = zero_variance_groups(rows)


def _tally_mismatch(tally: Tally, rows: Rows, record: TokenRecord) -> None:
    """Behaviour policy against the trainer's before the update: k3 and importance weights."""
    known_N = record.before_update_N
    log_N = np.clip(record.logprob_N[known_N] - rows.behaviour_N[known_N], -20, 20)
    weight_N = np.exp(log_N)
    tally.mean("mismatch/kl", weight_N - log_N - 1)
    tally.mean("importance/mean", weight_N)
    tally.mean("_importance/square", np.square(weight_N))
    tally.top("importance/max", weight_N)


def _ratio_by_staleness(rows: Rows, record: TokenRecord, ranks: Ranks) -> dict[str, float]:
    """Mean |log importance weight| of the tokens of each staleness present in the batch."""
    known_N = record.before_update_N
    oldest = int(ranks.max(np.array([float(rows.staleness_N.max(initial=0))]))[0])
    if oldest <= 0:
        return {}
    gap_N = np.abs(record.logprob_N[known_N] - rows.behaviour_N[known_N])
    tally = Tally()
    for age in range(oldest + 1):
        tally.mean(f"ratio/log_gap_staleness_{age}", gap_N[rows.staleness_N[known_N] == age])
    return tally.reduce(ranks)


def _mean_finite(values: list[float]) -> float:
    finite = [value for value in values if np.isfinite(value)]
    return float(np.mean(finite)) if finite else 0.0
