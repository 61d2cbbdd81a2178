"""What stops a run and what does not; no step waits for groups that no task will produce."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from penstock.config import Config
from penstock.engine.protocol import Generation, GenerationRequest
from penstock.errors import RunError, TooManyFailures
from penstock.rollout import (
    AsyncProduceStrategyConfig,
    ProduceBatchStatus,
    ProduceContext,
    ProduceStrategy,
    SyncProduceStrategyConfig,
    group_runner,
    strategy_config,
)
from penstock.types import Rollout
from stages.fake_engine import FakeEngine
from stages.producing import ProducerStage, cancel, on_virtual_time, single_turn, turns
from stages.rewards import CountingReward


@pytest.mark.parametrize("how", ["no such model", "raise"])
def test_an_all_failing_backend_makes_few_calls_then_stops_with_one_line(
    tmp_path: Path, how: str
) -> None:
    async def main() -> None:
        engine = FakeEngine(fail=lambda request: how)
        stage = ProducerStage(
            tmp_path, AsyncProduceStrategyConfig(), batch=16, k=2, agent_loop=single_turn(engine)
        )
        running = asyncio.create_task(stage.producer.run())
        with pytest.raises(TooManyFailures, match="of the last 32 groups failed") as caught:
            await stage.producer.take_batch(1)
        assert "\n" not in str(caught.value)
        with pytest.raises(TooManyFailures):
            await running
        assert engine.calls < 100
        assert stage.sampler.cursor <= 32

    assert on_virtual_time(main) < 2.0


@pytest.mark.parametrize("how", ["no such model", "raise"])
def test_a_dead_backend_is_asked_fewer_than_100_times_at_default_sizes(
    tmp_path: Path, how: str
) -> None:
    """One call asks for all rollouts of a group."""

    class Counted(FakeEngine):
        asked = 0

        async def generate_many(self, requests: list[GenerationRequest]) -> list[Generation]:
            self.asked += 1
            return await super().generate_many(requests)

    async def main() -> None:
        engine, config = Counted(fail=lambda request: how), Config()
        groups, rollouts = config.train.groups_per_step, config.sampling.num_generations
        strategy = strategy_config(config.produce)
        loop = single_turn(engine)
        stage = ProducerStage(tmp_path, strategy, batch=groups, k=rollouts, agent_loop=loop)
        running = asyncio.create_task(stage.producer.run())
        with pytest.raises(TooManyFailures):
            await stage.producer.take_batch(1)
        await cancel(running)
        assert groups <= engine.asked < 100

    assert on_virtual_time(main) < 2.0


def test_a_reward_that_answers_503_is_asked_again_without_generating_again(tmp_path: Path) -> None:
    async def main() -> None:
        engine = FakeEngine()
        broken = {"count": 3}

        def fail(rollout: Rollout) -> str:
            if rollout.rollout_id == "t:1.0" and broken["count"] > 1:
                broken["count"] -= 1
                return "503 Service Unavailable"
            return ""

        reward = CountingReward(fail)
        stage = ProducerStage(
            tmp_path, SyncProduceStrategyConfig(), batch=2, agent_loop=single_turn(engine, reward)
        )
        running = asyncio.create_task(stage.producer.run())
        batch = await stage.producer.take_batch(1)
        assert engine.calls == 4  # once per rollout
        assert reward.calls.count("t:1.0") == 3
        assert reward.calls.count("t:1.1") == 1  # finished members are not scored again
        assert [group.tries for group in batch.groups] == [1, 3]
        assert stage.strategy.runner.counters["failed"] == 2
        await cancel(running)

    on_virtual_time(main)


def test_one_raising_group_is_isolated_and_dropped_with_its_reason(tmp_path: Path) -> None:
    async def main() -> None:
        engine = FakeEngine(fail=lambda r: "bad prompt" if r.request_id.startswith("t:1.") else "")
        stage = ProducerStage(
            tmp_path, SyncProduceStrategyConfig(), batch=3, agent_loop=single_turn(engine)
        )
        running = asyncio.create_task(stage.producer.run())
        batch = await stage.producer.take_batch(1)
        assert [group.cursor for group in batch.groups] == [0, 2, 3]
        task = stage.producer.snapshot().tasks[0]
        assert task.dropped == {"failed": 1}
        assert task.balanced
        rows = stage.journal.query("SELECT reason FROM events WHERE kind = 'dropped'")
        assert rows == [("engine: bad prompt",)]
        await cancel(running)

    on_virtual_time(main)


class Alarm(BaseException):
    """What a signal raises wherever the program is."""


def test_what_is_no_exception_ends_the_run_instead_of_a_group_in_silence(tmp_path: Path) -> None:
    """Such as the alarm of a test runner."""

    class Ringing(FakeEngine):
        asked = 0

        async def generate_many(self, requests: list[GenerationRequest]) -> list[Generation]:
            self.asked += 1
            if self.asked == 3:
                raise Alarm
            return await super().generate_many(requests)

    async def main() -> None:
        stage = ProducerStage(
            tmp_path, SyncProduceStrategyConfig(), batch=4, k=2, agent_loop=single_turn(Ringing())
        )
        running = asyncio.create_task(stage.producer.run())
        with pytest.raises(Alarm):
            await asyncio.wait_for(stage.producer.take_batch(1), 60)
        with pytest.raises(Alarm):
            await running

    on_virtual_time(main)


class InPairs(ProduceStrategy):
    """As docs/async.md shows it; the third group ends in what is no Exception."""

    drawn = 0
    where = "strategy"

    async def produce_batch(self, ctx: ProduceContext) -> ProduceBatchStatus:
        while await ctx.available_count() < ctx.target_abs:
            if ctx.should_abort():
                return ProduceBatchStatus.UPDATE_WEIGHT_AND_ABORT
            await asyncio.gather(self.one(ctx), self.one(ctx))
        return ProduceBatchStatus.NORMAL

    async def one(self, ctx: ProduceContext) -> None:
        group = await ctx.sample_group()
        self.drawn += 1
        if self.drawn == 3 and self.where == "strategy":
            raise Alarm
        await ctx.put_generated_group(await ctx.generate_group(group))


@pytest.mark.parametrize("where", ["strategy", "agent", "rule"])
def test_what_is_no_exception_ends_the_run_of_a_strategy_that_generates_by_itself(
    tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = 0

    def ring() -> bool:
        nonlocal called
        called += 1
        if called == 3:
            raise Alarm
        return True

    class Ringing(FakeEngine):
        async def generate_many(self, requests: list[GenerationRequest]) -> list[Generation]:
            if where == "agent":
                ring()
            return await super().generate_many(requests)

    async def main() -> None:
        stage = ProducerStage(
            tmp_path,
            AsyncProduceStrategyConfig(strategy=f"{__name__}:InPairs"),
            batch=4,
            agent_loop=single_turn(Ringing()),
            is_valid=(lambda rollouts: ring()) if where == "rule" else None,
        )
        running = asyncio.create_task(stage.producer.run())
        with pytest.raises(Alarm):
            await asyncio.wait_for(stage.producer.take_batch(1), 60)
        with pytest.raises(Alarm):
            await running

    monkeypatch.setattr(InPairs, "where", where)
    on_virtual_time(main)


def test_a_raising_validity_rule_fails_its_groups_and_stops_the_run(tmp_path: Path) -> None:
    async def main() -> None:
        def rule(rollouts: list[Rollout]) -> bool:
            raise KeyError("score")

        stage = ProducerStage(
            tmp_path,
            SyncProduceStrategyConfig(),
            agent_loop=single_turn(FakeEngine()),
            is_valid=rule,
        )
        running = asyncio.create_task(stage.producer.run())
        with pytest.raises(TooManyFailures, match="validity rule: KeyError"):
            await stage.producer.take_batch(1)
        await cancel(running)

    on_virtual_time(main)


# -- never a hang --------------------------------------------------------------------------------


def test_filters_that_refuse_everything_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_runner, "MAX_REFUSED_IN_A_ROW", 50)

    async def main() -> None:
        config = SyncProduceStrategyConfig()
        stage = ProducerStage(
            tmp_path, config, agent_loop=single_turn(FakeEngine()), is_valid=lambda rollouts: False
        )
        running = asyncio.create_task(stage.producer.run())
        with pytest.raises(RunError, match="refused 50 groups in a row"):
            await stage.producer.take_batch(1)
        await cancel(running)

    on_virtual_time(main)


def test_a_rule_that_stops_too_early_ends_the_run(tmp_path: Path) -> None:
    async def main() -> None:
        config = AsyncProduceStrategyConfig(
            should_continue_fn=lambda done, batch: done < batch - 1, max_tries=1
        )
        stage = ProducerStage(tmp_path, config)
        running = asyncio.create_task(stage.producer.run())
        await turns()
        stage.loop.fail("t:3")  # dropped: the other three are enough for the rule, not for the step
        stage.finish_all()
        with pytest.raises(RunError, match="should_continue_fn"):
            await stage.producer.take_batch(1)
        await cancel(running)

    on_virtual_time(main)


def test_a_rule_that_launches_nothing_ends_a_run_whose_step_waits_already(tmp_path: Path) -> None:
    async def main() -> None:
        config = AsyncProduceStrategyConfig(should_continue_fn=lambda done, batch: False)
        stage = ProducerStage(tmp_path, config)
        step = asyncio.create_task(stage.producer.take_batch(1))
        await turns()
        running = asyncio.create_task(stage.producer.run())
        await turns()
        assert step.done()
        with pytest.raises(RunError, match="should_continue_fn"):
            await step
        await cancel(running)

    on_virtual_time(main)


def test_an_engine_with_older_weights_than_it_confirmed_stops_the_run(tmp_path: Path) -> None:
    async def main() -> None:
        stage = ProducerStage(
            tmp_path, SyncProduceStrategyConfig(), agent_loop=single_turn(FakeEngine())
        )
        stage.producer.weights_updated(3)
        stage.progress.next_consumer_step = 4
        stage.progress.target_upto["t"] = 3
        running = asyncio.create_task(stage.producer.run())
        with pytest.raises(TooManyFailures, match="under version 0 after version 3"):
            await stage.producer.take_batch(4)
        await cancel(running)

    on_virtual_time(main)


def test_a_stopped_producer_is_not_waited_for(tmp_path: Path) -> None:
    async def main() -> None:
        stage = ProducerStage(tmp_path, SyncProduceStrategyConfig())
        running = asyncio.create_task(stage.producer.run())
        taking = asyncio.create_task(stage.producer.take_batch(1))
        await turns()
        stage.producer.stop()
        await running
        with pytest.raises(RunError, match="the producer was stopped"):
            await taking
        assert stage.producer.snapshot().tasks[0].balanced

    on_virtual_time(main)


def test_a_journal_that_cannot_write_reaches_the_consumer(tmp_path: Path) -> None:
    async def main() -> None:
        stage = ProducerStage(
            tmp_path, SyncProduceStrategyConfig(), agent_loop=single_turn(FakeEngine())
        )
        stage.journal._writer._database.execute("DROP TABLE rollout_rows")
        running = asyncio.create_task(stage.producer.run())
        with pytest.raises(RunError, match="cannot write"):
            await stage.producer.take_batch(1)
        await cancel(running)

    on_virtual_time(main)


def test_a_validity_rule_that_never_answers_fails_its_group(tmp_path: Path) -> None:
    async def never(rollouts: list[Rollout]) -> bool:
        await asyncio.Event().wait()
        return True

    async def main() -> None:
        config = AsyncProduceStrategyConfig(max_tries=1, max_failure_share=0.5)
        stage = ProducerStage(
            tmp_path, config, agent_loop=single_turn(FakeEngine()), is_valid=never
        )
        running = asyncio.create_task(stage.producer.run())
        with pytest.raises(TooManyFailures, match="validity rule: no answer after 60 s"):
            await stage.producer.take_batch(1)
        with pytest.raises(TooManyFailures):
            await running

    on_virtual_time(main)
