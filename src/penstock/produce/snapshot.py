"""What the producing side looks like at one instant, for displays, trackers and the watchdog."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(slots=True, frozen=True, kw_only=True)
class TaskSnapshot:
    """One task: drawn = trained + buffered + in_flight + sum(dropped), always."""

    name: str
    drawn: int  # prompts
    trained: int  # groups that a step took
    buffered: int  # completed, or waiting to be tried again
    in_flight: int
    dropped: Mapping[str, int]  # by reason
    ready: int  # of the buffered: completed
    aborted: int  # of the buffered: to be tried again
    expired: int  # of the buffered: to be tried again
    counters: Mapping[str, int] = field(default_factory=dict)  # retried, failed, aborted, ...

    @property
    def balanced(self) -> bool:
        accounted = self.trained + self.buffered + self.in_flight + sum(self.dropped.values())
        return self.drawn == accounted


@dataclass(slots=True, frozen=True, kw_only=True)
class Wait:
    """One edge of the wait graph."""

    who: str
    what: str
    since: float  # on the event loop's clock
    seconds: float


@dataclass(slots=True, frozen=True, kw_only=True)
class ProducerSnapshot:
    tasks: tuple[TaskSnapshot, ...]
    waits: tuple[Wait, ...]
    producer_wait_s: (
        float  # total time in which no task could launch because of the staleness bound
    )
    next_step: int
    model_version: int
    paused: bool
