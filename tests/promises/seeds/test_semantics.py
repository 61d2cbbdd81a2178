"""The exact semantics of the strategies that users bring along, on virtual time."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import UserError
from penstock.rollout import (
    AsyncProduceStrategyConfig,
    ProduceBatchStatus,
    ProduceContext,
    ProduceProgress,
    ProduceStrategy,
    ProduceStrategyConfig,
    SyncProduceStrategyConfig,
    default_is_valid_sample_fn,
    default_should_continue_fn,
)
from penstock.types import Group, Status
from stages.fake_agent_loop import FakeAgentLoop
from stages.producing import ProducerStage, cancel, on_virtual_time, turns


def produce(stage: ProducerStage, target: int) -> asyncio.Task[ProduceBatchStatus]:
    stage.progress.target_samples["t"] = target
    return asyncio.create_task(stage.strategy.produce_batch(stage.ctx))


def test_a_continue_rule_that_wants_more_ends_with_what_there_is(tmp_path: Path) -> None:
    async def main() -> None:
        config = AsyncProduceStrategyConfig(should_continue_fn=lambda completed, batch: True)
        stage = ProducerStage(tmp_path, config, batch=2)
        task = produce(stage, 2)
        await turns()
        stage.finish_all()
        assert await asyncio.wait_for(task, 60) is ProduceBatchStatus.NORMAL
        assert stage.count(Status.COMPLETED) == 2

    assert on_virtual_time(main) < 1e-6


class HangingPause(FakeAgentLoop):
    """The first requests to pause never return."""

    def __init__(self, hanging: int, *, aborts: bool) -> None:
        super().__init__()
        self._hanging, self._aborts = hanging, aborts

    async def pause(self) -> None:
        number = self.pauses
        if number >= self._hanging or self._aborts:
            await super().pause()
        else:
            self.pauses += 1
        if number < self._hanging:
            await asyncio.Event().wait()


def test_a_pause_ends_when_nothing_is_pending_though_its_request_hangs(tmp_path: Path) -> None:
    async def main() -> None:
        loop = HangingPause(1, aborts=True)
        stage = ProducerStage(tmp_path, AsyncProduceStrategyConfig(), batch=2, agent_loop=loop)
        task = produce(stage, 2)
        await turns()
        stage.ctx.update_event.set()
        assert await stage.strategy.pause_produce(stage.ctx) < 1e-6
        assert stage.count(Status.ABORTED) == 2
        assert stage.strategy.runner.counters["abort_timeouts"] == 1
        assert await task is ProduceBatchStatus.UPDATE_WEIGHT_AND_ABORT

    assert on_virtual_time(main) < 1e-6


def test_a_pause_request_that_hangs_is_sent_again(tmp_path: Path) -> None:
    async def main() -> None:
        loop = HangingPause(1, aborts=False)
        stage = ProducerStage(tmp_path, AsyncProduceStrategyConfig(), batch=2, agent_loop=loop)
        task = produce(stage, 2)
        await turns()
        stage.ctx.update_event.set()
        assert await stage.strategy.pause_produce(stage.ctx) == pytest.approx(5.0)
        assert loop.pauses == 2
        assert stage.strategy.runner.counters["pause_timeouts"] == 0
        await task

    on_virtual_time(main)


def test_an_event_that_is_set_cleared_and_set_again_is_seen(tmp_path: Path) -> None:
    async def main() -> None:
        stage = ProducerStage(tmp_path, AsyncProduceStrategyConfig(), batch=2)
        for flickers in (1, 2):
            task = produce(stage, 2)
            await turns()
            for _ in range(flickers):
                stage.ctx.update_event.set()
                stage.ctx.update_event.clear()
            await turns()
            assert task.done()
            assert task.result() is ProduceBatchStatus.UPDATE_WEIGHT_AND_ABORT
        await stage.strategy.pause_produce(stage.ctx)

    on_virtual_time(main)


def test_the_event_is_looked_at_before_expiry(tmp_path: Path) -> None:
    async def main() -> None:
        stage = ProducerStage(tmp_path, AsyncProduceStrategyConfig())
        stage.ctx.train_step = 9
        produced = stage.strategy.produce_batch
        assert await produced(stage.ctx) is ProduceBatchStatus.EXPIRED_BATCH
        stage.ctx.update_event.set()
        assert await produced(stage.ctx) is ProduceBatchStatus.UPDATE_WEIGHT_AND_ABORT

    on_virtual_time(main)


def test_with_the_sync_strategy_nothing_ever_expires(tmp_path: Path) -> None:
    async def main() -> None:
        stage = ProducerStage(tmp_path, SyncProduceStrategyConfig(), batch=2)
        assert not stage.strategy.is_model_expired(train_step=9, model_step=0)
        stage.progress.next_consumer_step = stage.ctx.train_step = 9
        task = produce(stage, 2)
        await turns()
        stage.finish_all()
        assert await task is ProduceBatchStatus.NORMAL
        assert (stage.count(Status.COMPLETED), stage.count(Status.EXPIRED)) == (2, 0)

    on_virtual_time(main)


def test_a_sync_run_still_expires_what_older_weights_left_behind(tmp_path: Path) -> None:
    """Such as the groups of an async run that is resumed as sync: the staleness bound holds."""

    async def main() -> None:
        stage = ProducerStage(tmp_path, SyncProduceStrategyConfig(), batch=2)
        stage.progress.next_consumer_step, stage.ctx.model_step = 3, 2
        stage.buffered(Status.COMPLETED, version=0)
        stage.buffered(Status.COMPLETED, version=2)
        stage.strategy.expire(stage.ctx)
        assert (stage.count(Status.COMPLETED), stage.count(Status.EXPIRED)) == (1, 1)

    on_virtual_time(main)


class ByHand(ProduceStrategy):
    """Generates through the methods of the context, one group after another."""

    async def produce_batch(self, ctx: ProduceContext) -> ProduceBatchStatus:
        assert ctx.consumer_step == 1
        while await ctx.available_count() < ctx.target_abs:
            if ctx.should_abort():
                return ProduceBatchStatus.UPDATE_WEIGHT_AND_ABORT
            group = await ctx.sample_group(from_expired_pool=await ctx.expired_count() > 0)
            await ctx.put_generated_group(await ctx.generate_group(group))
        return ProduceBatchStatus.NORMAL


def test_the_context_has_what_a_strategy_needs(tmp_path: Path) -> None:
    async def main() -> None:
        config = AsyncProduceStrategyConfig(strategy=f"{__file__}:ByHand")
        stage = ProducerStage(tmp_path, config, batch=3)
        expired = stage.buffered(Status.EXPIRED)
        task = produce(stage, 3)
        await turns()
        assert list(stage.loop.held) == [expired.group_id]  # the expired group comes first
        assert stage.producer.snapshot().tasks[0].balanced
        stage.finish_all()
        await turns()
        stage.loop.fail("t:1")  # waits for its next try, as an aborted group does
        await turns()
        stage.finish_all()
        await turns()
        stage.finish_all()
        assert await task is ProduceBatchStatus.NORMAL
        assert stage.count(Status.COMPLETED) == 3
        assert stage.producer.snapshot().tasks[0].balanced

    on_virtual_time(main)


def test_a_pause_takes_back_what_a_strategy_holds_and_run_ends_cleanly(tmp_path: Path) -> None:
    async def main() -> None:
        config = AsyncProduceStrategyConfig(strategy=f"{__file__}:ByHand", pause_timeout_s=7)
        stage = ProducerStage(tmp_path, config, batch=1)
        stage.loop.deaf = True
        running = asyncio.create_task(stage.producer.run())
        await turns()
        assert await stage.producer.pause() == pytest.approx(7.0)
        assert stage.count(Status.ABORTED) == 1
        stage.finish_all()  # too late: the group was taken back
        await turns()
        assert stage.count(Status.COMPLETED) == 0
        stage.producer.resume()
        await turns()
        await cancel(running)
        assert stage.producer.snapshot().tasks[0].balanced

    on_virtual_time(main)


class Careless(ProduceStrategy):
    """Never asks whether it should abort."""

    async def produce_batch(self, ctx: ProduceContext) -> ProduceBatchStatus:
        while await ctx.available_count() < ctx.target_abs:
            await ctx.put_generated_group(await ctx.generate_group(await ctx.sample_group()))
        return ProduceBatchStatus.NORMAL


def test_between_pause_and_resume_no_strategy_starts_a_group(tmp_path: Path) -> None:
    async def main() -> None:
        config = AsyncProduceStrategyConfig(strategy=f"{__file__}:Careless", max_staleness=1)
        stage = ProducerStage(tmp_path, config, batch=2)
        running = asyncio.create_task(stage.producer.run())
        await turns()
        draining = asyncio.create_task(stage.producer.pause(abort=False))
        await turns()
        assert not draining.done()
        stage.finish_all()
        await turns()
        assert draining.done()
        assert not stage.loop.held
        stage.producer.resume()
        await turns()
        assert len(stage.loop.held) == 1
        await cancel(running)

    on_virtual_time(main)


def test_a_context_without_a_runner_says_so(tmp_path: Path) -> None:
    async def main() -> None:
        stage = ProducerStage(tmp_path, AsyncProduceStrategyConfig())
        stage.ctx.runner = None
        with pytest.raises(UserError, match=r"runner=strategy\.runner"):
            await stage.ctx.sample_group()

    on_virtual_time(main)


def test_a_local_progress_holds_several_tasks() -> None:
    progress = ProduceProgress.build_local({"math": 6, "code": 2}, train_step=3)
    assert progress.target_samples == {"math": 6, "code": 2}
    assert (progress.next_consumer_step, progress.target_upto_future_step) == (3, 3)
    assert ProduceProgress.build_local("math", 6).target_samples == {"math": 6}


def test_group_time_is_measured_per_task(tmp_path: Path) -> None:
    async def main() -> None:
        stage = ProducerStage(tmp_path, AsyncProduceStrategyConfig(), batch=2)
        task = produce(stage, 2)
        await turns()
        for group_id, wait_s in (("t:0", 1.0), ("t:1", 2.0)):
            await asyncio.sleep(wait_s)
            stage.loop.finish(group_id)
        await task
        metrics = stage.producer.read_metrics()
        assert metrics["tasks/t/group_time_p50_s"] == pytest.approx(1.0)
        assert metrics["tasks/t/group_time_p99_s"] == pytest.approx(3.0)
        assert metrics["tasks/t/produce_s"] == pytest.approx(3.0)
        assert "tasks/t/group_time_p50_s" not in stage.producer.read_metrics()

    on_virtual_time(main)


def test_rewards_and_produced_tokens_are_counted_per_task_with_aborted_ones(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        stage = ProducerStage(tmp_path, AsyncProduceStrategyConfig(max_staleness=1), batch=2)
        task = produce(stage, 2)
        await turns()
        stage.loop.finish("t:0", reward=0.5)
        stage.loop.abort("t:1", partial_tokens=3)  # and one member that finishes with 4 tokens
        await turns()
        assert stage.progress.raw_rewards_sum == {"t": 1.0}
        assert stage.progress.raw_rewards_count == {"t": 2}
        assert stage.progress.produced_samples == {"t": 4}
        assert stage.progress.produced_tokens == {"t": 8 + 3 + 4}
        await cancel(task)

    on_virtual_time(main)


def test_a_saved_progress_without_later_counters_loads() -> None:
    old: dict[str, Any] = {
        "next_consumer_step": 4,
        "producer_future_step": 5,
        "target_upto_future_step": 5,
        "consumed_samples": {"t": 12},
        "target_samples": {"t": 20},
    }
    progress = ProduceProgress.build(["t", "new"])
    consumed = progress.consumed_samples
    progress.load_state_dict(old)
    assert progress.consumed_samples is consumed
    assert (progress.consumed("t"), progress.target("t"), progress.target_upto["t"]) == (12, 20, 5)
    assert progress.target_upto["new"] == 3
    assert progress.produced_tokens == {"t": 0, "new": 0}
    progress.load_state_dict({**old, "raw_rewards_sum": 3.5})  # one sum over all tasks
    assert progress.raw_rewards_sum == {"t": 0, "new": 0}


def test_the_default_rules_have_their_names_and_tolerate_more_arguments() -> None:
    assert default_should_continue_fn(1, 2, step=3)
    assert not default_should_continue_fn(2, 2)
    assert default_is_valid_sample_fn([], step=3)
    assert ProduceStrategyConfig().should_continue_fn is default_should_continue_fn
    assert issubclass(AsyncProduceStrategyConfig, ProduceStrategyConfig)
    assert not issubclass(SyncProduceStrategyConfig, AsyncProduceStrategyConfig)


def test_a_rollout_controller_is_told_whether_partial_responses_continue() -> None:
    class Controller:
        told: bool | None = None

        def set_enable_partial_rollout(self, enabled: bool) -> None:
            self.told = enabled

    controller = Controller()
    config = AsyncProduceStrategyConfig(enable_partial_rollout=True)
    config.build(rollout_controller=controller, sync_weights_interval=2)
    assert controller.told is True


def test_groups_are_what_the_context_hands_out(tmp_path: Path) -> None:
    async def main() -> None:
        stage = ProducerStage(tmp_path, AsyncProduceStrategyConfig(), batch=1)
        group = await stage.ctx.sample_group()
        assert isinstance(group, Group)
        assert await stage.ctx.put_generated_group(group) is False  # nothing was generated
        assert stage.count(Status.ABORTED) == 1

    on_virtual_time(main)
