"""One task at work: its context, its counts, and how it comes back after a crash."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock.data.sampler import PromptsExhausted, Sampler
from penstock.journal import InFlightRecord
from penstock.produce.context import IsValidSample, ProduceContext
from penstock.produce.group_runner import abort_unfinished
from penstock.produce.snapshot import TaskSnapshot
from penstock.produce.strategy import ProduceStrategy
from penstock.types import Group, Status


@dataclass(slots=True, kw_only=True)
class ProduceTask:
    """One task: what it draws from, who generates, and by which rules."""

    name: str
    weight: float
    strategy: ProduceStrategy
    agent_loop: Any
    sampler: Sampler
    is_valid_sample_fn: IsValidSample | None = None


class Lane:
    """The state of one task in the producer."""

    def __init__(self, task: ProduceTask, ctx: ProduceContext) -> None:
        self.name = task.name
        self.strategy = task.strategy
        self.sampler = task.sampler
        self.ctx = ctx  # one for the life of the lane; its step and version move on
        self.exhausted: PromptsExhausted | None = None
        self.idle_since_change: int | None = None  # the change count it has seen and sleeps on
        self.drawn_before = 0  # by an earlier part of the run
        self.dropped_before: dict[str, int] = {}

    def completed(self) -> int:
        return self.ctx.replay_buffer.count_now(self.name, Status.COMPLETED)

    def has_work(self) -> bool:
        """Whether something in flight may still become a completed group."""
        return self.strategy.pending_task_count() > 0

    def take(self, step: int, num_groups: int) -> list[Group]:
        """The step's groups in cursor order; what is too old for it was expired before."""
        taken: list[Group] = []
        for _ in range(num_groups):
            group = self.ctx.replay_buffer.take_now(self.name, Status.COMPLETED)
            assert group is not None, "counted before it was taken"
            assert group.staleness(step) < self.strategy.stale_threshold, group.group_id
            taken.append(group)
        self.ctx.progress.mark_consumed(self.name, num_groups)
        return sorted(taken, key=lambda group: group.cursor)

    def put_back(self, group: Group) -> None:
        """A group of an earlier part of the run that was buffered."""
        retry = group.status in (Status.ABORTED, Status.EXPIRED)
        tail = retry and group.tries >= self.strategy.config.max_tries
        next_step = self.ctx.progress.next_consumer_step
        self.ctx.replay_buffer.put_now(group, priority=int(tail), train_step=next_step)

    def reissue(self, record: InFlightRecord) -> None:
        """A group that was in flight is issued again, as it was: same tries, same seeds."""
        group = record.group
        if group is None:
            group = self.sampler.group_at(record.cursor)
        elif group.status is Status.COMPLETED:  # what it holds had expired before it was issued
            group.move_to(Status.EXPIRED)
        else:
            abort_unfinished(group)
        group.tries = record.tries
        self.put_back(group)

    def snapshot(self) -> TaskSnapshot:
        buffer, strategy = self.ctx.replay_buffer, self.strategy
        counts = {status: buffer.count_now(self.name, status) for status in Status}
        dropped = dict(self.dropped_before)
        for reason, number in strategy.dropped.items():
            dropped[reason] = dropped.get(reason, 0) + number
        return TaskSnapshot(
            name=self.name,
            drawn=self.drawn_before + strategy.drawn,
            trained=self.ctx.progress.consumed(self.name),
            buffered=sum(counts.values()) - counts[Status.INIT],
            in_flight=strategy.pending_task_count() + counts[Status.INIT],
            dropped=dropped,
            ready=counts[Status.COMPLETED],
            aborted=counts[Status.ABORTED],
            expired=counts[Status.EXPIRED],
            counters=dict(strategy.counters),
        )

    def state_dict(self) -> dict[str, Any]:
        now = self.snapshot()
        return {
            "drawn": now.drawn,
            "dropped": dict(now.dropped),
            "sampler": self.sampler.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.drawn_before = state["drawn"] - self.strategy.drawn
        self.dropped_before = dict(state["dropped"])
        self.strategy.dropped.clear()
        self.sampler.load_state_dict(state["sampler"])
