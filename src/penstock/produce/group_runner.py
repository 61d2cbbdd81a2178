"""One group from launch to landing, and the pause that cuts it short.

Every launched group is one asyncio task that ends by landing its own group: completed, refused,
aborted, or failed for good. Faults of a group stay in that group; only a journal that cannot write and the
failure policy's limit are faults of the run, and are kept in `fault` for whoever waits.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from typing import Protocol

from penstock.data.sampler import rollout_seed
from penstock.errors import PenstockError, RunError
from penstock.produce.context import IsValidSample, ProduceContext, call
from penstock.produce.failures import FailurePolicy
from penstock.produce.pending import InFlight, PendingSet
from penstock.produce.signal import Signal
from penstock.types import Group, Rollout, Status

_ABORT_AGAIN_S = 5.0
_CANCEL_WAIT_S = 5.0
_FINISHED = frozenset({"stop", "length", "tool_calls"})


def renew(group: Group, *, run_seed: int, keep_partial: bool, model_step: int) -> None:
    """Make a group ready to be issued: finished members stay, the others go on or start again."""
    for index, rollout in enumerate(group.rollouts):
        if rollout.status is Status.COMPLETED:
            continue
        finished = rollout.finish_reason in _FINISHED and rollout.status is not Status.EXPIRED
        partial = keep_partial and rollout.status is Status.ABORTED and len(rollout.response_ids)
        if finished or partial:  # only its score is missing, or it goes on from its tokens
            rollout.move_to(Status.INIT)
            rollout.error = ""
        else:
            rollout.restart()
            rollout.seed = rollout_seed(run_seed, group.group_id, index, group.tries)
        rollout.issued_version = model_step
    group.error = ""


def abort_unfinished(group: Group) -> None:
    """Every member that is not finished becomes ABORTED and keeps its tokens."""
    for rollout in group.rollouts:
        if rollout.status is Status.FAILED:
            rollout.move_to(Status.INIT)
        if rollout.status is not Status.COMPLETED:
            rollout.move_to(Status.ABORTED)


def fail_unfinished(group: Group, reason: str) -> None:
    for rollout in group.rollouts:
        if rollout.status not in (Status.COMPLETED, Status.FAILED):
            rollout.error = reason
            rollout.move_to(Status.FAILED)


class LandingSettings(Protocol):
    """What of a strategy's settings decides on the life of one group."""

    @property
    def is_valid_sample_fn(self) -> IsValidSample: ...
    @property
    def max_tries(self) -> int: ...
    @property
    def enable_partial_rollout(self) -> bool: ...
    @property
    def pause_timeout_s(self) -> float: ...
    @property
    def max_refused_in_a_row(self) -> int: ...
    @property
    def max_failure_share(self) -> float: ...
    @property
    def failure_window(self) -> int: ...
    @property
    def retry_backoff_s(self) -> float: ...


class Lander:
    """Owns the groups in flight of one strategy."""

    def __init__(self, config: LandingSettings) -> None:
        self._config = config
        self.pending = PendingSet()
        self.changed = Signal()
        self.dropped: Counter[str] = Counter()
        self.counters: Counter[str] = Counter()
        self.fault: BaseException | None = None
        self._failures: FailurePolicy | None = None
        self._refused_in_a_row = 0

    def failures(self, task_name: str) -> FailurePolicy:
        if self._failures is None:
            self._failures = FailurePolicy(
                task_name,
                max_failure_share=self._config.max_failure_share,
                failure_window=self._config.failure_window,
                retry_backoff_s=self._config.retry_backoff_s,
            )
        return self._failures

    def issue(self, ctx: ProduceContext, group: Group) -> InFlight:
        """Make a drawn group ready for its next try."""
        tail = group.tries >= self._config.max_tries
        self._renew(ctx, group)
        return InFlight(group, _oldest(group, ctx.model_step), tail)

    def _renew(self, ctx: ProduceContext, group: Group) -> None:
        renew(
            group,
            run_seed=ctx.sampler.seed,
            keep_partial=self._config.enable_partial_rollout,
            model_step=ctx.model_step,
        )
        group.tries += 1

    async def generate(self, ctx: ProduceContext, entry: InFlight) -> None:
        """The whole life of one launched group."""
        try:
            failures = 0
            while await self._attempt(ctx, entry, failures):
                failures += 1
                await self._back_off(ctx, failures)
                if self.pending.closed or self.fault:  # a pause, or the end of the run
                    await self._abort_instead_of_retry(ctx, entry)
                    return
                if entry.landing:
                    return  # a pause gave up on it
                if ctx.journal is not None:
                    ctx.journal.retried(entry.group, "failed")
                self.counters["retried"] += 1
                self._renew(ctx, entry.group)
        except Exception as error:
            self.fault = self.fault or error
        finally:
            self.changed.notify()

    async def _attempt(self, ctx: ProduceContext, entry: InFlight, failures: int) -> bool:
        """Generate once; True when it failed and is to be tried again."""
        group = entry.group
        tokens_before = group.num_response_tokens
        if self.pending.closed:  # a pause came before the first step of this task
            abort_unfinished(group)
        else:
            await self._call_agent(ctx, group)
        if not self.pending.claim(entry):
            return False
        try:
            refused = await self._is_refused(ctx, group)
            ctx.progress.produced_tokens += max(0, group.num_response_tokens - tokens_before)
            if group.status is Status.FAILED and failures + 1 < self._config.max_tries:
                await self._count_failure(ctx, group)
                self.pending.release(entry, _oldest(group, ctx.model_step))
                return True
            await self._land(ctx, group, entry.tail, refused)
        finally:
            if entry.landing:
                self.pending.remove(entry)
        return False

    async def _call_agent(self, ctx: ProduceContext, group: Group) -> None:
        """Errors of the agent loop become failures of the group's unfinished members."""
        kept = [len(rollout.response_ids) for rollout in group.rollouts]
        try:
            returned = await call(
                ctx.agent_loop,
                "generate_group",
                group.rollouts,
                enable_partial_rollout=self._config.enable_partial_rollout,
            )
            _accept(group, returned)
            _check_versions(group, kept)
        except Exception as error:
            fail_unfinished(group, f"{type(error).__name__}: {error}")

    async def _is_refused(self, ctx: ProduceContext, group: Group) -> bool:
        """Ask the validity rule, once and only of completed groups; its errors fail the group."""
        if group.status is not Status.COMPLETED:
            return False
        rule = ctx.is_valid_sample_fn or self._config.is_valid_sample_fn
        try:
            answer = rule(group.rollouts)
            return not (await answer if inspect.isawaitable(answer) else answer)
        except Exception as error:
            for rollout in group.rollouts:
                rollout.error = f"validity rule: {type(error).__name__}: {error}"
                rollout.move_to(Status.FAILED)
            return False

    async def _land(self, ctx: ProduceContext, group: Group, tail: bool, refused: bool) -> None:
        status = group.status
        if status is Status.COMPLETED:
            await self._land_completed(ctx, group, tail, refused)
        elif status is Status.FAILED:
            await self._count_failure(ctx, group)
            self.dropped["failed"] += 1
            if ctx.journal is not None:
                ctx.journal.dropped(group, "failed", detail=group.error)
        else:
            await self._land_aborted(ctx, group)

    async def _land_completed(
        self, ctx: ProduceContext, group: Group, tail: bool, refused: bool
    ) -> None:
        self.failures(ctx.task_name).succeeded()
        ctx.progress.produced_samples += 1
        ctx.progress.add_rewards(r.score.value for r in group.rollouts if r.score is not None)
        if refused:
            group.move_to(Status.FILTERED)
            self.dropped["filtered"] += 1
            if ctx.journal is not None:
                await ctx.journal.filtered(group)
            self._count_refusal(ctx)
            return
        self._refused_in_a_row = 0
        if ctx.journal is not None:
            await ctx.journal.landed(group)
        ctx.replay_buffer.put_now(
            group, priority=int(tail), train_step=ctx.progress.next_consumer_step
        )

    def _count_refusal(self, ctx: ProduceContext) -> None:
        self._refused_in_a_row += 1
        if self._refused_in_a_row >= self._config.max_refused_in_a_row:
            raise RunError(
                f"task {ctx.task_name}: the validity rule refused {self._refused_in_a_row} groups in a row, "
                f"allowed: fewer than produce.max_refused_in_a_row = {self._config.max_refused_in_a_row}"
            )

    async def _land_aborted(self, ctx: ProduceContext, group: Group) -> None:
        self.counters["aborted"] += 1
        if ctx.journal is not None:
            await ctx.journal.landed(group)
        tail = group.tries >= self._config.max_tries
        ctx.replay_buffer.put_now(
            group, priority=int(tail), train_step=ctx.progress.next_consumer_step
        )

    async def _count_failure(self, ctx: ProduceContext, group: Group) -> None:
        """Keep the reason, journal the attempt, and let the policy decide whether the run goes on."""
        errors = (rollout.error for rollout in group.rollouts if rollout.status is Status.FAILED)
        group.error = next((error for error in errors if error), "no reason was given")
        self.counters["failed"] += 1
        if ctx.journal is not None:
            await ctx.journal.failed(group)
        self.failures(ctx.task_name).failed(group.error, asyncio.get_running_loop().time())

    async def _back_off(self, ctx: ProduceContext, failures: int) -> None:
        """Wait before the next try; a pause ends the wait."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self.failures(ctx.task_name).backoff_s(failures)
        while (left := until - loop.time()) > 0 and not self.pending.closed and not self.fault:
            await self.changed.wait_after(self.changed.count, left)

    async def _abort_instead_of_retry(self, ctx: ProduceContext, entry: InFlight) -> None:
        if self.pending.claim(entry):
            abort_unfinished(entry.group)
            await self._land_aborted(ctx, entry.group)
            self.pending.remove(entry)

    # -- pause and cancel ---------------------------------------------------------------------

    async def pause(self, ctx: ProduceContext) -> float:
        """Abort, abort again every few seconds, and at the time-out take back what is left."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        deadline = started + self._config.pause_timeout_s
        self.pending.closed = True
        self.changed.notify()
        try:
            while len(self.pending) and loop.time() < deadline and self.fault is None:
                await self._abort_once(ctx, deadline - loop.time())
                again = min(loop.time() + _ABORT_AGAIN_S, deadline)
                await self._until_empty(again)
            left = await self.pending.claim_all()
            self.counters["pause_timeouts"] += len(left)
            await self._return(ctx, left)
        finally:
            self.pending.closed = False
            self.changed.notify()
        return loop.time() - started

    async def _abort_once(self, ctx: ProduceContext, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(max(0.0, timeout_s)):
                await call(ctx.agent_loop, "pause")
        except TimeoutError:
            self.counters["abort_timeouts"] += 1
        except (
            Exception
        ):  # an agent loop that cannot even abort: the time-out takes the groups back
            self.counters["abort_errors"] += 1

    async def _until_empty(self, until: float) -> None:
        loop = asyncio.get_running_loop()
        while len(self.pending) and self.fault is None and (left := until - loop.time()) > 0:
            await self.changed.wait_after(self.changed.count, left)

    async def cancel(self, ctx: ProduceContext) -> None:
        """Undo what is in flight: the same tries, the same seeds. The journal goes on calling it so."""
        self.pending.closed = True
        try:
            entries = await self.pending.claim_all()
            await _end_tasks(entries)
            for entry in entries:
                abort_unfinished(entry.group)
                entry.group.tries -= 1
                ctx.replay_buffer.put_now(entry.group)
                self.pending.remove(entry)
            await self._until_empty(asyncio.get_running_loop().time() + _CANCEL_WAIT_S)
        finally:
            self.pending.closed = False
            self.changed.notify()

    async def _return(self, ctx: ProduceContext, entries: list[InFlight]) -> None:
        """Cancel claimed groups and put them back as ABORTED, with the tokens they have."""
        await _end_tasks(entries)
        for entry in entries:
            abort_unfinished(entry.group)
            try:
                await self._land_aborted(ctx, entry.group)
            except PenstockError as error:
                self.fault = self.fault or error
            self.pending.remove(entry)
        self.changed.notify()


async def _end_tasks(entries: list[InFlight]) -> None:
    tasks = [entry.task for entry in entries if entry.task is not None]
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=_CANCEL_WAIT_S)


def _oldest(group: Group, model_step: int) -> int:
    kept = group.oldest_version
    return model_step if kept is None else min(kept, model_step)


def _check_versions(group: Group, kept: list[int]) -> None:
    """An engine that samples with older weights than it confirmed would expire everything, for ever."""
    for rollout, tokens in zip(group.rollouts, kept, strict=True):
        if rollout.status is Status.FAILED or len(rollout.response_ids) <= tokens:
            continue
        newest = rollout.segments[-1].version
        if newest < rollout.issued_version:
            confirmed = rollout.issued_version
            rollout.error = (
                f"sampled under version {newest} after version {confirmed} was confirmed"
            )
            rollout.finish_reason = "error"  # not a response that could be kept
            rollout.move_to(Status.FAILED)


def _accept(group: Group, returned: list[Rollout]) -> None:
    """Take what the agent loop gave back; it must be the same rollouts, each one ended."""
    asked = [rollout.rollout_id for rollout in group.rollouts]
    given = [rollout.rollout_id for rollout in returned]
    if asked != given:
        raise RunError(f"agent loop: got rollouts {given}, allowed: {asked}")
    group.rollouts = list(returned)
    for rollout in group.rollouts:
        rollout.prompt = group.prompt
        if rollout.status not in (Status.COMPLETED, Status.ABORTED, Status.FAILED):
            rollout.error = f"the agent loop left it {rollout.status}"
            rollout.move_to(Status.FAILED)
        if rollout.status is Status.COMPLETED and rollout.score is None:
            rollout.error = "the agent loop gave no score"
            rollout.move_to(Status.FAILED)
