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
from penstock.errors import EnginesLost, UserError
from penstock.rollout.progress import ProduceProgress
from penstock.rollout.replay_buffer import ReplayBuffer
from penstock.store.journal import Journal
from penstock.types import Group, Rollout, Status

IsValidSample = Callable[[list[Rollout]], bool]
ShouldContinue = Callable[[int, int], bool]


def default_is_valid_sample_fn(samples: list[Any], **kwargs: Any) -> bool:
    """Accept every group."""
    return True


def default_should_continue_fn(completed_count: int, batch_size: int, **kwargs: Any) -> bool:
    """Continue until the batch is full."""
    return completed_count < batch_size


class ProduceBatchStatus(StrEnum):
    """Why `produce_batch` returned."""

    NORMAL = "normal"  # the target is reached
    UPDATE_WEIGHT_AND_ABORT = "update_weight_and_abort"  # the update event is set
    EXPIRED_BATCH = "expired_batch"  # the step is already too far ahead of the weights


class AgentLoop:
    """Consumes rollouts to make, produces them generated and scored. May live in another process.

    A subclass defines `generate` for one rollout, or `generate_group` and `pause` for all of a group.
    """

    async def generate(self, rollout: Rollout, *, enable_partial_rollout: bool = False) -> Rollout:
        """Generate and score one rollout; it ends COMPLETED, ABORTED or FAILED.

        With `enable_partial_rollout` an aborted rollout continues from its tokens, otherwise from its
        prompt. What is raised fails this rollout only.
        """
        raise NotImplementedError

    async def generate_group(
        self, rollouts: list[Rollout], *, enable_partial_rollout: bool = False
    ) -> list[Rollout]:
        """Generate and score the unfinished rollouts at the same time; finished ones stay as they are."""
        running = self._running_samples()

        async def one(rollout: Rollout) -> Rollout:
            task = asyncio.create_task(
                self.generate(rollout, enable_partial_rollout=enable_partial_rollout)
            )
            running.add(task)
            try:
                return await task
            except asyncio.CancelledError:
                caller = asyncio.current_task()
                if caller is not None and caller.cancelling():
                    raise  # not a pause: the whole call was cancelled
                rollout.finish_reason = "abort"
                rollout.move_to(Status.ABORTED)
            except EnginesLost:
                raise
            except Exception as error:
                rollout.fail(f"agent: {type(error).__name__}: {error}")
            finally:
                running.discard(task)
            return rollout

        todo = [rollout for rollout in rollouts if rollout.status is not Status.COMPLETED]
        made = await asyncio.gather(*map(one, todo))
        by_id = {rollout.rollout_id: rollout for rollout in made}
        return [by_id.get(rollout.rollout_id, rollout) for rollout in rollouts]

    async def pause(self) -> None:
        """Abort what is running: `generate_group` calls return soon and keep partial tokens."""
        for task in self._running_samples():
            task.cancel()

    def _running_samples(self) -> set[asyncio.Task[Rollout]]:
        running: set[asyncio.Task[Rollout]] = self.__dict__.setdefault("_samples", set())
        return running


class GroupSampler(Protocol):
    """The part of a sampler that a strategy uses."""

    seed: int

    async def sample(
        self, task_name: str, group_status: Status | Sequence[Status] | None = None
    ) -> Group: ...


class GroupDesk(Protocol):
    """The part of a group runner that a strategy of the user's own works with, through its context."""

    async def draw(self, ctx: ProduceContext, statuses: tuple[Status, ...]) -> Group: ...

    async def generate(
        self, ctx: ProduceContext, group: Group, *, partial: bool | None
    ) -> Group: ...

    async def land(self, ctx: ProduceContext, group: Group) -> bool: ...


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
    runner: GroupDesk | None = None  # of the task's strategy

    @property
    def consumer_step(self) -> int:
        """The step that is trained next."""
        return self.progress.next_consumer_step

    @property
    def target_abs(self) -> int:
        """The groups that the task owes since the start of the run."""
        return self.progress.target(self.task_name)

    def should_abort(self) -> bool:
        """Return whether new weights or a pause ask for the end of `produce_batch`."""
        return self.update_event.is_set()

    async def expired_count(self) -> int:
        return self.replay_buffer.count_now(self.task_name, Status.EXPIRED)

    async def available_count(self) -> int:
        """Count the groups that were trained or are completed, to compare with `target_abs`."""
        return self.progress.consumed(self.task_name) + self.completed()

    async def sample_group(self, *, from_expired_pool: bool = False) -> Group:
        """Draw a group to generate: an aborted one, or a fresh prompt; from the expired ones first if asked.

        The group is in flight until `put_generated_group` takes it. Waits for: the end of a pause.
        """
        first = (Status.EXPIRED,) if from_expired_pool else ()
        return await self._desk().draw(self, (*first, Status.ABORTED))

    async def generate_group(
        self, group: Group, *, enable_partial_rollout: bool | None = None
    ) -> Group:
        """Generate and score a group; an error fails its unfinished members. None: as [produce] says."""
        return await self._desk().generate(self, group, partial=enable_partial_rollout)

    async def put_generated_group(self, group: Group) -> bool:
        """Journal, count and buffer a group; return whether it may be trained.

        A completed group that the validity rule refuses is dropped. An aborted group waits for its next
        try, a failed one too, until it has had `max_tries`.
        """
        return await self._desk().land(self, group)

    def _desk(self) -> GroupDesk:
        if self.runner is None:
            raise UserError(
                "context: got no runner, allowed: ProduceContext(..., runner=strategy.runner)"
            )
        return self.runner

    def completed(self) -> int:
        """Count the completed groups in the buffer."""
        return self.replay_buffer.count_now(self.task_name, Status.COMPLETED)

    def put(self, group: Group, *, is_tail: bool) -> None:
        """Put a group into the buffer; a tail group goes to the front."""
        step = self.progress.next_consumer_step
        self.replay_buffer.put_now(group, priority=int(is_tail), train_step=step)
