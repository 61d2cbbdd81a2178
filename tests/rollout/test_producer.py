"""The producer: one loop for sync and async, batches in order, failures, tasks, resume."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path

import pytest

from penstock.data.sampler import Sampler
from penstock.errors import UserError
from penstock.rollout import (
    AsyncProduceStrategyConfig,
    ProduceBatchStatus,
    ProduceContext,
    ProduceProgress,
    Producer,
    ProduceStrategy,
    ProduceTask,
    SyncProduceStrategyConfig,
)
from penstock.rollout.progress import ReplayBuffer
from penstock.store.journal import Journal
from penstock.types import Status, StepReport
from stages.fake_agent_loop import FakeAgentLoop
from stages.fake_engine import FakeEngine
from stages.producing import (
    ProducerStage,
    cancel,
    on_virtual_time,
    single_turn,
    train_steps,
    turns,
    uneven,
)
from stages.rollouts import make_prompts


def run_batches(path: Path, config: AsyncProduceStrategyConfig, *, refuse: bool = False) -> list:
    seen: list = []

    async def main() -> None:
        engine = FakeEngine(length=uneven)
        rule = (lambda rollouts: rollouts[0].seed % 3 != 0) if refuse else None
        stage = ProducerStage(path, config, agent_loop=single_turn(engine), is_valid=rule)
        running = asyncio.create_task(stage.producer.run())
        seen.extend(await train_steps(stage, engine, 1, 6))
        await cancel(running)
        assert stage.producer.snapshot().tasks[0].balanced

    on_virtual_time(main)
    return seen


@pytest.mark.parametrize("refuse", [False, True])
def test_async_with_staleness_0_trains_the_batches_of_sync(tmp_path: Path, refuse: bool) -> None:
    for name in ("sync", "async"):
        (tmp_path / name).mkdir()
    sync = run_batches(tmp_path / "sync", SyncProduceStrategyConfig(), refuse=refuse)
    other = run_batches(
        tmp_path / "async", AsyncProduceStrategyConfig(max_staleness=0), refuse=refuse
    )
    assert sync == other
    assert len(sync) == 6


def test_running_ahead_stops_at_the_staleness_bound_and_goes_on_with_new_weights(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        stage = ProducerStage(tmp_path, AsyncProduceStrategyConfig(max_staleness=1), batch=2)
        running = asyncio.create_task(stage.producer.run())
        await turns()
        assert len(stage.loop.held) == 4  # steps 1 and 2
        stage.finish_all()
        await turns()
        assert not stage.loop.held
        batch = await stage.producer.take_batch(1)
        await turns()
        assert not stage.loop.held  # step 3 would be expired under version 0
        wait = next(w for w in stage.waits.open.values() if w.lane == "produce t")
        assert "step 2 to be consumed" in wait.detail or "weights" in wait.detail
        await asyncio.sleep(3.0)
        assert stage.producer.read_metrics()["time/producer_wait_s"] == pytest.approx(3.0)
        await stage.train(batch)
        await turns()
        assert len(stage.loop.held) == 2
        await cancel(running)

    on_virtual_time(main)


def test_without_oversampling_a_step_waits_for_what_would_expire(tmp_path: Path) -> None:
    async def main() -> None:
        stage = ProducerStage(tmp_path, AsyncProduceStrategyConfig(max_staleness=1), batch=2)
        running = asyncio.create_task(stage.producer.run())
        await turns()
        for group_id in ("t:0", "t:1", "t:2"):
            stage.loop.finish(group_id)  # t:3 is a straggler of version 0
        await stage.train(await stage.producer.take_batch(1))
        await turns()
        stage.loop.finish("t:4")  # enough for step 2, but then t:3 would expire
        taking = asyncio.create_task(stage.producer.take_batch(2))
        await turns()
        assert not taking.done()
        stage.loop.finish("t:3")
        batch = await taking
        assert [group.cursor for group in batch.groups] == [2, 3]
        assert stage.strategy.runner.counters["expired"] == 0
        await cancel(running)

    on_virtual_time(main)


def test_an_expired_group_is_generated_again_with_new_seeds(tmp_path: Path) -> None:
    async def main() -> None:
        config = AsyncProduceStrategyConfig(max_staleness=0, over_sample_threshold=0.5)
        stage = ProducerStage(tmp_path, config, batch=2)
        running = asyncio.create_task(stage.producer.run())
        await turns()
        seeds = [rollout.seed for rollout in stage.loop.held["t:2"][0]]
        stage.finish_all()
        await stage.train(await stage.producer.take_batch(1))
        await turns()
        assert stage.strategy.runner.counters["expired"] == 1
        again = stage.loop.held["t:2"][0]
        assert all(new.seed not in seeds for new in again)
        stage.finish_all()
        batch = await stage.producer.take_batch(2)
        assert [group.cursor for group in batch.groups] == [2, 3]
        assert [group.tries for group in batch.groups] == [2, 1]
        await cancel(running)

    on_virtual_time(main)


# -- failures ------------------------------------------------------------------------------------


def test_steps_are_taken_in_order(tmp_path: Path) -> None:
    async def main() -> None:
        stage = ProducerStage(tmp_path, SyncProduceStrategyConfig())
        with pytest.raises(UserError, match="got step 2, allowed: 1"):
            await stage.producer.take_batch(2)

    on_virtual_time(main)


def test_nothing_is_produced_after_the_last_step(tmp_path: Path) -> None:
    async def main() -> None:
        config = AsyncProduceStrategyConfig(max_staleness=3)
        stage = ProducerStage(tmp_path, config, batch=2, last_step=2)
        running = asyncio.create_task(stage.producer.run())
        await turns()
        assert len(stage.loop.held) == 4
        stage.finish_all()
        for step in (1, 2):
            await stage.train(await stage.producer.take_batch(step))
        await turns()
        assert not stage.loop.held
        await cancel(running)

    on_virtual_time(main)


# -- several tasks ---------------------------------------------------------------------------------


def producer_of(
    tasks: Iterable[tuple[str, float, ProduceStrategy, FakeAgentLoop]],
    journal: Journal,
    buffer: ReplayBuffer,
    groups_per_step: int = 4,
) -> Producer:
    """A producer of tasks by name, weight, strategy and agent loop."""
    made = [
        ProduceTask(
            name=name,
            weight=weight,
            strategy=strategy,
            agent_loop=loop,
            sampler=Sampler(
                make_prompts(50), task_name=name, prompt_repeat_k=1, seed=0, replay_buffer=buffer
            ),
        )
        for name, weight, strategy, loop in tasks
    ]
    return Producer(
        tasks=made,
        replay_buffer=buffer,
        journal=journal,
        progress=ProduceProgress.build([task.name for task in made]),
        groups_per_step=groups_per_step,
    )


def test_one_slow_task_does_not_stop_the_others(tmp_path: Path) -> None:
    async def main() -> None:
        journal = Journal.open(tmp_path / "journal.db", threaded=False)
        buffer, loops = ReplayBuffer(), {"slow": FakeAgentLoop(), "fast": FakeAgentLoop()}
        config = AsyncProduceStrategyConfig(max_staleness=2, pause_timeout_s=7.0)
        tasks = [(name, 1.0, config.build(), loop) for name, loop in loops.items()]
        producer = producer_of(tasks, journal, buffer)
        running = asyncio.create_task(producer.run())
        await turns()
        for _ in range(3):
            for group_id in list(loops["fast"].held):
                loops["fast"].finish(group_id)
            await turns()
        assert buffer.count("fast", Status.COMPLETED) == 6  # three steps ahead
        assert buffer.count("slow", Status.COMPLETED) == 0
        loops["slow"].deaf = loops["fast"].deaf = True
        for task in producer._tasks:
            task.ctx.model_step = 0
        assert await producer.pause() == pytest.approx(7.0)  # tasks pause at the same time
        await cancel(running)

    on_virtual_time(main)


class Held(ProduceStrategy):
    """Stays in one call of `produce_batch` until it is let go."""

    def __init__(self, config: AsyncProduceStrategyConfig) -> None:
        super().__init__(config)
        self.let_go = asyncio.Event()
        self.calls = 0

    async def produce_batch(self, ctx: ProduceContext) -> ProduceBatchStatus:
        self.calls += 1
        await self.let_go.wait()
        return ProduceBatchStatus.NORMAL


def test_a_task_without_a_share_may_sleep_through_several_steps(tmp_path: Path) -> None:
    async def main() -> None:
        journal = Journal.open(tmp_path / "journal.db", threaded=False)
        buffer, loop = ReplayBuffer(), FakeAgentLoop()
        config = AsyncProduceStrategyConfig(max_staleness=0)
        held = Held(config)
        tasks = [("large", 9.0, config.build(), loop), ("rare", 0.1, held, loop)]
        producer = producer_of(tasks, journal, buffer, groups_per_step=2)
        running = asyncio.create_task(producer.run())
        for step in range(1, 5):
            await turns()
            for group_id in list(loop.held):
                loop.finish(group_id)
            await producer.take_batch(step)
            await journal.commit_step(StepReport(step=step, policy_version=step, digest=""))
            loop.version = step
            producer.weights_updated(step)
        assert held.calls == 1
        held.let_go.set()
        await turns()
        assert held.calls > 1
        assert producer.progress.target("rare") == 0
        assert not running.done()
        await cancel(running)

    on_virtual_time(main)


# -- resume ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", [0.0, 0.03, 0.10, 0.15])
@pytest.mark.parametrize("clean", [True, False])
def test_a_killed_run_goes_on_with_the_batches_of_one_that_was_not(
    tmp_path: Path, when: float, clean: bool
) -> None:
    config = SyncProduceStrategyConfig()
    (tmp_path / "whole").mkdir()
    whole = run_batches(tmp_path / "whole", config)

    async def first() -> None:
        engine = FakeEngine(length=uneven)
        stage = ProducerStage(tmp_path, config, agent_loop=single_turn(engine))
        running = asyncio.create_task(stage.producer.run())
        training = asyncio.create_task(train_steps(stage, engine, 1, 3))
        await training
        await asyncio.sleep(when)  # somewhere in step 4
        if when == 0.15:
            await stage.producer.take_batch(4)  # begun, not committed
        if clean:
            await cancel(running)
            stage.journal.close()
        else:
            stage.journal._writer._database.close()
            running.cancel()

    on_virtual_time(first)
    seen: list = []

    async def second() -> None:
        engine = FakeEngine(length=uneven, version=3)
        stage = ProducerStage(tmp_path, config, agent_loop=single_turn(engine))
        stage.producer.weights_updated(3)
        await stage.producer.restore(stage.journal)
        running = asyncio.create_task(stage.producer.run())
        seen.extend(await train_steps(stage, engine, 4, 6))
        await cancel(running)
        assert stage.producer.snapshot().tasks[0].balanced
        assert stage.journal.counts()["t"]["trained"] == 24

    on_virtual_time(second)
    assert seen == whole[3:]


@pytest.mark.parametrize("between", range(10))
def test_a_version_that_is_told_twice_changes_no_plan(tmp_path: Path, between: int) -> None:
    """The first engine has it, then all have it; groups that expire with it land in between."""
    config = AsyncProduceStrategyConfig(over_sample_threshold=1.0, tail_batch_trigger_size=2)

    async def main() -> None:
        stage = ProducerStage(tmp_path, config, batch=2)
        running = asyncio.create_task(stage.producer.run())
        await turns()
        stage.loop.finish("t:0")
        stage.loop.finish("t:2")
        await stage.train(await stage.producer.take_batch(1), publish=True)
        await turns()
        assert sorted(stage.loop.held) == ["t:1", "t:3", "t:4", "t:5"]
        stage.loop.version = 0
        stage.loop.finish("t:1")
        stage.loop.finish("t:3")
        await turns(between)
        stage.publish(1)
        await turns()
        assert sorted(stage.loop.held) == ["t:4", "t:5", "t:6", "t:7"]  # still oversampled
        await cancel(running)

    on_virtual_time(main)


def test_a_task_added_on_resume_starts_at_zero(tmp_path: Path) -> None:
    def build(names: list[str], journal: Journal, loop: FakeAgentLoop) -> Producer:
        config = SyncProduceStrategyConfig()
        tasks = [(name, 1.0, config.build(), loop) for name in names]
        return producer_of(tasks, journal, ReplayBuffer())

    async def main() -> None:
        journal, loop = Journal.open(tmp_path / "journal.db", threaded=False), FakeAgentLoop()
        old = build(["a"], journal, loop)
        running = asyncio.create_task(old.run())
        await turns()
        for group_id in list(loop.held):
            loop.finish(group_id)
        await old.take_batch(1)
        await cancel(running)
        new = build(["a", "b"], journal, loop)
        await new.restore(journal)
        assert (await new.take_batch(1)).step == 1  # the begun batch
        new.weights_updated(1)
        running = asyncio.create_task(new.run())
        await turns()
        assert sorted(loop.held) == ["a:4", "a:5", "b:0", "b:1"]
        await cancel(running)

    on_virtual_time(main)
