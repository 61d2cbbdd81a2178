"""What the producing side has counted: figures for metrics, and its state at one instant for displays.

Rewards are counted before any filter, tokens and responses of aborted groups too. Counts only; the life
of every group is in the journal.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.types import Group, Status

EVENTS = ("retried", "failed", "aborted", "expired", "filtered", "tail_calls", "pause_timeouts")


@dataclass(slots=True)
class TaskAccount:
    """Owned by the group runner of one task."""

    groups: int = 0  # completed groups, refused ones too
    produce_s: float = 0.0  # inside produce_batch
    group_times_s: list[float] = field(default_factory=list)  # one per call of the agent loop
    temperature: float | None = None  # of the group that landed last
    parts: dict[str, tuple[float, int]] = field(default_factory=dict)  # reward part -> sum, count
    _events_before: Counter[str] = field(default_factory=Counter)

    def landed(self, group: Group) -> None:
        """Count a group whose outcome is known."""
        self.temperature = group.rollouts[0].temperature
        if group.status is not Status.COMPLETED:
            return
        self.groups += 1
        for rollout in group.rollouts:
            for name, value in (rollout.score.parts if rollout.score else {}).items():
                total, count = self.parts.get(name, (0.0, 0))
                self.parts[name] = (total + value, count + 1)

    def read(self, events: Mapping[str, int]) -> dict[str, float]:
        """Return the figures since the last call and start again; `events` are counted over the run."""
        figures = {
            "groups": float(self.groups),
            "produce_s": self.produce_s,
            **{name: float(events.get(name, 0) - self._events_before[name]) for name in EVENTS},
            **{f"part/{name}": total / count for name, (total, count) in self.parts.items()},
        }
        if self.temperature is not None:
            figures["temperature"] = self.temperature
        if self.group_times_s:
            figures["group_time_p50_s"] = percentile(self.group_times_s, 0.5)
            figures["group_time_p99_s"] = percentile(self.group_times_s, 0.99)
        self.groups, self.produce_s = 0, 0.0
        self.group_times_s, self.parts = [], {}
        self._events_before = Counter(events)
        return figures


def percentile(values: list[float], share: float) -> float:
    """Return the smallest value that at least this share of the values does not exceed."""
    return sorted(values)[math.ceil(share * len(values)) - 1]


@dataclass(slots=True, frozen=True, kw_only=True)
class TaskSnapshot:
    """One task. Invariant: drawn = trained + buffered + in_flight + sum(dropped)."""

    name: str
    drawn: int  # prompts
    trained: int  # groups that a step took
    buffered: int  # completed groups, and groups that wait for a retry
    in_flight: int
    dropped: Mapping[str, int]  # by reason
    ready: int  # buffered groups that are completed
    aborted: int  # buffered groups to retry after an abort
    expired: int  # buffered groups to retry because they were too old
    counters: Mapping[str, int] = field(default_factory=dict)  # retried, failed, aborted, ...
    last_error: str = ""  # why a group failed, the newest

    @property
    def balanced(self) -> bool:
        accounted = self.trained + self.buffered + self.in_flight + sum(self.dropped.values())
        return self.drawn == accounted

    def __str__(self) -> str:
        """Say in one line where the groups of the task are."""
        reasons = [f"{reason} {number}" for reason, number in sorted(self.dropped.items())]
        return (
            f"{self.name}: drawn {self.drawn}, in flight {self.in_flight}, ready {self.ready}, "
            f"to retry {self.aborted + self.expired}, trained {self.trained}, "
            f"dropped {', '.join(reasons) or '0'}"
        )


@dataclass(slots=True, frozen=True, kw_only=True)
class ProducerWait:
    """Something that a task or a step waits for now, as `penstock train` displays it."""

    who: str
    what: str
    seconds: float  # how long the wait has lasted


@dataclass(slots=True, frozen=True, kw_only=True)
class ProducerSnapshot:
    """All tasks of a producer and everything it waits for."""

    tasks: tuple[TaskSnapshot, ...]
    waits: tuple[ProducerWait, ...]
    producer_wait_s: float  # total time in which the staleness bound let no task launch
    next_step: int
    model_version: int
    paused: bool
    batch_ready: int = 0  # groups of the next step's batch that are there
    batch_size: int = 0
