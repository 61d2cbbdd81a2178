"""The groups of one task: its context, and the runner that draws, generates, retries, lands and pauses them.

The producer makes one `ProduceContext` per task and updates its step and version; the strategy and the
group runner read it.

Every launched group is one asyncio task that ends by landing its own group: completed, refused, aborted,
or failed for good. An error in a group stays in that group. Only a journal that cannot write, the loss of
all engines and the limits on failures and refusals end the run: that error is kept in `fault` for whoever waits.

One claim decides who lands a group: its own asyncio task when the group came back, or a pause that gives
up on it. So no group is landed twice and none is lost.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from penstock.config import ProduceSettings
from penstock.config.plugins import place_of
from penstock.data.sampler import Sampler, rollout_seed
from penstock.errors import EnginesLost, PenstockError, RunError, TooManyFailures, UserError
from penstock.rollout.agent_loop import AgentLoop
from penstock.rollout.progress import ProduceProgress, ReplayBuffer, TaskAccount
from penstock.store.journal import Journal
from penstock.types import Group, Rollout, Status
from penstock.waits import Signal

IsValidSample = Callable[[list[Rollout]], bool | Awaitable[bool]]

_ABORT_AGAIN_S = 5.0
_CANCEL_WAIT_S = 5.0
_LONGEST_BACKOFF_S = 30.0
_FAILURES_BEFORE_HOLD = 8
FAILURE_WINDOW = 32  # attempts over which produce.max_failure_share is taken
RETRY_BACKOFF_S = 0.1  # before the first retry of a failed group; doubles with each further failure
_RULE_TIMEOUT_S = 60.0  # of a validity rule that is a coroutine function
MAX_REFUSED_IN_A_ROW = 1000  # groups refused by the validity rule, after which the run stops


@dataclass(slots=True, kw_only=True)
class ProduceContext:
    """The state of one task: everything that its strategy reads."""

    agent_loop: AgentLoop
    sampler: Sampler
    replay_buffer: ReplayBuffer
    journal: Journal
    progress: ProduceProgress
    runner: GroupRunner | None = None  # of the task's strategy
    task_name: str
    task_batch_size: int  # groups of this task in one step
    train_step: int  # the step to produce for
    model_step: int  # policy version of the weights that generate
    update_event: asyncio.Event  # set: stop launching, because of new weights or a pause

    @property
    def consumer_step(self) -> int:
        """The step that is trained next."""
        return self.progress.next_consumer_step

    @property
    def target_abs(self) -> int:
        """The groups that the task owes since the start of the run."""
        return self.progress.target_samples[self.task_name]

    def should_abort(self) -> bool:
        """Whether new weights or a pause ask for the end of `produce_batch`."""
        return self.update_event.is_set()

    def completed(self) -> int:
        """Count the completed groups in the buffer."""
        return self.replay_buffer.count(self.task_name, Status.COMPLETED)

    def put(self, group: Group, *, is_tail: bool) -> None:
        """Put a group into the buffer; a tail group goes to the front."""
        step = self.progress.next_consumer_step
        self.replay_buffer.put(group, priority=int(is_tail), train_step=step)

    async def available_count(self) -> int:
        """Count the groups that were trained or are completed, to compare with `target_abs`."""
        return self.progress.consumed_samples[self.task_name] + self.completed()

    # -- for a strategy that generates by itself ------------------------------------------------

    async def expired_count(self) -> int:
        return self.replay_buffer.count(self.task_name, Status.EXPIRED)

    async def sample_group(self, *, from_expired_pool: bool = False) -> Group:
        """Draw a group to generate: an aborted one, or a fresh prompt; from the expired ones first if asked.

        The group is in flight until `put_generated_group` takes it. Waits for: the end of a pause.
        """
        first = (Status.EXPIRED,) if from_expired_pool else ()
        return await self._group_runner().draw(self, (*first, Status.ABORTED))

    async def generate_group(
        self, group: Group, *, enable_partial_rollout: bool | None = None
    ) -> Group:
        """Generate and score a group; an error fails its unfinished members. None: as [produce] says."""
        await self._group_runner().generate(self, group, enable_partial_rollout)
        return group

    async def put_generated_group(self, group: Group) -> bool:
        """Journal, count and buffer a group; return whether it may be trained.

        A completed group that the validity rule refuses is dropped. An aborted group waits for its next
        try, a failed one too, until it has had `max_tries`.
        """
        return await self._group_runner().land(self, group)

    def _group_runner(self) -> GroupRunner:
        if self.runner is None:
            raise UserError(
                "context: got no runner, allowed: ProduceContext(..., runner=strategy.runner)"
            )
        return self.runner


class FailurePolicy:
    """Decides on the outcomes of attempts of one task: back off, then stop the run.

    A failed group is retried after a wait that doubles. When only failures come back, fresh prompts
    wait too, so a dead backend costs a handful of calls.
    """

    def __init__(self, settings: ProduceSettings) -> None:
        self._settings = settings
        self._recent: deque[bool] = deque(maxlen=FAILURE_WINDOW)  # True: failed
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
        """The wait before the next try of a group that failed `failures` times."""
        wait_s = RETRY_BACKOFF_S * 2.0 ** (failures - 1)
        return float(min(wait_s, _LONGEST_BACKOFF_S))

    def hold_s(self, now: float) -> float:
        """How long fresh prompts still have to wait; 0: they may be launched."""
        return max(0.0, self._hold_until - now)


@dataclass(slots=True, eq=False)
class _InFlight:
    """A group that is being generated, by its own asyncio task or by the strategy that drew it."""

    group: Group
    oldest_version: int  # version of the oldest token that the group will have when it lands
    is_tail: bool  # tried `max_tries` times: steps wait for it
    is_claimed: bool = False  # a caller records the group's outcome, and then removes it
    task: asyncio.Task[None] | None = field(default=None, repr=False)


class GroupRunner:
    """Owns the groups of one task that are in flight, and counts the outcomes of the others."""

    def __init__(self, settings: ProduceSettings, is_valid_sample_fn: IsValidSample) -> None:
        self._settings = settings
        self._is_valid_sample_fn = is_valid_sample_fn
        self.failures = FailurePolicy(settings)
        self.changed = Signal()
        self.drawn = 0  # fresh prompts, over the whole run
        self.dropped: Counter[str] = Counter()  # groups that ended untrained, by reason
        self.counters: Counter[str] = Counter()  # events that lost no group: retries, aborts, ...
        self.account = TaskAccount()
        self.fault: BaseException | None = None  # ends the run: a landing group met it
        self.in_flight: dict[str, _InFlight] = {}  # by group id
        self._refused_in_a_row = 0
        self._is_closed = False  # a pause is under way: draw nothing
        self._is_aborting = False  # and it waits for no response
        self._is_halted = False  # the producer is paused: a strategy that generates by itself waits

    def oldest_version(self, *, tail_only: bool) -> int | None:
        """The smallest version that a group in flight will carry; None without groups."""
        entries = self.in_flight.values()
        versions = (entry.oldest_version for entry in entries if entry.is_tail or not tail_only)
        return min(versions, default=None)

    # -- drawing ------------------------------------------------------------------------------

    def launch(self, ctx: ProduceContext, statuses: tuple[Status, ...], cap: int) -> bool:
        """Draw and start one group; return False if there is no room, no prompt or a pause.

        Buffered groups of `statuses` come before fresh prompts. At most `cap` groups are in flight.
        """
        in_flight, buffer = len(self.in_flight), ctx.replay_buffer
        has_room = buffer.has_room(ctx.task_name, reserved=in_flight)
        if self._is_closed or in_flight >= cap or not has_room:
            return False
        if ctx.sampler.why_exhausted:
            waiting = (buffer.count(ctx.task_name, s) for s in (Status.INIT, *statuses))
            if not any(waiting):
                return False
        entry = self._draw(ctx, statuses)
        name = f"generate {entry.group.group_id}"
        entry.task = asyncio.create_task(self._run(ctx, entry), name=name)
        return True

    async def draw(self, ctx: ProduceContext, statuses: tuple[Status, ...]) -> Group:
        """Draw one group, in flight until `land` gets it. Waits for: the end of a pause."""
        while True:
            seen = self.changed.count
            if not self._is_halted and not self._is_closed:
                return self._draw(ctx, statuses).group
            await self.changed.wait_after(seen)

    def _draw(self, ctx: ProduceContext, statuses: tuple[Status, ...]) -> _InFlight:
        """Draw a group to generate: one that was interrupted, a buffered one or a fresh prompt."""
        group = ctx.replay_buffer.take(ctx.task_name, Status.INIT)
        if group is not None:  # it was in flight when the run was interrupted
            ctx.journal.retried(group, "resumed")
        else:
            group = ctx.sampler.sample(ctx.task_name, statuses)
            if group.tries == 0 and group.status is Status.INIT:
                self.drawn += 1
                ctx.journal.drawn(group)
            else:
                self.counters["retried"] += 1
                ctx.journal.retried(group, group.status.value)
        is_tail = self._is_tail(group)
        entry = _InFlight(group, self._renew(ctx, group), is_tail)
        self.in_flight[group.group_id] = entry
        return entry

    def _is_tail(self, group: Group) -> bool:
        """Whether the group had `max_tries` tries, so that steps wait for it."""
        return group.tries >= self._settings.max_tries

    def _renew(self, ctx: ProduceContext, group: Group) -> int:
        """Prepare a group for its next try: keep finished members, continue or restart the others.

        Return the version of the oldest token that the group will have when it lands.
        """
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
        kept = group.oldest_version
        return ctx.model_step if kept is None else min(kept, ctx.model_step)

    def _claim(self, entry: _InFlight) -> bool:
        """True to exactly one caller, which lands the group and then removes it."""
        if entry.is_claimed:
            return False
        entry.is_claimed = True
        return True

    def _claim_all(self) -> list[_InFlight]:
        """Claim and return every group that nobody has claimed yet."""
        return [entry for entry in self.in_flight.values() if self._claim(entry)]

    def _remove(self, entry: _InFlight) -> None:
        assert entry.is_claimed, "only a claimed group may be removed"
        del self.in_flight[entry.group.group_id]
        self.changed.notify()

    # -- one group ----------------------------------------------------------------------------

    async def _run(self, ctx: ProduceContext, entry: _InFlight) -> None:
        """Run one launched group to its end: generate, retry after failures, land."""
        group, failures = entry.group, 0
        try:
            while True:
                if self._is_aborting:  # a pause came before the first step of this asyncio task
                    group.abort_unfinished()
                else:
                    await self.generate(ctx, group)
                if not self._claim(entry):
                    return  # a pause has taken the group back
                failures += 1
                if not await self._land_or_retry(ctx, entry, failures):
                    return
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # else the run would wait for this group for ever
            self.fault = self.fault or error
            self.changed.notify()

    async def generate(
        self, ctx: ProduceContext, group: Group, partial: bool | None = None
    ) -> None:
        """Call the agent loop; its errors fail the group's unfinished members, lost engines the run."""
        lengths_before = [len(rollout.response_ids) for rollout in group.rollouts]
        unfinished = sum(rollout.status is not Status.COMPLETED for rollout in group.rollouts)
        if partial is None:
            partial = self._settings.enable_partial_rollout
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            returned = await ctx.agent_loop.generate_group(
                group.rollouts, enable_partial_rollout=partial
            )
            _accept(group, returned, lengths_before)
        except EnginesLost:
            raise
        except Exception as error:  # a user's loop: its fault is the outcome of the group
            reason = f"{type(error).__name__}: {error}"
            for rollout in group.rollouts:
                if rollout.status not in (Status.COMPLETED, Status.FAILED):
                    rollout.fail(reason)
        self.account.group_times_s.append(loop.time() - started)
        tokens = group.num_response_tokens - sum(lengths_before)
        ctx.progress.produced_samples[ctx.task_name] += unfinished
        ctx.progress.produced_tokens[ctx.task_name] += max(0, tokens)

    async def _land_or_retry(self, ctx: ProduceContext, entry: _InFlight, failures: int) -> bool:
        """Land a claimed group; return True if it failed and its next try is due."""
        group = entry.group
        try:
            is_refused = await self._is_refused(group)
            if group.status is Status.FAILED and failures < self._settings.max_tries:
                await self._count_failure(ctx, group)
                loop = asyncio.get_running_loop()
                until = loop.time() + self.failures.backoff_s(failures)
                while (left := until - loop.time()) > 0 and not self._is_closed and not self.fault:
                    await self.changed.wait_after(self.changed.count, left)
                if not self._is_closed and not self.fault:
                    ctx.journal.retried(group, "failed")
                    self.counters["retried"] += 1
                    entry.oldest_version = self._renew(ctx, group)
                    entry.is_claimed = False
                    return True
                group.abort_unfinished()
            await self._land(ctx, entry, is_refused)
            return False
        finally:
            if entry.is_claimed:
                self._remove(entry)

    async def _is_refused(self, group: Group) -> bool:
        """Ask the validity rule, once and only for completed groups; its errors fail the group."""
        if group.status is not Status.COMPLETED:
            return False
        deadline = asyncio.timeout(_RULE_TIMEOUT_S)
        try:
            answer = self._is_valid_sample_fn(group.rollouts)
            if inspect.isawaitable(answer):
                async with deadline:
                    answer = await answer
            return not answer
        except Exception as error:  # a user's rule: its fault is the outcome of the group
            reason = f"{type(error).__name__}: {error}{place_of(error)}"
            if deadline.expired():
                reason = f"no answer after {_RULE_TIMEOUT_S:g} s"
            for rollout in group.rollouts:
                rollout.fail(f"validity rule: {reason}")
            return False

    # -- landing ------------------------------------------------------------------------------

    async def land(self, ctx: ProduceContext, group: Group) -> bool:
        """Record the outcome of a group that `draw` returned; return whether it may be trained."""
        entry = self.in_flight.get(group.group_id)
        if entry is None or entry.group is not group or not self._claim(entry):
            return False  # a pause has given up on the group and put it back
        try:
            is_refused = await self._is_refused(group)
            if group.status is Status.FAILED and not self._is_tail(group):
                await self._count_failure(ctx, group)
                group.abort_unfinished()
            elif group.status is Status.INIT:  # it was never generated
                group.abort_unfinished()
            await self._land(ctx, entry, is_refused)
            return group.status is Status.COMPLETED
        finally:
            self._remove(entry)

    async def _land(self, ctx: ProduceContext, entry: _InFlight, is_refused: bool) -> None:
        group = entry.group
        self.account.landed(group)
        if group.status is Status.FAILED:
            await self._count_failure(ctx, group)
            self.dropped["failed"] += 1
            ctx.journal.dropped(group, "failed", detail=group.error)
            return
        if group.status is not Status.COMPLETED:
            await self._land_aborted(ctx, group)
            return
        self.failures.succeeded()
        rewards = [rollout.score.value for rollout in group.rollouts if rollout.score is not None]
        ctx.progress.raw_rewards_sum[ctx.task_name] += sum(rewards)
        ctx.progress.raw_rewards_count[ctx.task_name] += len(rewards)
        if is_refused:
            group.move_to(Status.FILTERED)
            self.dropped["filtered"] += 1
            self.counters["filtered"] += 1
            await ctx.journal.filtered(group)
            self._refused_in_a_row += 1
            if self._refused_in_a_row >= MAX_REFUSED_IN_A_ROW:
                raise RunError(
                    f"task {ctx.task_name}: the validity rule refused {self._refused_in_a_row} groups "
                    f"in a row, allowed: fewer than {MAX_REFUSED_IN_A_ROW}; rewards of the last one: "
                    f"{', '.join(f'{value:g}' for value in sorted(set(rewards)))}"
                )
            return
        self._refused_in_a_row = 0
        await ctx.journal.landed(group)  # in the buffer once it is durable
        ctx.put(group, is_tail=entry.is_tail)

    async def _land_aborted(self, ctx: ProduceContext, group: Group) -> None:
        self.counters["aborted"] += 1
        await ctx.journal.landed(group)
        ctx.put(group, is_tail=self._is_tail(group))

    async def _count_failure(self, ctx: ProduceContext, group: Group) -> None:
        """Journal a failed attempt with its reason; raise TooManyFailures if the run must stop."""
        errors = (rollout.error for rollout in group.rollouts if rollout.status is Status.FAILED)
        group.error = next((error for error in errors if error), "no reason was given")
        self.counters["failed"] += 1
        await ctx.journal.failed(group)
        self.failures.failed(ctx.task_name, group.error, asyncio.get_running_loop().time())

    # -- pause and cancel ---------------------------------------------------------------------

    def halt(self, is_halted: bool) -> None:
        """Let draws of a strategy that generates by itself wait, or let them continue."""
        self._is_halted = is_halted
        self.changed.notify()

    async def pause(self, ctx: ProduceContext, *, abort: bool = True) -> float:
        """Launch nothing and wait until all groups have landed; return the seconds it took.

        abort: the agent loop is told to stop; otherwise the groups are generated to their end. The
        request to abort runs beside the wait and is sent again every few seconds, also if none was
        answered. At `pause_timeout_s` the groups that are left go back to the buffer as ABORTED with the
        tokens they have.
        """
        loop = asyncio.get_running_loop()
        started = loop.time()
        with self._closed(aborting=abort):
            if abort:
                await self._abort_all(ctx, started + self._settings.pause_timeout_s)
            else:
                await self._until_empty()
        return loop.time() - started

    async def _abort_all(self, ctx: ProduceContext, deadline: float) -> None:
        loop = asyncio.get_running_loop()
        requests: list[asyncio.Task[None]] = []
        try:
            while self.in_flight and loop.time() < deadline and self.fault is None:
                requests.append(asyncio.create_task(self._abort_once(ctx), name="abort groups"))
                await self._until_empty(min(loop.time() + _ABORT_AGAIN_S, deadline))
            entries = self._claim_all()
            self.counters["pause_timeouts"] += len(entries)
            await _cancel([entry.task for entry in entries])
            for entry in entries:
                entry.group.abort_unfinished()
                try:
                    await self._land_aborted(ctx, entry.group)
                except PenstockError as error:
                    self.fault = self.fault or error
                self._remove(entry)
        finally:
            unanswered = [request for request in requests if not request.done()]
            self.counters["abort_timeouts"] += len(unanswered)
            await _cancel(unanswered)

    async def _abort_once(self, ctx: ProduceContext) -> None:
        try:
            await ctx.agent_loop.pause()
        except Exception:  # a user's loop that cannot abort: wait for the pause's time-out
            self.counters["abort_errors"] += 1

    async def cancel(self, ctx: ProduceContext) -> None:
        """Stop all groups without asking the agent loop and put them back as they were issued.

        Their tries and seeds are those of before the launch; the journal still has them in flight.
        """
        with self._closed(aborting=True):
            entries = self._claim_all()
            await _cancel([entry.task for entry in entries])
            for entry in entries:
                entry.group.abort_unfinished()
                entry.group.tries -= 1
                ctx.replay_buffer.put(entry.group)
                self._remove(entry)
            await self._until_empty(asyncio.get_running_loop().time() + _CANCEL_WAIT_S)

    @contextmanager
    def _closed(self, *, aborting: bool) -> Iterator[None]:
        """Draw nothing inside the block; with `aborting`, groups that have not begun are aborted."""
        self._is_closed, self._is_aborting = True, aborting
        self.changed.notify()
        try:
            yield
        finally:
            self._is_closed = self._is_aborting = False
            self.changed.notify()

    async def _until_empty(self, until: float = float("inf")) -> None:
        """Wait until no group is in flight, at most until that time of the event loop."""
        loop = asyncio.get_running_loop()
        while self.in_flight and self.fault is None and (left := until - loop.time()) > 0:
            timeout_s = left if left < float("inf") else None
            await self.changed.wait_after(self.changed.count, timeout_s)


async def _cancel(tasks: list[asyncio.Task[None]] | list[asyncio.Task[None] | None]) -> None:
    running = [task for task in tasks if task is not None]
    for task in running:
        task.cancel()
    if running:
        await asyncio.wait(running, timeout=_CANCEL_WAIT_S)


def _accept(group: Group, returned: list[Rollout], lengths_before: list[int]) -> None:
    """Take over what the agent loop returned: the same rollouts, each with a final status.

    A rollout fails if its new tokens come from older weights than the engine had confirmed: such an engine
    would make every group expire, forever.
    """
    expected = [rollout.rollout_id for rollout in group.rollouts]
    got = [rollout.rollout_id for rollout in returned]
    if got != expected:
        raise RunError(f"agent loop: got rollouts {got}, allowed: {expected}")
    group.rollouts = list(returned)
    for rollout, length in zip(group.rollouts, lengths_before, strict=True):
        rollout.prompt = group.prompt
        if rollout.status not in (Status.COMPLETED, Status.ABORTED, Status.FAILED):
            rollout.fail(f"the agent loop left it {rollout.status}")
        if rollout.status is Status.COMPLETED and rollout.score is None:
            rollout.fail("the agent loop gave no score")
        if rollout.status is Status.FAILED or len(rollout.response_ids) <= length:
            continue
        newest, confirmed = rollout.segments[-1].version, rollout.issued_version
        if newest < confirmed:
            rollout.finish_reason = "error"  # a retry must not keep this response
            rollout.fail(f"sampled under version {newest} after version {confirmed} was confirmed")
