"""When to launch groups, and which groups are too old.

Sync and async are one loop: sync is async without run-ahead, staleness and oversampling. A strategy
decides how many groups of its task are in flight; its group runner draws, generates and lands them. It
trains nothing and does not decide when a step is taken.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from enum import StrEnum
from typing import Any

from pydantic import Field

from penstock.config import ProduceConfig, ProduceSettings
from penstock.config.plugins import load
from penstock.errors import UserError
from penstock.rollout.group_runner import GroupRunner, IsValidSample, ProduceContext
from penstock.types import Status, staleness

ShouldContinue = Callable[[int, int], bool]

STRATEGIES = {
    "async": "penstock.rollout.strategy:AsyncProduceStrategy",
    "sync": "penstock.rollout.strategy:SyncProduceStrategy",
}


class ProduceBatchStatus(StrEnum):
    """Why `produce_batch` returned."""

    NORMAL = "normal"  # the target is reached
    UPDATE_WEIGHT_AND_ABORT = "update_weight_and_abort"  # the update event is set
    EXPIRED_BATCH = "expired_batch"  # the step is already too far ahead of the weights


def default_is_valid_sample_fn(samples: list[Any], **kwargs: Any) -> bool:
    """Accept every group."""
    return True


def default_should_continue_fn(completed_count: int, batch_size: int, **kwargs: Any) -> bool:
    """Continue until the batch is full."""
    return completed_count < batch_size


def calculate_stale_threshold(max_staleness: int, sync_weights_interval: int = 1) -> int:
    """The staleness at which a sample expires; `max_staleness` counts sync periods."""
    if max_staleness < 0:
        raise ValueError(f"max_staleness: got {max_staleness}, allowed: 0 or more")
    if sync_weights_interval < 1:
        raise ValueError(f"sync_weights_interval: got {sync_weights_interval}, allowed: 1 or more")
    return (max_staleness + 1) * sync_weights_interval


class ProduceStrategyConfig(ProduceSettings):
    """The settings of one task: the keys of [produce], and its two rules as functions."""

    max_staleness: int = Field(0, ge=0)
    is_valid_sample_fn: IsValidSample = default_is_valid_sample_fn
    """Asked once for every completed group; may be a coroutine function."""
    should_continue_fn: ShouldContinue = default_should_continue_fn
    """Given (completed, batch size), says whether to launch more groups."""

    def build(
        self, *, sync_weights_interval: int = 1, rollout_controller: Any = None
    ) -> ProduceStrategy:
        """Build the strategy that `strategy` names.

        rollout_controller: an object that wants to know whether aborted responses continue; its
        `set_enable_partial_rollout` is called once.
        """
        strategy = load_strategy(self.strategy)
        if rollout_controller is not None:
            rollout_controller.set_enable_partial_rollout(self.enable_partial_rollout)
        return strategy(self, sync_weights_interval=sync_weights_interval)


class AsyncProduceStrategyConfig(ProduceStrategyConfig):
    """The settings of a task that is generated ahead of the trainer."""


class SyncProduceStrategyConfig(ProduceStrategyConfig):
    """The same settings for one on-policy batch a step: nothing is generated for a later step."""

    strategy: str = "sync"


def strategy_config(
    produce: ProduceConfig, is_valid_sample_fn: IsValidSample = default_is_valid_sample_fn
) -> ProduceStrategyConfig:
    """The settings that a [produce] table gives to a strategy."""
    fields = {name: getattr(produce, name) for name in ProduceSettings.model_fields}
    fields["max_staleness"] = produce.staleness_bound
    fields["is_valid_sample_fn"] = is_valid_sample_fn
    if produce.should_continue:
        fields["should_continue_fn"] = load("produce.should_continue", produce.should_continue, {})
    is_sync = produce.strategy == "sync"
    return (SyncProduceStrategyConfig if is_sync else AsyncProduceStrategyConfig)(**fields)


class ProduceStrategy:
    """Decides when one task launches groups. Subclass it for a strategy of your own.

    Consumes prompts and groups to retry, produces landed groups. Waits for: landings, the update event,
    the end of a back-off. Woken by: `changed`.
    """

    runs_ahead = True  # False: one step at a time; groups of the weights in force never expire

    def __init__(self, config: ProduceStrategyConfig, *, sync_weights_interval: int = 1) -> None:
        self.config = config
        self.sync_weights_interval = sync_weights_interval
        self.stale_threshold = calculate_stale_threshold(
            config.max_staleness, sync_weights_interval
        )
        self.runner = GroupRunner(config, config.is_valid_sample_fn)
        self.changed = self.runner.changed

    # -- questions ----------------------------------------------------------------------------

    def is_model_expired(self, train_step: int, model_step: int) -> bool:
        """Whether groups generated now would be too old for `train_step`."""
        return self.runs_ahead and staleness(train_step, model_step) >= self.stale_threshold

    def furthest_step(self, model_step: int, next_consumer_step: int) -> int:
        """The last step to produce for with these weights."""
        furthest = model_step + self.stale_threshold
        return max(furthest, next_consumer_step) if self.runs_ahead else next_consumer_step

    def pending_task_count(self) -> int:
        """The number of groups in flight."""
        return len(self.runner.in_flight)

    def should_wait_for_stragglers(self, train_step: int) -> bool:
        """Whether a group in flight would expire if `train_step` did not wait for it.

        Without oversampling a step waits for all such groups, so none is generated in vain. With
        oversampling a step leaves stragglers behind, but waits for groups that were tried
        `max_tries` times.
        """
        tail_only = self.config.over_sample_threshold > 0
        oldest = self.runner.oldest_version(tail_only=tail_only)
        return oldest is not None and staleness(train_step + 1, oldest) >= self.stale_threshold

    # -- producing ----------------------------------------------------------------------------

    async def produce_batch(self, ctx: ProduceContext) -> ProduceBatchStatus:
        """Launch groups until the task's target is available; return why it stopped."""
        if ctx.should_abort():
            return ProduceBatchStatus.UPDATE_WEIGHT_AND_ABORT
        if self.is_model_expired(ctx.train_step, ctx.model_step):
            return ProduceBatchStatus.EXPIRED_BATCH
        loop = asyncio.get_running_loop()
        started = loop.time()
        # done: the event was set, even if it was cleared since
        update = asyncio.ensure_future(ctx.update_event.wait())
        update.add_done_callback(lambda _: None if update.cancelled() else self.changed.notify())
        try:
            self.expire(ctx)
            statuses, extra = self.plan(ctx)
            while True:
                seen = self.changed.count
                if self.runner.fault is not None:
                    raise self.runner.fault
                if ctx.should_abort() or update.done():
                    return ProduceBatchStatus.UPDATE_WEIGHT_AND_ABORT
                self.expire(ctx)
                missing = ctx.target_abs - await ctx.available_count()
                completed = max(0, ctx.task_batch_size - missing)
                if not self.config.should_continue_fn(completed, ctx.task_batch_size):
                    return ProduceBatchStatus.NORMAL
                hold_s = self.runner.failures.hold_s(loop.time())
                allowed = missing + extra
                if hold_s == 0 and self.runner.launch(ctx, statuses, allowed):
                    continue
                if allowed <= 0 and not self.pending_task_count():
                    return ProduceBatchStatus.NORMAL  # the rule wants more than may be launched
                await self.changed.wait_after(seen, hold_s or None)
        finally:
            update.cancel()
            self.runner.account.produce_s += loop.time() - started

    def expire(self, ctx: ProduceContext, train_step: int | None = None) -> None:
        """Move the groups that are too old for `train_step` (None: the next step) to EXPIRED."""
        statuses = [Status.COMPLETED]
        if self.config.enable_partial_rollout:
            statuses.append(Status.ABORTED)
        step = ctx.consumer_step if train_step is None else train_step
        if not self.runs_ahead:  # older weights: of an async run that is resumed as sync
            step = min(step, ctx.model_step + 1)
        expired = ctx.replay_buffer.expire(
            ctx.task_name,
            train_step=step,
            stale_threshold=self.stale_threshold,
            tail_tries=self.config.max_tries,
            statuses=statuses,
        )
        for group in expired:
            self.runner.counters["expired"] += 1
            ctx.journal.expired(group)

    def plan(self, ctx: ProduceContext) -> tuple[tuple[Status, ...], int]:
        """The statuses of groups to draw before fresh prompts, and the oversampling."""
        if self._is_tail_call(ctx):
            self.runner.counters["tail_calls"] += 1
            return (Status.EXPIRED, Status.ABORTED), 0
        extra = math.ceil(self.config.over_sample_threshold * ctx.task_batch_size)
        if self.config.tail_batch_trigger_size > 0:
            return (Status.ABORTED,), extra  # expired groups wait for their tail batch
        return (Status.ABORTED, Status.EXPIRED), extra

    def _is_tail_call(self, ctx: ProduceContext) -> bool:
        """Whether this call draws expired and aborted groups before anything else."""
        buffer, trigger = ctx.replay_buffer, self.config.tail_batch_trigger_size
        if trigger > 0:
            if buffer.count(ctx.task_name, Status.EXPIRED) >= trigger:
                return True
            first = buffer.first_entry(ctx.task_name, Status.EXPIRED)
            if first is not None:  # too few for a tail batch, but they must not starve
                waited = ctx.consumer_step - first[1]
                if waited >= self.config.max_tries * self.stale_threshold:
                    return True
        firsts = (buffer.first_entry(ctx.task_name, s) for s in (Status.EXPIRED, Status.ABORTED))
        return any(first is not None and first[0] > 0 for first in firsts)

    async def pause_produce(self, ctx: ProduceContext) -> float:
        """Abort all groups and wait for them to land; return the seconds it took."""
        return await self.runner.pause(ctx)


def load_strategy(name: str) -> type[ProduceStrategy]:
    """The class that `produce.strategy` names."""
    strategy = load("produce.strategy", name, STRATEGIES)
    if not (isinstance(strategy, type) and issubclass(strategy, ProduceStrategy)):
        raise UserError(
            f"produce.strategy: got {name!r}, "
            "allowed: a subclass of penstock.rollout.ProduceStrategy"
        )
    return strategy


class AsyncProduceStrategy(ProduceStrategy):
    """Run ahead of the trainer as far as the staleness bound allows."""


class SyncProduceStrategy(AsyncProduceStrategy):
    """The async strategy at staleness 0, for one step at a time.

    Groups of the weights in force never expire: the producer calls a sync strategy only with weights
    that are new enough.
    """

    runs_ahead = False
