"""The state of one task, and the parts that its strategy works with.

The producer makes one `ProduceContext` per task and updates its step and version; the strategy and
its group runner read it. A user who drives a strategy without a producer fills one in by hand.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from penstock.data.sampler import PromptsExhausted
from penstock.journal import Journal
from penstock.produce.progress import ProduceProgress
from penstock.produce.replay_buffer import ReplayBuffer
from penstock.types import Group, Rollout, Status

IsValidSample = Callable[[list[Rollout]], bool]
ShouldContinue = Callable[[int, int], bool]


class ProduceBatchStatus(StrEnum):
    """Why `produce_batch` returned."""

    NORMAL = "normal"  # the target is reached
    UPDATE_WEIGHT_AND_ABORT = "update_weight_and_abort"  # the update event is set
    EXPIRED_BATCH = "expired_batch"  # the step is already too far ahead of the weights


class AgentLoop(Protocol):
    """Consumes rollouts to make, produces them generated and scored. May live in another process."""

    async def generate_group(
        self, rollouts: list[Rollout], *, enable_partial_rollout: bool = False
    ) -> list[Rollout]:
        """Generate and score the unfinished rollouts; each ends COMPLETED, ABORTED or FAILED.

        Finished rollouts stay as they are. With `enable_partial_rollout` an aborted rollout continues
        from its tokens, otherwise from its prompt. An error in one rollout fails only that rollout.
        """

    async def pause(self) -> None:
        """Abort what is running: `generate_group` calls return soon and keep partial tokens."""


class GroupSampler(Protocol):
    """The part of a sampler that a strategy uses."""

    seed: int

    async def sample(
        self, task_name: str, group_status: Status | Sequence[Status] | None = None
    ) -> Group: ...


class NoJournal:
    """Stands in for the journal where nothing has to survive a crash."""

    def drawn(self, group: Group) -> None: ...

    def retried(self, group: Group, reason: str) -> None: ...

    def expired(self, group: Group) -> None: ...

    def dropped(self, group: Group, reason: str, *, detail: str = "") -> None: ...

    async def landed(self, group: Group) -> None: ...

    async def filtered(self, group: Group) -> None: ...

    async def failed(self, group: Group) -> None: ...


@dataclass(slots=True, kw_only=True)
class ProduceContext:
    """The state of one task: everything that its strategy reads."""

    agent_loop: Any  # an AgentLoop, or a Ray actor of one
    sampler: GroupSampler
    replay_buffer: ReplayBuffer
    task_batch_size: int  # groups of this task in one step
    task_name: str
    train_step: int  # the step to produce for
    update_event: asyncio.Event  # set: stop launching, because of new weights or a pause
    model_step: int  # policy version of the weights that generate
    progress: ProduceProgress
    is_valid_sample_fn: IsValidSample | None = None  # None: the rule of the strategy's config
    stale_threshold: int | None = None  # None: the threshold of the strategy
    journal: Journal | NoJournal = field(default_factory=NoJournal)
    exhausted: PromptsExhausted | None = None  # set when no fresh prompt is left
    idle_since_change: int | None = None  # the producer's change count that this task sleeps on

    def completed(self) -> int:
        """Count the completed groups in the buffer."""
        return self.replay_buffer.count_now(self.task_name, Status.COMPLETED)

    def put(self, group: Group, *, is_tail: bool) -> None:
        """Put a group into the buffer; a tail group goes to the front."""
        step = self.progress.next_consumer_step
        self.replay_buffer.put_now(group, priority=int(is_tail), train_step=step)
