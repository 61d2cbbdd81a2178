"""What the producing side owes and what it has: targets, landed groups, figures for metrics, snapshots.

Targets are cumulative over the run: available = consumed + COMPLETED in the buffer, so a group that was
consumed never looks missing. `TaskShares` divides each step's batch among the tasks. The dicts of a
`ProduceProgress` stay the same objects over `load_state_dict`, because other parts hold references
to them. Rewards are counted before any filter, tokens and responses of aborted groups too.

The replay buffer has the landed groups by (task, status), each kind in a heap. Counting reads one length,
taking pops one heap, and expiry compares the version that was stored when a group came in: no operation
looks at tokens. Strategies decide about retries and training, not the buffer. The journal holds the same
groups, and the life of each; it survives a crash.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from penstock.errors import UserError
from penstock.types import Group, Status, staleness

EVENTS = ("retried", "failed", "aborted", "expired", "filtered", "tail_calls", "pause_timeouts")
_METRICS = {  # field of the progress -> the name of its figure
    "raw_rewards_sum": "reward_sum",
    "raw_rewards_count": "reward_count",
    "produced_samples": "samples",
    "produced_tokens": "tokens",
}
_COUNTS = ("consumed_samples", "target_samples", "target_upto")
_EXPIRABLE = (Status.COMPLETED, Status.ABORTED)
_NO_VERSION = 1 << 62  # of a group without tokens, which cannot be too old


class _ByTask(dict[str, int]):
    """A count for each task of the run."""

    def __missing__(self, task_name: str) -> int:
        allowed = ", ".join(sorted(self)) or "none"
        raise UserError(f"progress: got task {task_name!r}, allowed: {allowed}")


@dataclass(slots=True, kw_only=True)
class ProduceProgress:
    """Shared by the producer, its strategies and the consumer."""

    next_consumer_step: int = 1  # the step that will be taken next
    consumed_samples: dict[str, int] = field(default_factory=_ByTask)  # groups taken, per task
    target_samples: dict[str, int] = field(default_factory=_ByTask)  # groups wanted so far
    target_upto: dict[str, int] = field(default_factory=_ByTask)  # the last step in the target
    # since the metrics were read, per task
    raw_rewards_sum: dict[str, float] = field(default_factory=dict)  # before filters
    raw_rewards_count: dict[str, int] = field(default_factory=dict)
    produced_samples: dict[str, int] = field(default_factory=dict)  # responses, aborted ones too
    produced_tokens: dict[str, int] = field(default_factory=dict)

    @classmethod
    def build(cls, task_names: Iterable[str], *, first_step: int = 1) -> ProduceProgress:
        progress = cls(next_consumer_step=first_step)
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
        """The progress of a single batch: the target is that batch.

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
            for future in range(self.target_upto[name] + 1, step + 1):
                self.target_samples[name] += shares(future).get(name, 0)
                self.target_upto[name] = future

    def consumed(self, task_name: str) -> int:
        return self.consumed_samples[task_name]

    def target(self, task_name: str) -> int:
        return self.target_samples[task_name]

    def finish_consume(self, step: int, groups: Mapping[str, int]) -> None:
        """Count the groups that the step took of each task."""
        for task_name, number in groups.items():
            self.consumed_samples[task_name] += number
        self.next_consumer_step = step + 1

    def read_metrics(self) -> dict[str, dict[str, float]]:
        """What was counted since the last call, by task, and reset it."""
        figures = {
            task: {name: float(getattr(self, counted)[task]) for counted, name in _METRICS.items()}
            for task in self.consumed_samples
        }
        for name in _METRICS:
            counts = getattr(self, name)
            counts.update(dict.fromkeys(counts, 0))
        return figures

    def state_dict(self) -> dict[str, Any]:
        counts = {name: dict(getattr(self, name)) for name in (*_COUNTS, *_METRICS)}
        return {"next_consumer_step": self.next_consumer_step, **counts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load in place; a task or a counter that is not in the state starts at zero.

        A counter that an older state has as one sum over all tasks starts at zero too.
        """
        self.next_consumer_step = state["next_consumer_step"]
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
        """The groups of each task in that step, without the tasks of weight 0."""
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
    """Whole numbers that sum to `total`, as close to the quotas as possible; ties by order."""
    counts = {name: max(0, math.floor(quota)) for name, quota in quotas.items()}
    by_remainder = sorted(quotas, key=lambda name: counts[name] - quotas[name])
    while sum(counts.values()) > total:
        positive = (name for name in quotas if counts[name] > 0)
        over = max(positive, key=lambda name: counts[name] - quotas[name])
        counts[over] -= 1
    for name in by_remainder[: total - sum(counts.values())]:
        counts[name] += 1
    return counts


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
        """The figures since the last call and start again; `events` are counted over the run."""
        figures = {
            "groups": float(self.groups),
            "produce_s": self.produce_s,
            **{name: float(events.get(name, 0) - self._events_before[name]) for name in EVENTS},
            **{f"part/{name}": total / count for name, (total, count) in self.parts.items()},
        }
        if self.temperature is not None:
            figures["temperature"] = self.temperature
        if self.group_times_s:
            for share in (0.5, 0.99):  # the smallest time that so many groups do not exceed
                time_s = np.quantile(self.group_times_s, share, method="inverted_cdf")
                figures[f"group_time_p{100 * share:.0f}_s"] = float(time_s)
        self.groups, self.produce_s = 0, 0.0
        self.group_times_s, self.parts = [], {}
        self._events_before = Counter(events)
        return figures


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
class ProducerSnapshot:
    """All tasks of a producer, and how far the next batch is."""

    tasks: tuple[TaskSnapshot, ...] = ()
    batch_ready: int = 0  # groups of the next step's batch that are there
    batch_size: int = 0


class _Entry(NamedTuple):
    """A group in a heap, with the order of the heap in its first three fields."""

    rank: int  # minus the priority
    cursor: int
    tick: int  # no two entries are equal up to here, so groups are never compared
    group: Group
    oldest_version: int
    since_step: int  # the train step at which the group got this status; 0: unknown


class ReplayBuffer:
    """Consumes landed groups, produces them in order: by priority, then by cursor. Never waits."""

    def __init__(self, *, max_groups_per_task: int = 0) -> None:
        if max_groups_per_task < 0:
            raise UserError(
                f"max_groups_per_task: got {max_groups_per_task}, allowed: 0 (no bound) or more"
            )
        self.max_groups_per_task = max_groups_per_task  # bound on COMPLETED groups; 0: no bound
        self._heaps: defaultdict[tuple[str, Status], list[_Entry]] = defaultdict(list)
        # no group of a heap is older; those that were may be gone
        self._oldest = defaultdict[tuple[str, Status], int](lambda: _NO_VERSION)
        self._ids: set[str] = set()
        self._ticks = itertools.count()

    def put(self, group: Group, *, priority: int = 0, train_step: int = 0) -> None:
        """Add a group under its own status; a higher priority is taken first."""
        if group.group_id in self._ids:
            raise ValueError(f"replay buffer: got {group.group_id} a second time, allowed: once")
        self._ids.add(group.group_id)
        version = group.oldest_version
        self._push(group, priority, _NO_VERSION if version is None else version, train_step)

    def _push(self, group: Group, priority: int, version: int, train_step: int) -> None:
        key = group.task, group.status
        entry = _Entry(-priority, group.cursor, next(self._ticks), group, version, train_step)
        heapq.heappush(self._heaps[key], entry)
        self._oldest[key] = min(self._oldest[key], version)

    def take(self, task_name: str, group_status: Status) -> Group | None:
        """Take and return the first group in order; None without one."""
        heap = self._heaps[task_name, group_status]
        if not heap:
            return None
        group = heapq.heappop(heap).group
        self._ids.discard(group.group_id)
        return group

    def count(self, task_name: str, group_status: Status) -> int:
        return len(self._heaps[task_name, group_status])

    def has_room(self, task_name: str, reserved: int) -> bool:
        """Whether one more COMPLETED group fits beside those held and `reserved` others."""
        bound = self.max_groups_per_task
        return not bound or self.count(task_name, Status.COMPLETED) + reserved < bound

    def expire(
        self,
        task_name: str,
        *,
        train_step: int,
        stale_threshold: int,
        tail_tries: int = 0,
        statuses: Sequence[Status] = _EXPIRABLE,
    ) -> list[Group]:
        """Move stale groups to EXPIRED and return them; look at none if the oldest is fresh.

        With `tail_tries` > 0, a group that was tried at least that often goes to the front.
        """
        expired: list[Group] = []
        for status in statuses:
            key = task_name, status
            if staleness(train_step, self._oldest[key]) < stale_threshold:
                continue
            fresh: list[_Entry] = []
            stale: list[_Entry] = []
            for entry in self._heaps[key]:
                is_fresh = staleness(train_step, entry.oldest_version) < stale_threshold
                (fresh if is_fresh else stale).append(entry)
            heapq.heapify(fresh)
            self._heaps[key] = fresh
            self._oldest[key] = min((e.oldest_version for e in fresh), default=_NO_VERSION)
            for entry in sorted(stale, key=lambda entry: (entry.oldest_version, entry.tick)):
                group = entry.group
                group.move_to(Status.EXPIRED)
                is_tail = tail_tries > 0 and group.tries >= tail_tries
                self._push(group, max(-entry.rank, is_tail), entry.oldest_version, train_step)
                expired.append(group)
        return expired

    def first_entry(self, task_name: str, group_status: Status) -> tuple[int, int] | None:
        """(priority, since_step) of the group that would be taken next; None without one."""
        entries = self._heaps[task_name, group_status]
        return (-entries[0].rank, entries[0].since_step) if entries else None

    def __len__(self) -> int:
        return len(self._ids)
