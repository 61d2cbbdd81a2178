"""The producing side at one instant, for displays, trackers and the watchdog.

Holds numbers and strings only; `Producer.snapshot` fills them in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


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
