"""What one call of a produce strategy is given, and what it may answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

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


class GroupSampler(Protocol):
    """What a strategy needs of a sampler."""

    seed: int

    async def sample(
        self, task_name: str, group_status: Status | Sequence[Status] | None = None
    ) -> Group: ...


@dataclass(slots=True, kw_only=True)
class ProduceContext:
    """Everything a strategy works with in one call; it holds no state of its own."""

    agent_loop: Any  # an AgentLoop, or a Ray actor of one
    sampler: GroupSampler
    replay_buffer: ReplayBuffer
    task_batch_size: int  # groups of this task in one step
    task_name: str
    train_step: int  # the step that is produced for
    update_event: asyncio.Event  # set: stop scheduling, weights change or a pause was asked
    model_step: int  # policy version of the weights that generate
    progress: ProduceProgress
    is_valid_sample_fn: IsValidSample | None = None  # None: that of the strategy's config
    stale_threshold: int | None = None  # None: that of the strategy
    journal: Journal | None = None


async def call(target: Any, method: str, *args: Any, **kwargs: Any) -> Any:
    """Call a method of a local object or of a Ray actor; the caller cannot tell which."""
    bound = getattr(target, method)
    remote = getattr(bound, "remote", None)
    return await (bound if remote is None else remote)(*args, **kwargs)
