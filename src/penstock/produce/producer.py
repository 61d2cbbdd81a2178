"""The producer: one lane per task runs ahead, steps take their batches from the buffer.

    lane: gate (staleness) -> strategy.produce_batch -> groups land in journal and buffer
    take_batch(step): every task's share, fresh -> journal.begin_step -> Batch

Lanes do not wait for each other. It knows no engine and no trainer: weights are a version number.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from penstock.data.sampler import PromptsExhausted
from penstock.errors import RunError, UserError
from penstock.journal import Journal
from penstock.produce.context import ProduceBatchStatus, ProduceContext
from penstock.produce.lane import Lane, ProduceTask
from penstock.produce.progress import ProduceProgress
from penstock.produce.replay_buffer import ReplayBuffer
from penstock.produce.shares import TaskShares
from penstock.produce.signal import Signal
from penstock.produce.snapshot import ProducerSnapshot, Wait
from penstock.types import Batch
from penstock.watch.waits import WaitKind, Waits


def loop_time() -> float:
    """The event loop's clock: real, or virtual where the loop is."""
    try:
        return asyncio.get_running_loop().time()
    except RuntimeError:
        return time.monotonic()


class Producer:
    """Consumes prompts and versions of the weights, produces batches."""

    def __init__(
        self,
        *,
        tasks: Sequence[ProduceTask],
        replay_buffer: ReplayBuffer,
        journal: Journal,
        progress: ProduceProgress,
        groups_per_step: int,
        sync_weights_interval: int = 1,
        clock: Callable[[], float] = loop_time,
        waits: Waits | None = None,
        first_version: int = 0,
        last_step: int | None = None,
    ) -> None:
        _check(tasks, replay_buffer, groups_per_step, sync_weights_interval)
        self.progress = progress
        self.model_version = first_version
        self._last_step = last_step  # nothing is produced for a step after it
        self._buffer = replay_buffer
        self._journal = journal
        self._clock = clock
        self._waits = waits or Waits(clock)
        self._weights = {task.name: task.weight for task in tasks}
        self._groups_per_step = groups_per_step
        first_step = progress.next_consumer_step
        self._shares = TaskShares(self._weights, groups_per_step, first_step=first_step)
        self._changed = Signal()
        self._lanes = [self._lane(task) for task in tasks]
        self._resumed_batch: Batch | None = None
        self._paused = False
        self._stopping = False
        self._ended = False
        self._fault: BaseException | None = None
        self._waiting_for: dict[str, tuple[str, float]] = {}
        self._idle_since: float | None = None
        self._idle_s = 0.0

    def _lane(self, task: ProduceTask) -> Lane:
        self.progress.add_task(task.name)
        task.strategy.changed.forward_to(self._changed)
        ctx = ProduceContext(
            agent_loop=task.agent_loop,
            sampler=task.sampler,
            replay_buffer=self._buffer,
            task_batch_size=0,
            task_name=task.name,
            train_step=self.progress.next_consumer_step,
            update_event=asyncio.Event(),
            model_step=self.model_version,
            progress=self.progress,
            is_valid_sample_fn=task.is_valid_sample_fn,
            stale_threshold=task.strategy.stale_threshold,
            journal=self._journal,
        )
        return Lane(task, ctx)

    # -- running ahead ------------------------------------------------------------------------

    async def run(self) -> None:
        """Run ahead until cancelled or stopped. Waits for: weights, resume, landings."""
        self._stopping = self._ended = False
        lanes = [
            asyncio.create_task(self._run_lane(lane), name=f"lane {lane.name}")
            for lane in self._lanes
        ]
        try:
            done, _ = await asyncio.wait(lanes, return_when=asyncio.FIRST_EXCEPTION)
            for lane in done:
                lane.result()
        except Exception as error:
            self._fault = error
            raise
        finally:
            for lane in lanes:
                lane.cancel()
            await asyncio.gather(*lanes, return_exceptions=True)
            for lane_state in self._lanes:
                await lane_state.strategy.cancel(lane_state.ctx)
            self._ended = True
            self._changed.notify()

    def stop(self) -> None:
        """Let `run` end; what is in flight is issued again by the next part of the run."""
        self._stopping = True
        self._interrupt()

    async def _run_lane(self, lane: Lane) -> None:
        while not self._stopping:
            seen = self._changed.count
            if self._paused:
                await self._idle(lane, seen, "resume")
                continue
            if self._last_step is not None and self.progress.next_consumer_step > self._last_step:
                await self._idle(lane, seen, "nothing: the last step is taken")
                continue
            lane.ctx.update_event.clear()
            self._aim(lane)
            try:
                status = await lane.strategy.produce_batch(lane.ctx)
            except PromptsExhausted as ended:
                lane.exhausted = ended
                await self._idle(lane, seen, "nothing: its prompts have ended")
                continue
            if status is ProduceBatchStatus.EXPIRED_BATCH:
                await self._idle(lane, seen, f"weights newer than version {self.model_version}")
            elif status is ProduceBatchStatus.NORMAL:
                await self._idle(lane, seen, f"step {lane.ctx.train_step} to be consumed")

    def _aim(self, lane: Lane) -> None:
        """Set the lane's step, version and target to what the staleness bound allows now."""
        ctx, strategy = lane.ctx, lane.strategy
        next_step = self.progress.next_consumer_step
        step = strategy.furthest_step(self.model_version, next_step)
        if self._last_step is not None:
            step = min(step, self._last_step)
        ctx.train_step, ctx.model_step = step, self.model_version
        ctx.task_batch_size = self._shares.at(next_step).get(lane.name, 0)
        if not strategy.is_model_expired(step, self.model_version):
            self.progress.ensure_target_upto(step, self._shares.at, lane.name)

    async def _idle(self, lane: Lane, seen: int, what: str) -> None:
        """Sleep until something has changed since `seen`."""
        lane.idle_since_change = seen
        self._note_idleness()
        who = f"produce {lane.name}"
        with self._waiting(who, what), self._waits.wait(who, WaitKind.WAIT, what):
            await self._changed.wait_after(seen)
        lane.idle_since_change = None
        self._note_idleness()

    def _note_idleness(self) -> None:
        """Time counts as waiting while nothing is in flight and no lane could launch anything."""
        idle = all(lane.idle_since_change is not None for lane in self._lanes) and not any(
            lane.has_work() for lane in self._lanes
        )
        now = self._clock()
        if idle and self._idle_since is None:
            self._idle_since = now
        elif not idle and self._idle_since is not None:
            self._idle_s += now - self._idle_since
            self._idle_since = None

    def weights_updated(self, version: int) -> None:
        """The engines confirmed these weights."""
        if version < self.model_version:
            raise RunError(f"weights: got version {version} after version {self.model_version}")
        self.model_version = version
        for lane in self._lanes:
            lane.ctx.model_step = version
        self._interrupt()

    def _interrupt(self) -> None:
        for lane in self._lanes:
            lane.ctx.update_event.set()
        self._changed.notify()

    async def pause(self) -> float:
        """Abort what runs, in all tasks at once, and wait for it to land; seconds it took."""
        self._paused = True
        self._interrupt()
        seconds = await asyncio.gather(
            *(lane.strategy.pause_produce(lane.ctx) for lane in self._lanes)
        )
        return max(seconds)

    def resume(self) -> None:
        """Go on after `pause`."""
        self._paused = False
        self._changed.notify()

    # -- consuming ----------------------------------------------------------------------------

    async def take_batch(self, step: int) -> Batch:
        """The groups of a step, journalled. Waits for: every task's share, completed and fresh."""
        self.progress.begin_consume(step)
        resumed, self._resumed_batch = self._resumed_batch, None
        if resumed is not None:
            self.progress.finish_consume(step)
            self._changed.notify()
            return resumed
        shares = self._shares.at(step)
        while True:
            seen = self._changed.count
            self._raise_fault()
            missing = self._missing(step, shares)
            if not missing:
                break
            if self._changed.count != seen:
                continue  # something expired while we looked
            self._raise_if_hopeless(step, shares)
            with self._waiting(f"step {step}", missing):
                await self._changed.wait_after(seen)
        groups = [
            group for lane in self._lanes for group in lane.take(step, shares.get(lane.name, 0))
        ]
        self.progress.finish_consume(step)
        self._shares.forget_before(step)
        for lane in self._lanes:
            lane.strategy.changed.notify()
        await self._journal.begin_step(step, groups)
        return Batch(step=step, groups=tuple(groups))

    def _missing(self, step: int, shares: dict[str, int]) -> str:
        """What the step still waits for, in words; empty: nothing."""
        missing = []
        for lane in self._lanes:
            share = shares.get(lane.name, 0)
            lane.strategy.expire(lane.ctx, step)
            ready = lane.completed()
            if ready < share:
                missing.append(f"{share - ready} of {share} groups of task {lane.name}")
            elif share and lane.strategy.should_wait_for_stragglers(step):
                missing.append(f"groups of task {lane.name} that would expire after step {step}")
        return ", ".join(missing)

    def _raise_if_hopeless(self, step: int, shares: dict[str, int]) -> None:
        """Raise instead of waiting for what nobody will bring."""
        for lane in self._lanes:
            short = shares.get(lane.name, 0) - lane.completed()
            if short <= 0 or lane.has_work():
                continue
            line = (
                f"step {step}: {short} groups of task {lane.name} are missing and none will come: "
            )
            if self._ended:
                raise RunError(line + "the producer was stopped")
            if lane.idle_since_change != self._changed.count:
                continue  # the lane has news to look at
            if lane.exhausted is not None:
                raise RunError(line + str(lane.exhausted))
            if not self._paused and not lane.strategy.is_model_expired(step, self.model_version):
                raise RunError(line + "should_continue_fn stopped before the batch was full")

    def _raise_fault(self) -> None:
        for lane in self._lanes:
            lane.strategy.raise_fault()
        if self._fault is not None:
            raise self._fault

    # -- looking at it ------------------------------------------------------------------------

    @contextmanager
    def _waiting(self, who: str, what: str) -> Iterator[None]:
        since = self._waiting_for.get(who, (what, self._clock()))[1]
        self._waiting_for[who] = (what, since)
        try:
            yield
        finally:
            self._waiting_for.pop(who, None)

    def snapshot(self) -> ProducerSnapshot:
        """Where every group is, who waits for what, and since when."""
        now = self._clock()
        idle_now = 0.0 if self._idle_since is None else now - self._idle_since
        return ProducerSnapshot(
            tasks=tuple(lane.snapshot() for lane in self._lanes),
            waits=tuple(
                Wait(who=who, what=what, since=since, seconds=now - since)
                for who, (what, since) in self._waiting_for.items()
            ),
            producer_wait_s=self._idle_s + idle_now,
            next_step=self.progress.next_consumer_step,
            model_version=self.model_version,
            paused=self._paused,
        )

    # -- going on after a stop ----------------------------------------------------------------

    async def restore(self, journal: Journal) -> None:
        """Take up what the journal holds: buffered groups, those in flight, cursors and counts."""
        committed, pending = journal.last_committed_step(), journal.pending_step()
        begun = committed if pending is None else pending
        if pending is not None:
            self._resumed_batch = journal.batch(pending)
        taken, cursors, counts = journal.taken(), journal.cursors(), journal.counts()
        drops, unfinished = journal.drops(), journal.unfinished_groups()
        self.progress.next_consumer_step = committed + 1
        self.progress.producer_future_step = begun + 1
        self._shares = TaskShares(self._weights, self._groups_per_step)
        for lane in self._lanes:
            name = lane.name
            consumed = taken.get(name, 0)
            self.progress.consumed_samples[name] = self.progress.target_samples[name] = consumed
            self.progress.target_upto[name] = begun
            lane.drawn_before = counts.get(name, {}).get("drawn", 0)
            lane.dropped_before = drops.get(name, {})
            lane.sampler.start_from(cursors.get(name, 0))
        lanes = {lane.name: lane for lane in self._lanes}
        for group in unfinished.buffered:
            if group.task in lanes:
                lanes[group.task].put_back(group)
        for record in unfinished.in_flight:
            if record.task in lanes:
                lanes[record.task].reissue(record)
        self._changed.notify()

    def state_dict(self) -> dict[str, Any]:
        """Counts and cursors; groups are in the journal (or in the buffer's own state)."""
        return {
            "progress": self.progress.state_dict(),
            "lanes": {lane.name: lane.state_dict() for lane in self._lanes},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Tasks that the state does not know start at zero."""
        self.progress.load_state_dict(state["progress"])
        self._shares = TaskShares(self._weights, self._groups_per_step)
        for lane in self._lanes:
            if lane.name in state["lanes"]:
                lane.load_state_dict(state["lanes"][lane.name])


def _check(
    tasks: Sequence[ProduceTask], buffer: ReplayBuffer, groups_per_step: int, interval: int
) -> None:
    if not tasks:
        raise UserError("producer: got no tasks, allowed: at least one")
    bound = buffer.max_groups_per_task
    if 0 < bound < groups_per_step:
        raise UserError(
            f"produce.max_buffered_groups: got {bound}, allowed: 0 or at least "
            f"train.groups_per_step = {groups_per_step}"
        )
    for task in tasks:
        if task.strategy.sync_weights_interval != interval:
            raise UserError(
                f"task {task.name}: its strategy was built with sync_weights_interval="
                f"{task.strategy.sync_weights_interval}, allowed: {interval}"
            )
