"""When groups are launched, and what becomes of them when they land.

Sync and async are one loop: sync is async without run-ahead, staleness and oversampling. A strategy
launches until its absolute target is covered, and each group lands itself: journalled, then put into
the buffer, tried again, or dropped with a reason. It trains nothing and decides nothing about steps.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from penstock.config import ProduceConfig
from penstock.data.sampler import PromptsExhausted
from penstock.produce.context import (
    IsValidSample,
    ProduceBatchStatus,
    ProduceContext,
    ShouldContinue,
)
from penstock.produce.group_runner import Lander
from penstock.produce.pending import InFlight
from penstock.types import Group, Status, staleness


def calculate_stale_threshold(max_staleness: int, sync_weights_interval: int = 1) -> int:
    """The staleness at which a sample is expired; `max_staleness` counts sync periods."""
    if max_staleness < 0:
        raise ValueError(f"max_staleness: got {max_staleness}, allowed: 0 or more")
    if sync_weights_interval < 1:
        raise ValueError(f"sync_weights_interval: got {sync_weights_interval}, allowed: 1 or more")
    return (max_staleness + 1) * sync_weights_interval


def accept_all(rollouts: list[Any]) -> bool:
    """The default validity rule."""
    return True


def until_batch_is_full(completed: int, batch: int) -> bool:
    """The default rule for going on."""
    return completed < batch


class SyncProduceStrategyConfig(BaseModel):
    """One batch a step, on-policy: nothing is generated for a later step."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    is_valid_sample_fn: IsValidSample = accept_all  # asked once, of completed groups only
    should_continue_fn: ShouldContinue = until_batch_is_full
    max_tries: int = Field(3, ge=1)
    max_failure_share: float = Field(0.5, gt=0, le=1)
    failure_window: int = Field(32, ge=1)
    retry_backoff_s: float = Field(0.1, ge=0)
    pause_timeout_s: float = Field(60.0, gt=0)
    max_refused_in_a_row: int = Field(1000, ge=1)

    @property
    def full(self) -> AsyncProduceStrategyConfig:
        """The same settings in the one form that strategies work with."""
        return AsyncProduceStrategyConfig(**dict(self))

    def build(self, *, sync_weights_interval: int = 1) -> ProduceStrategy:
        return SyncProduceStrategy(self, sync_weights_interval=sync_weights_interval)


class AsyncProduceStrategyConfig(SyncProduceStrategyConfig):
    """Run ahead of the trainer as far as `max_staleness` allows."""

    over_sample_threshold: float = Field(0.0, ge=0)
    enable_partial_rollout: bool = False
    max_staleness: int = Field(0, ge=0)
    tail_batch_trigger_size: int = Field(0, ge=0)

    @property
    def full(self) -> AsyncProduceStrategyConfig:
        return self

    def build(self, *, sync_weights_interval: int = 1) -> ProduceStrategy:
        return AsyncProduceStrategy(self, sync_weights_interval=sync_weights_interval)


def strategy_config(
    produce: ProduceConfig, is_valid_sample_fn: IsValidSample = accept_all
) -> SyncProduceStrategyConfig:
    """The strategy's config for a [produce] table."""
    shared = set(SyncProduceStrategyConfig.model_fields) & set(ProduceConfig.model_fields)
    fields = {name: getattr(produce, name) for name in shared}
    fields["is_valid_sample_fn"] = is_valid_sample_fn
    if produce.strategy == "sync":
        return SyncProduceStrategyConfig(**fields)
    return AsyncProduceStrategyConfig(
        **fields,
        over_sample_threshold=produce.over_sample_threshold,
        enable_partial_rollout=produce.enable_partial_rollout,
        max_staleness=produce.max_staleness,
        tail_batch_trigger_size=produce.tail_batch_trigger_size,
    )


class ProduceStrategy:
    """Consumes prompts and retries, produces landed groups.

    Waits for: landings, the update event, the end of a back-off. Woken by: `changed`.
    """

    runs_ahead = True  # past the step that is consumed next

    def __init__(
        self, config: SyncProduceStrategyConfig, *, sync_weights_interval: int = 1
    ) -> None:
        self.config = config.full
        self.sync_weights_interval = sync_weights_interval
        self.stale_threshold = calculate_stale_threshold(
            self.config.max_staleness, sync_weights_interval
        )
        self._lander = Lander(self.config)
        self.changed = self._lander.changed
        self.pending = self._lander.pending
        self.drawn = 0  # fresh prompts

    # -- what others ask ----------------------------------------------------------------------

    @property
    def dropped(self) -> Counter[str]:
        """Groups that ended without training, by reason."""
        return self._lander.dropped

    @property
    def counters(self) -> Counter[str]:
        """Things that happened and lost nothing: retries, aborts, pause time-outs."""
        return self._lander.counters

    def is_model_expired(self, train_step: int, model_step: int) -> bool:
        """Whether what is generated now would be too old for `train_step`."""
        return staleness(train_step, model_step) >= self.stale_threshold

    def furthest_step(self, model_step: int, next_consumer_step: int) -> int:
        """The last step worth producing for with these weights."""
        if not self.runs_ahead:
            return next_consumer_step
        return max(model_step + self.stale_threshold, next_consumer_step)

    def pending_task_count(self) -> int:
        return len(self.pending)

    def should_wait_for_stragglers(self, train_step: int) -> bool:
        """Whether a group in flight must be trained at `train_step` or expires.

        Without oversampling every such group is waited for, so none is generated in vain. With it,
        stragglers are left behind, but only `max_tries` times: then they are waited for as well.
        """
        tail_only = self.config.over_sample_threshold > 0
        oldest = self.pending.oldest_in_flight(tail_only=tail_only)
        return oldest is not None and staleness(train_step + 1, oldest) >= self.stale_threshold

    def raise_fault(self) -> None:
        """Raise what a landing group ran into: a journal that cannot write, too many failures."""
        if self._lander.fault is not None:
            raise self._lander.fault

    # -- producing ----------------------------------------------------------------------------

    async def produce_batch(self, ctx: ProduceContext) -> ProduceBatchStatus:
        """Launch until the target of the context's progress is available."""
        if self.is_model_expired(ctx.train_step, ctx.model_step):
            return ProduceBatchStatus.EXPIRED_BATCH
        loop = asyncio.get_running_loop()
        started = loop.time()
        wake = asyncio.ensure_future(ctx.update_event.wait())
        wake.add_done_callback(self._wake_on_update)
        try:
            return await self._produce(ctx, loop)
        finally:
            wake.cancel()
            ctx.progress.produce_time_s += loop.time() - started

    def _wake_on_update(self, update: asyncio.Future[Any]) -> None:
        if not update.cancelled():
            self.changed.notify()

    async def _produce(
        self, ctx: ProduceContext, loop: asyncio.AbstractEventLoop
    ) -> ProduceBatchStatus:
        self.expire(ctx)
        statuses, extra = self._plan(ctx)
        while True:
            seen = self.changed.count
            self.raise_fault()
            if ctx.update_event.is_set():
                return ProduceBatchStatus.UPDATE_WEIGHT_AND_ABORT
            self.expire(ctx)
            missing = ctx.progress.target(ctx.task_name) - self.available(ctx)
            completed = max(0, ctx.task_batch_size - missing)
            if not self.config.should_continue_fn(completed, ctx.task_batch_size):
                return ProduceBatchStatus.NORMAL
            hold_s = self._lander.failures(ctx.task_name).hold_s(loop.time())
            if hold_s == 0 and await self._launch_one(ctx, statuses, missing + extra):
                continue
            await self.changed.wait_after(seen, hold_s or None)

    def available(self, ctx: ProduceContext) -> int:
        """Groups of the absolute target that are there: consumed, or completed in the buffer."""
        completed = ctx.replay_buffer.count_now(ctx.task_name, Status.COMPLETED)
        return ctx.progress.consumed(ctx.task_name) + completed

    def expire(self, ctx: ProduceContext, train_step: int | None = None) -> None:
        """Move what is too old for the next step (or that step) to EXPIRED."""
        statuses = [Status.COMPLETED]
        if self.config.enable_partial_rollout:
            statuses.append(Status.ABORTED)
        expired = ctx.replay_buffer.expire_now(
            ctx.task_name,
            train_step=ctx.progress.next_consumer_step if train_step is None else train_step,
            stale_threshold=ctx.stale_threshold or self.stale_threshold,
            tail_tries=self.config.max_tries,
            statuses=statuses,
        )
        for group in expired:
            self.counters["expired"] += 1
            if ctx.journal is not None:
                ctx.journal.expired(group)

    def _plan(self, ctx: ProduceContext) -> tuple[tuple[Status, ...], int]:
        """Where this call draws from before fresh prompts, and how many groups it oversamples."""
        if self._is_tail_call(ctx):
            return (Status.EXPIRED, Status.ABORTED), 0
        extra = math.ceil(self.config.over_sample_threshold * ctx.task_batch_size)
        if self.config.tail_batch_trigger_size > 0:
            return (Status.ABORTED,), extra  # expired groups wait for their tail batch
        return (Status.ABORTED, Status.EXPIRED), extra

    def _is_tail_call(self, ctx: ProduceContext) -> bool:
        buffer, trigger = ctx.replay_buffer, self.config.tail_batch_trigger_size
        if trigger > 0:
            if buffer.count_now(ctx.task_name, Status.EXPIRED) >= trigger:
                return True
            first = buffer.first_entry(ctx.task_name, Status.EXPIRED)
            if first is not None:  # too few for a tail batch, but they must not starve
                waited = ctx.progress.next_consumer_step - first[1]
                if waited >= self.config.max_tries * self.stale_threshold:
                    return True
        firsts = (buffer.first_entry(ctx.task_name, s) for s in (Status.EXPIRED, Status.ABORTED))
        return any(first is not None and first[0] > 0 for first in firsts)

    async def _launch_one(
        self, ctx: ProduceContext, statuses: tuple[Status, ...], cap: int
    ) -> bool:
        if not ctx.replay_buffer.room(ctx.task_name, reserved=len(self.pending)):
            return False

        async def draw() -> InFlight:
            return self._lander.issue(ctx, await self._next_group(ctx, statuses))

        try:
            return await self.pending.schedule(
                cap=cap, draw=draw, run=lambda entry: self._lander.generate(ctx, entry)
            )
        except PromptsExhausted:
            if not len(self.pending):
                raise
            return False  # what is in flight may still fill the batch

    async def _next_group(self, ctx: ProduceContext, statuses: tuple[Status, ...]) -> Group:
        resumed = ctx.replay_buffer.take_now(ctx.task_name, Status.INIT)
        if resumed is not None:  # it was in flight when the run was interrupted
            if ctx.journal is not None:
                ctx.journal.retried(resumed, "resumed")
            return resumed
        group = await ctx.sampler.sample(ctx.task_name, statuses)
        if group.tries == 0 and group.status is Status.INIT:
            self.drawn += 1
            if ctx.journal is not None:
                ctx.journal.drawn(group)
        else:
            self.counters["retried"] += 1
            if ctx.journal is not None:
                ctx.journal.retried(group, group.status.value)
        return group

    # -- pausing ------------------------------------------------------------------------------

    async def pause_produce(self, ctx: ProduceContext) -> float:
        """Abort what runs and wait until it has landed; seconds it took.

        At the time-out what is left goes back to the buffer as ABORTED with the tokens it has.
        """
        return await self._lander.pause(ctx)

    async def cancel(self, ctx: ProduceContext) -> None:
        """End everything at once, without asking the agent loop; groups go back to the buffer."""
        await self._lander.cancel(ctx)


class AsyncProduceStrategy(ProduceStrategy):
    """Runs ahead of the trainer as far as its staleness bound allows."""


class SyncProduceStrategy(ProduceStrategy):
    """Makes exactly the groups of the next step."""

    runs_ahead = False
