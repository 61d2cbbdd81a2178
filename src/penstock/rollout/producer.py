"""The producer runs the tasks ahead of the trainer and hands out one batch per step.

    Producer                  version of the weights, pause, steps, each task's share of a batch
      ProduceContext          the state of one task: step, version, batch size
      ProduceStrategy         when to launch groups of the task, and which are too old
        GroupRunner           the groups in flight, their retries, drops and counts
    ReplayBuffer, Journal     groups that landed; shared by all tasks

Tasks do not wait for each other. Knows no engine and no trainer.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.config.plugins import place_of
from penstock.data.sampler import Sampler
from penstock.errors import PenstockError, PromptsRetired, RunError, UserError
from penstock.rollout.agent_loop import AgentLoop
from penstock.rollout.group_runner import ProduceContext
from penstock.rollout.progress import (
    ProduceProgress,
    ProducerSnapshot,
    ReplayBuffer,
    TaskShares,
    TaskSnapshot,
)
from penstock.rollout.strategy import ProduceBatchStatus, ProduceStrategy
from penstock.store.journal import InFlightRecord, Journal
from penstock.types import Batch, Group, Status, staleness
from penstock.waits import Signal, WaitKind, Waits, end_all


@dataclass(slots=True, frozen=True, kw_only=True)
class ProduceTask:
    """One task as the caller gives it to a producer."""

    name: str
    weight: float
    strategy: ProduceStrategy
    agent_loop: AgentLoop
    sampler: Sampler
    num_skipped_long: int = 0  # prompts of the dataset that were left out as too long


class _TaskState:
    """A task of a producer: its strategy, its context, and where it stands."""

    def __init__(self, task: ProduceTask, ctx: ProduceContext) -> None:
        self.name = task.name
        self.strategy = task.strategy
        self.runner = task.strategy.runner
        self.ctx = ctx
        self.num_skipped_long = task.num_skipped_long

    def needs_weights(self, step: int) -> bool:
        """Whether groups of the weights in force would be too old for a step."""
        version = self.ctx.model_step
        too_old = staleness(step, version) >= self.strategy.stale_threshold
        return too_old or self.strategy.is_model_expired(step, version)

    def put_back(self, group: Group) -> None:
        """Put back a group that was in the buffer when the run was interrupted."""
        is_retry = group.status in (Status.ABORTED, Status.EXPIRED)
        is_tail = is_retry and group.tries >= self.strategy.config.max_tries
        self.ctx.put(group, is_tail=is_tail)

    def reissue(self, record: InFlightRecord) -> None:
        """Put back a group that was in flight, with the tries and seeds it had."""
        group = record.group
        if group is None:
            group = self.ctx.sampler.group_of(record.cursor, record.prompt)
        elif group.status is Status.COMPLETED:  # the group had expired before it was issued again
            group.move_to(Status.EXPIRED)
        else:
            group.abort_unfinished()
        group.tries = record.tries
        self.put_back(group)

    def snapshot(self) -> TaskSnapshot:
        buffer, runner = self.ctx.replay_buffer, self.runner
        counts = {status: buffer.count(self.name, status) for status in Status}
        return TaskSnapshot(
            name=self.name,
            drawn=runner.drawn,
            trained=self.ctx.progress.consumed_samples[self.name],
            buffered=sum(counts.values()) - counts[Status.INIT],
            in_flight=self.strategy.pending_task_count() + counts[Status.INIT],
            dropped=dict(runner.dropped),
            ready=counts[Status.COMPLETED],
            aborted=counts[Status.ABORTED],
            expired=counts[Status.EXPIRED],
            counters=dict(runner.counters),
            last_error=runner.failures.last_reason,
        )


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
        waits: Waits | None = None,
        first_version: int = 0,
        last_step: int | None = None,
    ) -> None:
        _check(tasks, replay_buffer, groups_per_step, sync_weights_interval)
        self.progress = progress
        self.model_version = first_version
        self._last_step = last_step  # nothing is produced for later steps
        self._buffer = replay_buffer
        self._journal = journal
        self._waits = waits or Waits()
        self._groups_per_step = groups_per_step
        self._changed, self._looked = Signal(), Signal()  # second: also when a task becomes idle
        self._changed.forward_to(self._looked)
        self._weights = {task.name: task.weight for task in tasks}
        self._tasks = [self._state_of(task) for task in tasks]
        self._shares = TaskShares(
            self._weights, groups_per_step, first_step=progress.next_consumer_step
        )
        self._resumed_batch: Batch | None = None
        self._paused = False
        self._stopping = False
        self._ended = False
        self._fault: BaseException | None = None
        # idle task -> the change count that it waits to see followed
        self._idle_at: dict[str, int] = {}
        self._idle_since: float | None = None
        self._idle_s = 0.0  # over the run, without the idle time that lasts still
        self._idle_read_s = 0.0  # the idle time when the metrics were read
        self._pause_s = 0.0  # since the metrics were read

    def _state_of(self, task: ProduceTask) -> _TaskState:
        self.progress.add_task(task.name)
        task.strategy.changed.forward_to(self._changed)
        ctx = ProduceContext(
            agent_loop=task.agent_loop,
            sampler=task.sampler,
            replay_buffer=self._buffer,
            journal=self._journal,
            progress=self.progress,
            runner=task.strategy.runner,
            task_name=task.name,
            task_batch_size=0,
            train_step=self.progress.next_consumer_step,
            model_step=self.model_version,
            update_event=asyncio.Event(),
        )
        return _TaskState(task, ctx)

    # -- running ahead ------------------------------------------------------------------------

    async def run(self) -> None:
        """Run all tasks ahead until cancelled or stopped. Waits for: weights, resume, landings."""
        self._stopping = self._ended = False
        running = [
            asyncio.create_task(self._run_task(task), name=f"produce {task.name}")
            for task in self._tasks
        ]
        try:
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_EXCEPTION)
            for ended in done:
                ended.result()
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # a step that waits for groups raises it too
            self._fault = error
            raise
        finally:
            await end_all(running)
            for task in self._tasks:
                await task.runner.cancel(task.ctx)
            self._ended = True
            self._changed.notify()

    def stop(self) -> None:
        """Let `run` end; a resumed run issues the groups in flight again."""
        self._stopping = True
        self._interrupt()

    async def _run_task(self, task: _TaskState) -> None:
        """Produce for one task as far ahead as allowed.

        Consumes prompts, produces landed groups. Waits for: resume, new weights, a step to be consumed.
        Woken by: `_changed`.
        """
        while not self._stopping:
            seen = self._changed.count
            waits_for = await self._produce(task)
            if waits_for:
                await self._idle(task, seen, waits_for)

    async def _produce(self, task: _TaskState) -> str:
        """Call the strategy once; return what the task waits for next, "" for nothing."""
        ctx = task.ctx
        if self._paused:
            return "resume"
        if self._last_step is not None and self.progress.next_consumer_step > self._last_step:
            return "nothing: the last step is taken"
        ctx.update_event.clear()
        # the step to produce for, as far ahead as the staleness bound allows now
        next_step = self.progress.next_consumer_step
        step = task.strategy.furthest_step(self.model_version, next_step)
        if self._last_step is not None:
            step = min(step, self._last_step)
        ctx.train_step = step
        ctx.task_batch_size = self._shares.at(next_step).get(task.name, 0)
        if task.needs_weights(step):
            return f"weights newer than version {self.model_version}"
        self.progress.ensure_target_upto(step, self._shares.at, task.name)
        try:
            status = await task.strategy.produce_batch(ctx)
        except Exception as error:
            if isinstance(error, PenstockError) or not (place := place_of(error)):
                raise
            said = (
                f"{type(error).__name__}: {error}{place}"  # a strategy or a rule of the user's own
            )
            raise RunError(f"task {task.name}: its production failed: {said}") from error
        if status is ProduceBatchStatus.UPDATE_WEIGHT_AND_ABORT:
            return ""
        if (
            status is ProduceBatchStatus.NORMAL
            and ctx.train_step >= self.progress.next_consumer_step
        ):
            return f"step {ctx.train_step} to be consumed"
        return f"weights newer than version {self.model_version}"

    async def _idle(self, task: _TaskState, seen: int, what: str) -> None:
        """Wait until something has changed since `seen`."""
        self._idle_at[task.name] = seen
        self._looked.notify()  # a step may wait for what this task will not produce
        self._measure_idle_time()
        who = f"produce {task.name}"
        with self._waits.wait(who, WaitKind.WAIT, what):
            await self._changed.wait_after(seen)
        del self._idle_at[task.name]
        self._measure_idle_time()

    def _measure_idle_time(self) -> None:
        """Count the time in which nothing is in flight and no task could launch a group."""
        idle = all(
            task.name in self._idle_at and not task.strategy.pending_task_count()
            for task in self._tasks
        )
        now = self._waits.clock()
        if idle and self._idle_since is None:
            self._idle_since = now
        elif not idle and self._idle_since is not None:
            self._idle_s += now - self._idle_since
            self._idle_since = None

    def weights_updated(self, version: int) -> None:
        """Tell the producer which version the engines have confirmed; a second time changes nothing."""
        if version < self.model_version:
            raise RunError(f"weights: got version {version} after version {self.model_version}")
        if version == self.model_version:
            return  # tasks keep their plans: a new one could wait for groups that the old one passed by
        self.model_version = version
        for task in self._tasks:
            task.ctx.model_step = version
            task.ctx.sampler.learn(self._journal, version)
        self._interrupt()

    def _interrupt(self) -> None:
        for task in self._tasks:
            task.ctx.update_event.set()
        self._changed.notify()

    async def pause(self, *, abort: bool = True) -> float:
        """Launch nothing until `resume`, and wait for the groups of all tasks to land; return the seconds.

        abort: all groups are told to stop at once; otherwise they are generated to their end.
        """
        self._halt(True)
        self._interrupt()
        what = "the groups that were aborted" if abort else "the groups in flight"
        with self._waits.wait("update", WaitKind.WAIT, what):
            pauses = (
                task.strategy.pause_produce(task.ctx)
                if abort
                else task.runner.pause(task.ctx, abort=False)
                for task in self._tasks
            )
            seconds = max(await asyncio.gather(*pauses))
        self._pause_s += seconds
        return seconds

    def resume(self) -> None:
        """Continue after `pause`; do nothing without one."""
        if self._paused:
            self._halt(False)
            self._changed.notify()

    def _halt(self, halted: bool) -> None:
        self._paused = halted
        for task in self._tasks:
            task.runner.halt(halted)

    # -- consuming ----------------------------------------------------------------------------

    async def take_batch(self, step: int) -> Batch:
        """The journalled batch of a step. Waits for: every task's share, completed and fresh."""
        if step != self.progress.next_consumer_step:
            allowed = self.progress.next_consumer_step
            raise UserError(f"take_batch: got step {step}, allowed: {allowed}")
        resumed, self._resumed_batch = self._resumed_batch, None
        if resumed is not None:  # its groups were counted when they were restored
            self.progress.finish_consume(step, {})
            self._changed.notify()
            return resumed
        shares = self._shares.at(step)
        while True:
            seen, looked = self._changed.count, self._looked.count
            for fault in (*(task.runner.fault for task in self._tasks), self._fault):
                if fault is not None:
                    raise fault
            for task in self._tasks:  # all: each looks which of its groups are too old
                task.strategy.expire(task.ctx, step)
            if all(
                task.ctx.completed() >= share and not task.strategy.should_wait_for_stragglers(step)
                for task in self._tasks
                if (share := shares.get(task.name, 0))
            ):
                break
            if self._changed.count != seen:
                continue  # a group expired in the meantime
            self._raise_if_hopeless(step, shares)
            await self._looked.wait_after(looked)
        groups: list[Group] = []
        for task in self._tasks:  # each task's groups in cursor order; none of them has expired
            taken: list[Group] = []
            for _ in range(shares.get(task.name, 0)):
                group = self._buffer.take(task.name, Status.COMPLETED)
                assert group is not None, "counted before it was taken"
                taken.append(group)
            assert all(g.staleness(step) < task.strategy.stale_threshold for g in taken), task.name
            groups += sorted(taken, key=lambda group: group.cursor)
        self.progress.ensure_target_upto(step, self._shares.at)  # of tasks without a share too
        self.progress.finish_consume(step, shares)
        self._shares.forget_before(step)
        await self._journal.begin_step(step, groups)
        for task in self._tasks:  # then: the start of new groups would keep the batch waiting
            task.strategy.changed.notify()
        return Batch(step=step, groups=tuple(groups))

    def _raise_if_hopeless(self, step: int, shares: dict[str, int]) -> None:
        """Raise a RunError if no task will produce the missing groups: PromptsRetired if no prompt is left."""
        for task in self._tasks:
            short = shares.get(task.name, 0) - task.ctx.completed()
            if short <= 0 or task.strategy.pending_task_count():
                continue
            if reason := task.ctx.sampler.why_exhausted:
                buffer = task.ctx.replay_buffer
                if not any(buffer.count(task.name, s) for s in (Status.INIT, Status.ABORTED)):
                    raise PromptsRetired(reason)
            line = (
                f"step {step}: {short} groups of task {task.name} are missing and nothing will "
                "produce them: "
            )
            if self._ended:
                raise RunError(line + "the producer was stopped")
            if self._idle_at.get(task.name) != self._changed.count:
                continue  # the task has not looked at the newest change yet
            needs_weights = task.ctx.train_step < step or task.needs_weights(step)
            if not self._paused and not needs_weights:
                raise RunError(line + "should_continue_fn stopped before the batch was full")

    # -- display ------------------------------------------------------------------------------

    def snapshot(self) -> ProducerSnapshot:
        """The counts of groups by state."""
        shares = self._shares.at(self.progress.next_consumer_step)
        return ProducerSnapshot(
            tasks=tuple(task.snapshot() for task in self._tasks),
            batch_ready=sum(
                min(task.ctx.completed(), shares.get(task.name, 0)) for task in self._tasks
            ),
            batch_size=self._groups_per_step,
        )

    def read_metrics(self) -> dict[str, float]:
        """The metrics of the producing side since the last call, before any filter."""
        waited = self._idle_s
        if self._idle_since is not None:  # the idle time that lasts still
            waited += self._waits.clock() - self._idle_since
        metrics = {
            "time/pause_s": self._pause_s,
            "time/producer_wait_s": waited - self._idle_read_s,
        }
        self._pause_s, self._idle_read_s = 0.0, waited
        counted = self.progress.read_metrics()
        by_task = {
            task.name: {
                **counted[task.name],
                "prompts_skipped_long": float(task.num_skipped_long),
                **task.runner.account.read(task.runner.counters),
            }
            for task in self._tasks
        }
        for name, key in (("groups", "produced/groups"), ("tokens", "produced/tokens")):
            metrics[key] = sum(figures[name] for figures in by_task.values())
        metrics["time/produce_s"] = sum(figures["produce_s"] for figures in by_task.values())
        if count := sum(figures["reward_count"] for figures in by_task.values()):
            total = sum(figures["reward_sum"] for figures in by_task.values())
            metrics["produced/reward"] = total / count
        prompts: Counter[str] = Counter()
        for state in self._tasks:
            prompts.update(state.ctx.sampler.counts())
        if total_prompts := prompts.pop("prompts", 0):
            metrics |= {f"prompts/{name}": n / total_prompts for name, n in prompts.items()}
        for name in ("failed", "expired"):  # groups, each time that they were
            metrics[f"groups/{name}"] = sum(figures[name] for figures in by_task.values())
        for task, figures in by_task.items():
            metrics |= {f"tasks/{task}/{name}": value for name, value in figures.items()}
        return metrics

    # -- resuming a run -----------------------------------------------------------------------

    async def restore(self, journal: Journal) -> None:
        """Take over what the journal holds: buffered groups, groups in flight, cursors and counts."""
        committed, pending = journal.last_committed_step(), journal.pending_step()
        begun = committed if pending is None else pending
        if pending is not None:
            self._resumed_batch = journal.batch(pending)
        taken, cursors, counts = journal.taken(), journal.cursors(), journal.counts()
        drops, unfinished = journal.drops(), journal.unfinished_groups()
        progress = self.progress
        progress.next_consumer_step = committed + 1
        self._shares = TaskShares(self._weights, self._groups_per_step)
        tasks = {task.name: task for task in self._tasks}
        for name, task in tasks.items():
            consumed = taken.get(name, 0)
            progress.consumed_samples[name] = progress.target_samples[name] = consumed
            progress.target_upto[name] = begun
            runner = task.runner
            runner.drawn = counts.get(name, {}).get("drawn", 0)
            runner.dropped.clear()
            runner.dropped.update(drops.get(name, {}))
            task.ctx.sampler.restore(journal, cursors.get(name, 0))
        for group in unfinished.buffered:
            if group.task in tasks:
                tasks[group.task].put_back(group)
        for record in unfinished.in_flight:
            if record.task in tasks:
                tasks[record.task].reissue(record)
        self._changed.notify()


def _check(
    tasks: Sequence[ProduceTask], buffer: ReplayBuffer, groups_per_step: int, interval: int
) -> None:
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
