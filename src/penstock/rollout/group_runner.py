"""Runs the groups of one task: draws, generates, retries and lands each of them; pauses them all.

Every launched group is one asyncio task that ends by landing its own group: completed, refused, aborted,
or failed for good. An error in a group stays in that group. Only a journal that cannot write, the loss of
all engines and the limits on failures and refusals end the run: that error is kept in `fault` for whoever waits.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from penstock.config import ProduceSettings
from penstock.data.sampler import PromptsExhausted, rollout_seed
from penstock.errors import EnginesLost, PenstockError, RunError, TooManyFailures
from penstock.rollout.account import TaskAccount
from penstock.rollout.context import IsValidSample, ProduceContext
from penstock.rollout.pending import PendingGroup, PendingSet
from penstock.rollout.signal import Signal
from penstock.types import Group, Rollout, Status

_ABORT_AGAIN_S = 5.0
_CANCEL_WAIT_S = 5.0
_LONGEST_BACKOFF_S = 30.0
_FAILURES_BEFORE_HOLD = 8


class FailurePolicy:
    """Decides on the outcomes of attempts of one task: back off, then stop the run.

    A failed group is retried after a wait that doubles. When only failures come back, fresh prompts
    wait too, so a dead backend costs a handful of calls.
    """

    def __init__(self, settings: ProduceSettings) -> None:
        self._settings = settings
        self._recent: deque[bool] = deque(maxlen=settings.failure_window)  # True: failed
        self._failures_in_a_row = 0
        self._hold_until = 0.0
        self.last_reason = ""  # of the newest failure

    def succeeded(self) -> None:
        self._recent.append(False)
        self._failures_in_a_row = 0
        self._hold_until = 0.0

    def failed(self, task_name: str, reason: str, now: float) -> None:
        """Count one failure; raise TooManyFailures above the allowed share."""
        self.last_reason = reason
        self._recent.append(True)
        self._failures_in_a_row += 1
        rounds = self._failures_in_a_row // _FAILURES_BEFORE_HOLD
        if rounds:
            self._hold_until = now + self.backoff_s(rounds)
        failures, allowed = sum(self._recent), self._settings.max_failure_share
        if len(self._recent) == self._recent.maxlen and failures / len(self._recent) > allowed:
            raise TooManyFailures(
                f"task {task_name}: {failures} of the last {len(self._recent)} groups failed, "
                f"allowed: a share of {allowed:g}; the last reason: {reason}"
            )

    def backoff_s(self, failures: int) -> float:
        """Return the wait before the next try of a group that failed `failures` times."""
        wait_s = self._settings.retry_backoff_s * 2.0 ** (failures - 1)
        return float(min(wait_s, _LONGEST_BACKOFF_S))

    def hold_s(self, now: float) -> float:
        """Return how long fresh prompts still have to wait; 0: they may be launched."""
        return max(0.0, self._hold_until - now)


class GroupRunner:
    """Owns the groups of one task that are in flight, and counts the outcomes of the others."""

    def __init__(self, settings: ProduceSettings, is_valid_sample_fn: IsValidSample) -> None:
        self._settings = settings
        self._is_valid_sample_fn = is_valid_sample_fn
        self.pending = PendingSet()
        self.failures = FailurePolicy(settings)
        self.changed = Signal()
        self.drawn = 0  # fresh prompts, over the whole run
        self.dropped: Counter[str] = Counter()  # groups that ended untrained, by reason
        self.counters: Counter[str] = Counter()  # events that lost no group: retries, aborts, ...
        self.account = TaskAccount()
        self.fault: BaseException | None = None
        self._refused_in_a_row = 0
        self._aborting = False  # a pause is under way that waits for no response
        self.halted = False  # the producer is paused: a strategy that generates by itself waits

    # -- launching ----------------------------------------------------------------------------

    async def launch(self, ctx: ProduceContext, statuses: tuple[Status, ...], cap: int) -> bool:
        """Draw and start one group; return False if there is no room, no prompt or a pause.

        Buffered groups of `statuses` come before fresh prompts. At most `cap` groups are in flight.
        """
        if not ctx.replay_buffer.room(ctx.task_name, reserved=len(self.pending)):
            return False

        try:
            return await self.pending.schedule(
                cap=cap,
                draw=lambda: self._draw_entry(ctx, statuses),
                run=lambda entry: self._generate(ctx, entry),
            )
        except PromptsExhausted:
            if not len(self.pending):
                raise
            return False  # the groups in flight may still fill the batch

    async def _draw_entry(self, ctx: ProduceContext, statuses: tuple[Status, ...]) -> PendingGroup:
        group = await self._draw(ctx, statuses)
        is_tail = self._is_tail(group)
        self._renew(ctx, group)
        return PendingGroup(group, _oldest_version(group, ctx.model_step), is_tail)

    async def _draw(self, ctx: ProduceContext, statuses: tuple[Status, ...]) -> Group:
        resumed = ctx.replay_buffer.take_now(ctx.task_name, Status.INIT)
        if resumed is not None:  # it was in flight when the run was interrupted
            ctx.journal.retried(resumed, "resumed")
            return resumed
        group = await ctx.sampler.sample(ctx.task_name, statuses)
        if group.tries == 0 and group.status is Status.INIT:
            self.drawn += 1
            ctx.journal.drawn(group)
        else:
            self.counters["retried"] += 1
            ctx.journal.retried(group, group.status.value)
        return group

    def _is_tail(self, group: Group) -> bool:
        """Return whether the group had `max_tries` tries, so that steps wait for it."""
        return group.tries >= self._settings.max_tries

    def _renew(self, ctx: ProduceContext, group: Group) -> None:
        """Prepare a group for its next try: keep finished members, continue or restart the others."""
        keep_partial = self._settings.enable_partial_rollout
        for index, rollout in enumerate(group.rollouts):
            if rollout.status is Status.COMPLETED:
                continue
            is_fresh = rollout.status is Status.INIT and group.tries == 0
            lacks_score = rollout.is_finished and rollout.status is not Status.EXPIRED
            is_partial = rollout.status is Status.ABORTED and len(rollout.response_ids)
            if lacks_score or (keep_partial and is_partial):
                rollout.move_to(Status.INIT)
                rollout.error = ""
            elif not is_fresh:  # else it is as the sampler made it
                rollout.restart()
                rollout.seed = rollout_seed(ctx.sampler.seed, group.group_id, index, group.tries)
            rollout.issued_version = ctx.model_step
        group.error = ""
        group.tries += 1

    # -- one group ----------------------------------------------------------------------------

    async def _generate(self, ctx: ProduceContext, entry: PendingGroup) -> None:
        """Run one launched group to its end: generate, retry after failures, land."""
        try:
            failures = 0
            while await self._attempt(ctx, entry, failures):
                failures += 1
                await self._back_off(failures)
                if self.pending.closed or self.fault:  # a pause, or the end of the run
                    await self._abort_instead_of_retry(ctx, entry)
                    return
                if entry.landing:
                    return  # a pause has taken the group back
                ctx.journal.retried(entry.group, "failed")
                self.counters["retried"] += 1
                self._renew(ctx, entry.group)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # else the run would wait for this group for ever
            self.fault = self.fault or error
        finally:
            self.changed.notify()

    async def _attempt(self, ctx: ProduceContext, entry: PendingGroup, failures: int) -> bool:
        """Generate the group once; return True if it failed and may be retried."""
        group = entry.group
        if self._aborting:  # a pause came before the first step of this asyncio task
            group.abort_unfinished()
        else:
            await self._call_agent(ctx, group)
        if not self.pending.claim(entry):
            return False
        try:
            is_refused = await self._is_refused(ctx, group)
            if group.status is Status.FAILED and failures + 1 < self._settings.max_tries:
                await self._count_failure(ctx, group)
                self.pending.release(entry, _oldest_version(group, ctx.model_step))
                return True
            await self._land(ctx, group, entry.tail, is_refused)
        finally:
            if entry.landing:
                self.pending.remove(entry)
        return False

    async def _call_agent(
        self, ctx: ProduceContext, group: Group, partial: bool | None = None
    ) -> None:
        """Call the agent loop; its errors fail the group's unfinished members, lost engines the run."""
        lengths_before = [len(rollout.response_ids) for rollout in group.rollouts]
        todo = sum(rollout.status is not Status.COMPLETED for rollout in group.rollouts)
        if partial is None:
            partial = self._settings.enable_partial_rollout
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            returned = await _call(
                ctx.agent_loop,
                "generate_group",
                group.rollouts,
                enable_partial_rollout=partial,
            )
            _accept(group, returned)
            _check_versions(group, lengths_before)
        except EnginesLost:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            for rollout in group.rollouts:
                if rollout.status not in (Status.COMPLETED, Status.FAILED):
                    rollout.fail(reason)
        self.account.group_times_s.append(loop.time() - started)
        made = group.num_response_tokens - sum(lengths_before)
        ctx.progress.add_produced(ctx.task_name, todo, max(0, made))

    async def _is_refused(self, ctx: ProduceContext, group: Group) -> bool:
        """Ask the validity rule, once and only for completed groups; its errors fail the group."""
        if group.status is not Status.COMPLETED:
            return False
        is_valid = ctx.is_valid_sample_fn or self._is_valid_sample_fn
        try:
            answer = is_valid(group.rollouts)
            return not (await answer if inspect.isawaitable(answer) else answer)
        except Exception as error:
            for rollout in group.rollouts:
                rollout.fail(f"validity rule: {type(error).__name__}: {error}")
            return False

    async def _back_off(self, failures: int) -> None:
        """Wait before the next try; a pause ends the wait."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self.failures.backoff_s(failures)
        while (left := until - loop.time()) > 0 and not self.pending.closed and not self.fault:
            await self.changed.wait_after(self.changed.count, left)

    async def _abort_instead_of_retry(self, ctx: ProduceContext, entry: PendingGroup) -> None:
        if self.pending.claim(entry):
            entry.group.abort_unfinished()
            await self._land_aborted(ctx, entry.group)
            self.pending.remove(entry)

    # -- landing ------------------------------------------------------------------------------

    async def _land(
        self, ctx: ProduceContext, group: Group, is_tail: bool, is_refused: bool
    ) -> None:
        self.account.landed(group)
        if group.status is Status.FAILED:
            await self._count_failure(ctx, group)
            self.dropped["failed"] += 1
            ctx.journal.dropped(group, "failed", detail=group.error)
        elif group.status is not Status.COMPLETED:
            await self._land_aborted(ctx, group)
        else:
            self.failures.succeeded()
            ctx.progress.add_rewards(
                ctx.task_name, (r.score.value for r in group.rollouts if r.score is not None)
            )
            if is_refused:
                await self._land_refused(ctx, group)
            else:
                self._refused_in_a_row = 0
                await self._put(ctx, group, is_tail)

    async def _land_refused(self, ctx: ProduceContext, group: Group) -> None:
        group.move_to(Status.FILTERED)
        self.dropped["filtered"] += 1
        self.counters["filtered"] += 1
        await ctx.journal.filtered(group)
        self._refused_in_a_row += 1
        if self._refused_in_a_row >= self._settings.max_refused_in_a_row:
            rewards = sorted({r.score.value for r in group.rollouts if r.score is not None})
            raise RunError(
                f"task {ctx.task_name}: the validity rule refused {self._refused_in_a_row} groups "
                "in a row, allowed: fewer than produce.max_refused_in_a_row = "
                f"{self._settings.max_refused_in_a_row}; rewards of the last one: "
                f"{', '.join(f'{value:g}' for value in rewards)}"
            )

    async def _land_aborted(self, ctx: ProduceContext, group: Group) -> None:
        self.counters["aborted"] += 1
        await self._put(ctx, group, self._is_tail(group))

    async def _put(self, ctx: ProduceContext, group: Group, is_tail: bool) -> None:
        """Journal a group, and put it into the buffer once it is durable."""
        await ctx.journal.landed(group)
        ctx.put(group, is_tail=is_tail)

    async def _count_failure(self, ctx: ProduceContext, group: Group) -> None:
        """Journal a failed attempt with its reason; raise TooManyFailures if the run must stop."""
        errors = (rollout.error for rollout in group.rollouts if rollout.status is Status.FAILED)
        group.error = next((error for error in errors if error), "no reason was given")
        self.counters["failed"] += 1
        await ctx.journal.failed(group)
        self.failures.failed(ctx.task_name, group.error, asyncio.get_running_loop().time())

    # -- for a strategy that generates by itself (see `ProduceContext`) ------------------------

    async def draw(self, ctx: ProduceContext, statuses: tuple[Status, ...]) -> Group:
        """Draw one group, in flight until `land` gets it. Waits for: the end of a pause."""
        while True:
            seen = self.changed.count
            if not self.halted:
                group = await self.pending.hold(lambda: self._draw_entry(ctx, statuses))
                if group is not None:
                    return group
            await self.changed.wait_after(seen)

    async def generate(self, ctx: ProduceContext, group: Group, *, partial: bool | None) -> Group:
        """Call the agent loop once; return the group, with errors as failed members."""
        await self._call_agent(ctx, group, partial)
        return group

    async def land(self, ctx: ProduceContext, group: Group) -> bool:
        """Record the outcome of a group that `draw` returned; return whether it may be trained."""
        entry = self.pending.claim_of(group)
        if entry is None:
            return False  # a pause has given up on the group and put it back
        try:
            is_refused = await self._is_refused(ctx, group)
            if group.status is Status.FAILED and group.tries < self._settings.max_tries:
                await self._count_failure(ctx, group)
                group.abort_unfinished()
            elif group.status is Status.INIT:  # it was never generated
                group.abort_unfinished()
            await self._land(ctx, group, entry.tail, is_refused)
            return group.status is Status.COMPLETED
        finally:
            self.pending.remove(entry)
            self.changed.notify()

    # -- pause and cancel ---------------------------------------------------------------------

    async def pause(self, ctx: ProduceContext) -> float:
        """Abort all groups and wait for them to land; return the seconds it took.

        A request to abort runs beside the wait and is sent again every few seconds, also if none was
        answered. At `pause_timeout_s` the groups that are left go back to the buffer as ABORTED with the
        tokens they have.
        """
        loop = asyncio.get_running_loop()
        started = loop.time()
        deadline = started + self._settings.pause_timeout_s
        requests: list[asyncio.Task[None]] = []
        with self._closed(aborting=True):
            try:
                while len(self.pending) and loop.time() < deadline and self.fault is None:
                    requests.append(asyncio.create_task(self._abort_once(ctx), name="abort groups"))
                    await self._until_empty(min(loop.time() + _ABORT_AGAIN_S, deadline))
                left = await self.pending.claim_all()
                self.counters["pause_timeouts"] += len(left)
                await self._take_back(ctx, left)
            finally:
                unanswered = [request for request in requests if not request.done()]
                self.counters["abort_timeouts"] += len(unanswered)
                await _cancel(unanswered)
        return loop.time() - started

    async def drain(self) -> float:
        """Launch nothing more and wait until all groups have landed; return the seconds it took."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        with self._closed(aborting=False):
            while len(self.pending) and self.fault is None:
                await self.changed.wait_after(self.changed.count)
        return loop.time() - started

    @contextmanager
    def _closed(self, *, aborting: bool) -> Iterator[None]:
        """Schedule nothing inside the block; with `aborting`, groups that have not begun are aborted."""
        self.pending.closed, self._aborting = True, aborting
        self.changed.notify()
        try:
            yield
        finally:
            self.pending.closed = self._aborting = False
            self.changed.notify()

    async def _abort_once(self, ctx: ProduceContext) -> None:
        try:
            await _call(ctx.agent_loop, "pause")
        except Exception:  # the agent loop cannot abort: wait for the pause's time-out
            self.counters["abort_errors"] += 1

    async def _until_empty(self, until: float) -> None:
        loop = asyncio.get_running_loop()
        while len(self.pending) and self.fault is None and (left := until - loop.time()) > 0:
            await self.changed.wait_after(self.changed.count, left)

    async def _take_back(self, ctx: ProduceContext, entries: list[PendingGroup]) -> None:
        """Cancel claimed groups and land them as ABORTED with the tokens they have."""
        await _cancel_tasks(entries)
        for entry in entries:
            entry.group.abort_unfinished()
            try:
                await self._land_aborted(ctx, entry.group)
            except PenstockError as error:
                self.fault = self.fault or error
            self.pending.remove(entry)
        self.changed.notify()

    async def cancel(self, ctx: ProduceContext) -> None:
        """Stop all groups without asking the agent loop and put them back as they were issued.

        Their tries and seeds are those of before the launch; the journal still has them in flight.
        """
        with self._closed(aborting=True):
            entries = await self.pending.claim_all()
            await _cancel_tasks(entries)
            for entry in entries:
                entry.group.abort_unfinished()
                entry.group.tries -= 1
                ctx.replay_buffer.put_now(entry.group)
                self.pending.remove(entry)
            await self._until_empty(asyncio.get_running_loop().time() + _CANCEL_WAIT_S)


async def _call(target: Any, method: str, *args: Any, **kwargs: Any) -> Any:
    """Call a method of a local object or of a Ray actor."""
    bound = getattr(target, method)
    remote = getattr(bound, "remote", None)
    return await (bound if remote is None else remote)(*args, **kwargs)


async def _cancel_tasks(entries: list[PendingGroup]) -> None:
    await _cancel([entry.task for entry in entries if entry.task is not None])


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=_CANCEL_WAIT_S)


def _oldest_version(group: Group, model_step: int) -> int:
    """Return the version of the oldest token that the group will have when it lands."""
    kept = group.oldest_version
    return model_step if kept is None else min(kept, model_step)


def _accept(group: Group, returned: list[Rollout]) -> None:
    """Take over what the agent loop returned: the same rollouts, each with a final status."""
    asked = [rollout.rollout_id for rollout in group.rollouts]
    given = [rollout.rollout_id for rollout in returned]
    if asked != given:
        raise RunError(f"agent loop: got rollouts {given}, allowed: {asked}")
    group.rollouts = list(returned)
    for rollout in group.rollouts:
        rollout.prompt = group.prompt
        if rollout.status not in (Status.COMPLETED, Status.ABORTED, Status.FAILED):
            rollout.fail(f"the agent loop left it {rollout.status}")
        if rollout.status is Status.COMPLETED and rollout.score is None:
            rollout.fail("the agent loop gave no score")


def _check_versions(group: Group, lengths_before: list[int]) -> None:
    """Fail rollouts whose new tokens come from older weights than the engine had confirmed.

    Such an engine would make every group expire, forever.
    """
    for rollout, length in zip(group.rollouts, lengths_before, strict=True):
        if rollout.status is Status.FAILED or len(rollout.response_ids) <= length:
            continue
        newest, confirmed = rollout.segments[-1].version, rollout.issued_version
        if newest < confirmed:
            rollout.finish_reason = "error"  # a retry must not keep this response
            rollout.fail(f"sampled under version {newest} after version {confirmed} was confirmed")
