"""A state machine drives strategy, buffer, sampler and journal through random schedules on virtual time.

After every action: conservation per task, the staleness bound per sample, nothing trained twice, and the
journal agrees with memory. At the end of every schedule: progress, whatever happened before.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.data.sampler import Sampler
from penstock.rollout import (
    AsyncProduceStrategyConfig,
    ProduceProgress,
    Producer,
    ProduceTask,
    SyncProduceStrategyConfig,
)
from penstock.rollout.progress import ReplayBuffer
from penstock.run.twin.virtual_time import VirtualClock
from penstock.store.journal import Journal
from penstock.types import Batch, Status, StepReport, expand_segments, staleness
from stages.fake_agent_loop import FakeAgentLoop
from stages.rollouts import make_prompts

SEEN: Counter[str] = Counter()


class Life:
    """The state of one process: everything that a kill -9 loses."""

    def __init__(self, machine: ProducingMachine) -> None:
        self.journal = Journal.open(machine.path, threaded=False)
        self.buffer = ReplayBuffer(max_groups_per_task=machine.capacity * machine.groups_per_step)
        self.loops = {name: FakeAgentLoop() for name in machine.weights}
        for loop in self.loops.values():
            loop.version = machine.version
        tasks = [
            ProduceTask(
                name=name,
                weight=weight,
                strategy=machine.config.build(sync_weights_interval=machine.interval),
                agent_loop=self.loops[name],
                sampler=Sampler(
                    make_prompts(7),
                    task_name=name,
                    prompt_repeat_k=2,
                    seed=3,
                    replay_buffer=self.buffer,
                ),
            )
            for name, weight in machine.weights.items()
        ]
        self.producer = Producer(
            tasks=tasks,
            replay_buffer=self.buffer,
            journal=self.journal,
            progress=ProduceProgress.build(machine.weights),
            groups_per_step=machine.groups_per_step,
            sync_weights_interval=machine.interval,
            first_version=machine.version,
        )
        self.running: asyncio.Task[None] | None = None
        self.taking: asyncio.Task[Batch] | None = None
        self.pausing: asyncio.Task[float] | None = None
        self.batch: Batch | None = None
        self.paused = False


class ProducingMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="penstock-machine-"))
        self.path = self.folder / "journal.db"
        self.clock = VirtualClock()
        self.life: Life | None = None
        self.version = 0  # that the engines have
        self.step = 0  # last committed
        self.trained: set[str] = set()
        self.begun: dict[int, list[str]] = {}
        self.refuse_every = 0

    @initialize(
        sync=st.booleans(),
        max_staleness=st.integers(0, 2),
        interval=st.integers(1, 2),
        over_sample=st.sampled_from([0.0, 0.5, 1.0]),
        partial=st.booleans(),
        tail=st.sampled_from([0, 2]),
        two_tasks=st.booleans(),
        capacity=st.sampled_from([0, 0, 2]),
        refuse_every=st.sampled_from([0, 0, 3]),
    )
    def begin(
        self,
        sync: bool,
        max_staleness: int,
        interval: int,
        over_sample: float,
        partial: bool,
        tail: int,
        two_tasks: bool,
        capacity: int,
        refuse_every: int,
    ) -> None:
        common = {
            "max_failure_share": 1.0,
            "pause_timeout_s": 12.0,
            "is_valid_sample_fn": self.is_valid,
        }
        if sync:
            self.config = SyncProduceStrategyConfig(**common)
        else:
            self.config = AsyncProduceStrategyConfig(
                max_staleness=max_staleness,
                over_sample_threshold=over_sample,
                enable_partial_rollout=partial,
                tail_batch_trigger_size=tail,
                **common,
            )
        self.interval, self.capacity = interval, capacity
        self.threshold = (self.config.max_staleness + 1) * interval
        self.weights = {"a": 3.0, "b": 1.0} if two_tasks else {"a": 1.0}
        self.groups_per_step = 3
        self.refuse_every = refuse_every
        self._start()

    def is_valid(self, rollouts: list) -> bool:
        cursor = int(rollouts[0].rollout_id.split(":")[1].split(".")[0])
        return not self.refuse_every or cursor % self.refuse_every != 1

    def _start(self) -> None:
        self.life = Life(self)
        self.clock.run(self.life.producer.restore(self.life.journal))
        self._run()

    def _run(self) -> None:
        life = self.life
        assert life is not None
        life.running = self.clock.loop.create_task(life.producer.run())
        self.clock.settle()

    def _held(self) -> list[tuple[FakeAgentLoop, str]]:
        assert self.life is not None
        return [(loop, group) for loop in self.life.loops.values() for group in loop.held]

    # -- what engines do ----------------------------------------------------------------------

    @precondition(lambda self: self._held())
    @rule(data=st.data(), tokens=st.integers(1, 6), kind=st.sampled_from("ccccccfra"))
    def group_ends(self, data: st.DataObject, tokens: int, kind: str) -> None:
        loop, group_id = data.draw(st.sampled_from(self._held()))
        if kind == "c":
            loop.finish(group_id, num_tokens=tokens)
        elif kind == "f":
            loop.fail(group_id)
        elif kind == "r":
            loop.raise_in(group_id)
        else:
            loop.abort(group_id, partial_tokens=tokens - 1)
        self.clock.settle()

    @precondition(lambda self: self._held())
    @rule()
    def all_groups_finish(self) -> None:
        for loop, group_id in self._held():
            loop.finish(group_id)
        self.clock.settle()

    @rule(seconds=st.sampled_from([0.05, 0.2, 6.0, 20.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.run(asyncio.sleep(seconds))
        self.clock.settle()

    # -- what the consumer does ---------------------------------------------------------------

    @precondition(lambda self: self.life.taking is None and self.life.batch is None)
    @rule()
    def consumer_asks_for_a_batch(self) -> None:
        life = self.life
        life.taking = self.clock.loop.create_task(life.producer.take_batch(self.step + 1))
        self.clock.settle()

    @precondition(lambda self: self.life.batch is not None)
    @rule(publish=st.booleans())
    def consumer_trains(self, publish: bool) -> None:
        life, step = self.life, self.step + 1
        report = StepReport(step=step, policy_version=step, digest=f"digest-{step}")
        self.clock.run(life.journal.commit_step(report))
        self.trained.update(group.group_id for group in life.batch.groups)
        self.step, life.batch = step, None
        if publish or step - self.version >= self.threshold:
            self._publish()

    @precondition(lambda self: self._publishable() > self.version)
    @rule()
    def weights_arrive(self) -> None:
        self._publish()

    def _publishable(self) -> int:
        return self.step - self.step % self.interval

    def _publish(self) -> None:
        if self._publishable() > self.version:
            self.version = self._publishable()
            for loop in self.life.loops.values():
                loop.version = self.version
            self.life.producer.weights_updated(self.version)
        self.clock.settle()

    @precondition(lambda self: not self.life.paused and self.life.taking is None)
    @rule(publish=st.booleans())
    def a_step_goes_by(self, publish: bool) -> None:
        if self.life.batch is None:
            self.consumer_asks_for_a_batch()
            if self._held():
                self.all_groups_finish()
            self.laws_hold()
        if self.life.batch is not None:
            self.consumer_trains(publish)

    # -- pauses, stops and crashes ------------------------------------------------------------

    @precondition(lambda self: not self.life.paused)
    @rule(deaf=st.booleans())
    def pause(self, deaf: bool) -> None:
        for loop in self.life.loops.values():
            loop.deaf = deaf  # the agent loop ignores aborts
        self.life.paused = True
        self.life.pausing = self.clock.loop.create_task(self.life.producer.pause())
        self.clock.settle()

    @precondition(lambda self: self.life.paused)
    @rule()
    def resume(self) -> None:
        if self.life.pausing is not None:
            self.clock.run(self.life.pausing)
        assert not any(task.in_flight for task in self._in_memory_only())
        self.life.producer.resume()
        self.life.paused, self.life.pausing = False, None
        self.clock.settle()

    def _in_memory_only(self) -> list:
        waiting = {name: self.life.buffer.count(name, Status.INIT) for name in self.weights}
        tasks = self.life.producer.snapshot().tasks
        return [task for task in tasks if task.in_flight > waiting[task.name]]

    @rule()
    def run_is_cancelled_and_started_again(self) -> None:
        self._end_run()
        self._run()

    @rule(clean=st.booleans())
    def process_ends_and_is_resumed(self, clean: bool) -> None:
        life = self.life
        self._count_what_happened()
        if clean:
            self._end_run()
            life.journal.close()
        self.life = None
        for task in asyncio.all_tasks(self.clock.loop):
            task.cancel()
        if not clean:  # queued records that were not written are lost with the process
            life.journal._writer._database.close()
        self.clock.settle()
        self.version = self._recovered_version()
        self._start()

    def _recovered_version(self) -> int:
        """Return the version after a crash: every committed step is redone and loaded by engines."""
        return self.step

    def _end_run(self) -> None:
        life = self.life
        if life.pausing is not None:
            self.clock.run(life.pausing)
            life.pausing = None
        life.running.cancel()
        self.clock.run(asyncio.wait([life.running]))
        if life.taking is not None:
            self.clock.settle()
            if life.taking.done() and life.taking.exception() is not None:
                life.taking = None  # it got the error that no task produces

    # -- the laws -----------------------------------------------------------------------------

    @invariant()
    def laws_hold(self) -> None:
        SEEN["actions"] += 1
        life = self.life
        if life is None:
            return
        if life.taking is not None and life.taking.done():
            life.batch, life.taking = life.taking.result(), None
            self._check_batch(life.batch)
        assert not life.running.done(), life.running
        self._check_conservation()

    def _check_batch(self, batch: Batch) -> None:
        assert batch.step == self.step + 1
        assert len(batch.groups) == self.groups_per_step
        ids = [group.group_id for group in batch.groups]
        assert len(set(ids)) == len(ids)
        again = self.trained & set(ids)
        assert not again, f"trained twice: {again}"
        assert self.begun.setdefault(batch.step, ids) == ids, "a begun step changed its batch"
        for group in batch.groups:
            assert group.status is Status.COMPLETED
            assert self.is_valid(group.rollouts)
            for rollout in group.rollouts:
                versions = expand_segments(rollout.segments)
                assert staleness(batch.step, min(versions)) < self.threshold

    def _check_conservation(self) -> None:
        counts, drops = self.life.journal.counts(), self.life.journal.drops()
        for task in self.life.producer.snapshot().tasks:
            assert task.balanced, task
            row = counts.get(task.name, {"drawn": 0})
            assert row["drawn"] == task.drawn
            assert row.get("trained", 0) + row.get("taken", 0) == task.trained
            assert row.get("dropped", 0) == sum(task.dropped.values())
            assert drops.get(task.name, {}) == dict(task.dropped)

    def teardown(self) -> None:
        try:
            if self.life is not None:
                self._check_progress()
                SEEN["steps"] += self.step
                self._count_what_happened()
        finally:
            if self.life is not None:
                self._end_run()
                self.life.journal.close()
            self.clock.close()
            shutil.rmtree(self.folder)

    def _check_progress(self) -> None:
        """With an engine that works again, every group that is owed is trained or dropped."""
        for loop in self.life.loops.values():
            loop.deaf = False
        if self.life.paused:
            self.resume()
        self._publish()
        owed = self._owed()
        for _ in range(60):
            if self.life.taking is None and self.life.batch is None:
                self.consumer_asks_for_a_batch()
            for _ in range(40):
                if self.life.taking is None or self.life.taking.done():
                    break
                self.all_groups_finish()
                self.time_passes(1.0)
            self.laws_hold()
            assert self.life.batch is not None, self.life.producer.snapshot()
            self.consumer_trains(True)
            if not owed & self._owed():
                return
        raise AssertionError(f"starved: {owed & self._owed()}")

    def _count_what_happened(self) -> None:
        for task in self.life.producer.snapshot().tasks:
            SEEN.update(task.counters)
            SEEN.update(task.dropped)

    def _owed(self) -> set[str]:
        rows = self.life.journal.query(
            "SELECT group_id FROM groups WHERE state IN ('in_flight', 'buffered')"
        )
        return {group_id for (group_id,) in rows}


def _settings(examples: int) -> settings:
    return settings(
        max_examples=examples,
        stateful_step_count=60,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )


class TestProducing(ProducingMachine.TestCase):
    settings = _settings(10)


@pytest.mark.slow
class TestProducingForLong(ProducingMachine.TestCase):
    settings = _settings(240)


@pytest.mark.slow
def test_the_machine_saw_everything() -> None:
    """Checks the events that the state machine above has counted; without it there are none."""
    if SEEN:
        assert SEEN["actions"] >= 10_000, SEEN
        for event in (
            "steps",
            "retried",
            "aborted",
            "expired",
            "failed",
            "filtered",
            "pause_timeouts",
        ):
            assert SEEN[event] > 20, SEEN


if __name__ == "__main__":
    ProducingMachine.TestCase().runTest()
    print(SEEN)
