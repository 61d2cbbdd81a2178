"""How many groups each task owes, how many were produced and how many were consumed.

Targets are cumulative over the run: available = consumed + COMPLETED in the buffer, so a group that was
consumed never looks missing. `TaskShares` divides each step's batch among the tasks. The dicts of a
`ProduceProgress` stay the same objects over `load_state_dict`, because other parts hold references
to them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from penstock.errors import UserError

_METRICS = ("raw_rewards_sum", "raw_rewards_count", "produced_samples", "produced_tokens")
_COUNTS = ("consumed_samples", "target_samples", "target_upto")
_STEPS = ("next_consumer_step", "producer_future_step")


@dataclass(slots=True, kw_only=True)
class ProduceProgress:
    """Shared by the producer, its strategies and the consumer."""

    next_consumer_step: int = 1  # the step that will be taken next
    producer_future_step: int = 1  # the furthest step that is produced for
    consumed_samples: dict[str, int] = field(default_factory=dict)  # groups taken, per task
    target_samples: dict[str, int] = field(default_factory=dict)  # groups wanted so far, per task
    target_upto: dict[str, int] = field(default_factory=dict)  # the last step in the target
    consuming_step: int | None = None
    # since the metrics were read, per task
    raw_rewards_sum: dict[str, float] = field(default_factory=dict)  # before filters
    raw_rewards_count: dict[str, int] = field(default_factory=dict)
    produced_samples: dict[str, int] = field(default_factory=dict)  # responses, aborted ones too
    produced_tokens: dict[str, int] = field(default_factory=dict)
    produce_time_s: float = 0.0  # inside produce_batch, summed over the tasks

    @classmethod
    def build(cls, task_names: Iterable[str], *, first_step: int = 1) -> ProduceProgress:
        progress = cls(next_consumer_step=first_step, producer_future_step=first_step)
        for name in task_names:
            progress.add_task(name)
        return progress

    @classmethod
    def build_local(
        cls,
        task_name: str | Mapping[str, int],
        task_batch_size: int | None = None,
        *,
        train_step: int = 1,
    ) -> ProduceProgress:
        """Return the progress of a single batch: the target is that batch.

        For several tasks give their sizes: `build_local({"math": 6, "code": 2})`.
        """
        if isinstance(task_name, str):
            if task_batch_size is None:
                raise UserError("build_local: got no task_batch_size, allowed: 0 or more")
            sizes: Mapping[str, int] = {task_name: task_batch_size}
        else:
            sizes = task_name
        progress = cls.build(sizes, first_step=train_step)
        for name, size in sizes.items():
            progress.target_samples[name] = size
            progress.target_upto[name] = train_step
        return progress

    def add_task(self, name: str) -> None:
        """Start a new task at zero, from the next step on; a known task stays as it is."""
        self.consumed_samples.setdefault(name, 0)
        self.target_samples.setdefault(name, 0)
        self.target_upto.setdefault(name, self.next_consumer_step - 1)
        for metric in _METRICS:
            getattr(self, metric).setdefault(name, 0)

    @property
    def target_upto_future_step(self) -> int:
        """The last step that the targets of all tasks include."""
        return min(self.target_upto.values(), default=self.next_consumer_step - 1)

    def ensure_target_upto(
        self, step: int, shares: Callable[[int], Mapping[str, int]], task_name: str | None = None
    ) -> None:
        """Raise the targets to include every step up to `step`; `shares(step)` is that step's batch."""
        for name in [task_name] if task_name is not None else list(self.target_samples):
            for future in range(self._known(self.target_upto, name) + 1, step + 1):
                self.target_samples[name] += shares(future).get(name, 0)
                self.target_upto[name] = future
        self.producer_future_step = max(self.producer_future_step, step)

    def consumed(self, task_name: str) -> int:
        return self._known(self.consumed_samples, task_name)

    def target(self, task_name: str) -> int:
        return self._known(self.target_samples, task_name)

    def begin_consume(self, step: int) -> None:
        if step != self.next_consumer_step:
            raise UserError(f"consume: got step {step}, allowed: {self.next_consumer_step}")
        self.consuming_step = step

    def mark_consumed(self, task_name: str, num_groups: int) -> None:
        self.consumed_samples[task_name] = self.consumed(task_name) + num_groups

    def finish_consume(self, step: int) -> None:
        if step != self.consuming_step:
            raise UserError(f"finish consume: got step {step}, allowed: {self.consuming_step}")
        self.consuming_step = None
        self.next_consumer_step = step + 1

    def add_rewards(self, task_name: str, rewards: Iterable[float]) -> None:
        for reward in rewards:
            self.raw_rewards_sum[task_name] += reward
            self.raw_rewards_count[task_name] += 1

    def add_produced(self, task_name: str, samples: int, tokens: int) -> None:
        self.produced_samples[task_name] += samples
        self.produced_tokens[task_name] += tokens

    def read_metrics(self) -> dict[str, dict[str, float]]:
        """Return what was counted since the last call, by task, and reset it."""
        found = {
            task: {name: float(getattr(self, name)[task]) for name in _METRICS}
            for task in self.consumed_samples
        }
        for name in _METRICS:
            counts = getattr(self, name)
            counts.update(dict.fromkeys(counts, 0))
        self.produce_time_s = 0.0
        return found

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {name: dict(getattr(self, name)) for name in (*_COUNTS, *_METRICS)}
        for name in (*_STEPS, "produce_time_s"):
            state[name] = getattr(self, name)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load in place; a task or a counter that is not in the state starts at zero.

        A counter that an older state has as one sum over all tasks starts at zero too.
        """
        for name in _STEPS:
            setattr(self, name, state[name])
        self.produce_time_s = float(state.get("produce_time_s", 0.0))
        for name in (*_COUNTS, *_METRICS):
            saved = state.get(name, {})
            if isinstance(saved, Mapping):
                getattr(self, name).update(saved)
        upto = state.get("target_upto_future_step", self.next_consumer_step - 1)
        for task in self.consumed_samples:
            if task not in state["consumed_samples"]:
                self.target_upto[task] = self.next_consumer_step - 1
            elif task not in state.get("target_upto", {}):
                self.target_upto[task] = upto
        for task in state["consumed_samples"]:
            self.add_task(task)

    def _known(self, counts: dict[str, int], task_name: str) -> int:
        if task_name not in counts:
            allowed = ", ".join(sorted(counts)) or "none"
            raise UserError(f"progress: got task {task_name!r}, allowed: {allowed}")
        return counts[task_name]


class TaskShares:
    """Divides each step's batch among the tasks by largest remainder, and carries the remainders.

    With weights 9 : 1 : 0.5 and 8 groups a step the third task is due 0.38 groups a step: it gets none in
    most steps and one in every third. Every step has exactly `groups_per_step` groups.
    """

    def __init__(
        self, weights: Mapping[str, float], groups_per_step: int, *, first_step: int = 1
    ) -> None:
        total = sum(Fraction(weight) for weight in weights.values())
        if total <= 0 or any(weight < 0 for weight in weights.values()):
            raise UserError(f"task weights: got {dict(weights)}, allowed: none below 0, one above")
        self._quotas = {
            name: Fraction(weight) / total * groups_per_step
            for name, weight in weights.items()
            if weight > 0
        }
        self._groups_per_step = groups_per_step
        self._carried = dict.fromkeys(self._quotas, Fraction(0))
        self._next_step = first_step
        self._steps: dict[int, dict[str, int]] = {}

    def at(self, step: int) -> dict[str, int]:
        """Return the groups of each task in that step, without the tasks of weight 0."""
        while self._next_step <= step:
            due = {name: self._carried[name] + quota for name, quota in self._quotas.items()}
            counts = _largest_remainder(due, self._groups_per_step)
            self._carried = {name: due[name] - counts[name] for name in due}
            self._steps[self._next_step] = counts
            self._next_step += 1
        return self._steps[step]

    def forget_before(self, step: int) -> None:
        """Forget the steps below `step`, which no caller needs any more."""
        for old in [known for known in self._steps if known < step]:
            del self._steps[old]


def _largest_remainder(quotas: Mapping[str, Fraction], total: int) -> dict[str, int]:
    """Return whole numbers that sum to `total`, as close to the quotas as possible; ties by order."""
    counts = {name: max(0, math.floor(quota)) for name, quota in quotas.items()}
    by_remainder = sorted(quotas, key=lambda name: counts[name] - quotas[name])
    while sum(counts.values()) > total:
        positive = (name for name in quotas if counts[name] > 0)
        over = max(positive, key=lambda name: counts[name] - quotas[name])
        counts[over] -= 1
    for name in by_remainder[: total - sum(counts.values())]:
        counts[name] += 1
    return counts
