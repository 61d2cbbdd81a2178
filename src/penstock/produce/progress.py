"""How far production and consumption are, in absolute counts of groups.

Targets are cumulative over the run: available = consumed + COMPLETED in the buffer, so a group that
was consumed never looks missing. Dicts keep their identity over `load_state_dict`: others hold them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.errors import UserError

_METRICS = (
    "raw_rewards_sum",
    "raw_rewards_count",
    "produced_samples",
    "produced_tokens",
    "produce_time_s",
)
_COUNTS = ("consumed_samples", "target_samples", "target_upto")


@dataclass(slots=True, kw_only=True)
class ProduceProgress:
    """Shared by the producer, its strategies and whoever consumes."""

    next_consumer_step: int = 1  # the step that will be taken next
    producer_future_step: int = 1  # the furthest step that is produced for
    consumed_samples: dict[str, int] = field(default_factory=dict)  # groups taken, per task
    target_samples: dict[str, int] = field(default_factory=dict)  # groups wanted so far, per task
    target_upto: dict[str, int] = field(default_factory=dict)  # the step its target reaches to
    consuming_step: int | None = None
    raw_rewards_sum: float = 0.0  # over every scored group, before filters
    raw_rewards_count: int = 0
    produced_samples: int = 0  # groups that completed
    produced_tokens: int = 0
    produce_time_s: float = 0.0  # inside produce_batch

    @classmethod
    def build(cls, task_names: Iterable[str], *, first_step: int = 1) -> ProduceProgress:
        progress = cls(next_consumer_step=first_step, producer_future_step=first_step)
        for name in task_names:
            progress.add_task(name)
        return progress

    @classmethod
    def build_local(
        cls, task_name: str, task_batch_size: int, *, train_step: int = 1
    ) -> ProduceProgress:
        """For one batch on its own: the target is that batch."""
        progress = cls.build([task_name], first_step=train_step)
        progress.target_samples[task_name] = task_batch_size
        progress.target_upto[task_name] = train_step
        return progress

    def add_task(self, name: str) -> None:
        """A task that is not known yet starts at zero, from the next step on."""
        self.consumed_samples.setdefault(name, 0)
        self.target_samples.setdefault(name, 0)
        self.target_upto.setdefault(name, self.next_consumer_step - 1)

    @property
    def target_upto_future_step(self) -> int:
        """The step that every task's target reaches to."""
        return min(self.target_upto.values(), default=self.next_consumer_step - 1)

    def ensure_target_upto(
        self, step: int, shares: Callable[[int], Mapping[str, int]], task_name: str | None = None
    ) -> None:
        """Raise targets to cover every step up to `step`; `shares(step)` is that step's batch."""
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

    def add_rewards(self, rewards: Iterable[float]) -> None:
        for reward in rewards:
            self.raw_rewards_sum += reward
            self.raw_rewards_count += 1

    def read_metrics(self) -> dict[str, float]:
        """What happened since the last reading; reading resets it."""
        found = {name: float(getattr(self, name)) for name in _METRICS}
        for name in _METRICS:
            setattr(self, name, type(getattr(self, name))())
        return found

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {name: dict(getattr(self, name)) for name in _COUNTS}
        for name in ("next_consumer_step", "producer_future_step", *_METRICS):
            state[name] = getattr(self, name)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """In place; a task that the state does not know keeps its zero."""
        for name in ("next_consumer_step", "producer_future_step", *_METRICS):
            setattr(self, name, state[name])
        for name in _COUNTS:
            getattr(self, name).update(state[name])
        for task in self.consumed_samples:
            if task not in state["consumed_samples"]:
                self.target_upto[task] = self.next_consumer_step - 1

    def _known(self, counts: dict[str, int], task_name: str) -> int:
        if task_name not in counts:
            allowed = ", ".join(sorted(counts)) or "none"
            raise UserError(f"progress: got task {task_name!r}, allowed: {allowed}")
        return counts[task_name]
