"""The exact semantics of the strategies, by example."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from pydantic import ValidationError

from penstock.config import ProduceConfig
from penstock.rollout import (
    AsyncProduceStrategyConfig,
    ProduceBatchStatus,
    ProduceProgress,
    SyncProduceStrategyConfig,
    calculate_stale_threshold,
    group_runner,
    strategy_config,
)
from penstock.types import Group, Rollout, Status, VersionSegment, expand_segments
from penstock.workers.ray.agents import ActorCalls
from stages.fake_agent_loop import FakeAgentLoop
from stages.producing import ProducerStage, on_virtual_time, turns
from stages.rollouts import finish_rollout, make_prompt


def test_defaults_are_those_users_know() -> None:
    config = AsyncProduceStrategyConfig()
    assert config.over_sample_threshold == 0.0
    assert config.enable_partial_rollout is False
    assert config.max_staleness == 0
    assert config.tail_batch_trigger_size == 0
    assert config.is_valid_sample_fn([]) is True
    assert config.should_continue_fn(3, 4) is True
    assert config.should_continue_fn(4, 4) is False


@pytest.mark.parametrize(
    "fields", [{"max_staleness": -1}, {"over_sample_threshold": -0.1}, {"no_such_field": 1}]
)
def test_wrong_and_unknown_fields_are_refused(fields: dict) -> None:
    with pytest.raises(ValidationError):
        AsyncProduceStrategyConfig(**fields)
    with pytest.raises(ValidationError):
        SyncProduceStrategyConfig(**fields)


def test_stale_threshold() -> None:
    assert calculate_stale_threshold(0, 1) == 1
    assert calculate_stale_threshold(2, 3) == 9
    with pytest.raises(ValueError, match="max_staleness"):
        calculate_stale_threshold(-1, 1)
    with pytest.raises(ValueError, match="sync_weights_interval"):
        calculate_stale_threshold(0, 0)


def test_a_produce_table_becomes_the_strategy_it_names() -> None:
    table = ProduceConfig(max_staleness=2, max_tries=5, over_sample_threshold=0.5)
    config = strategy_config(table)
    assert isinstance(config, AsyncProduceStrategyConfig)
    assert (config.max_staleness, config.max_tries, config.over_sample_threshold) == (2, 5, 0.5)
    sync = strategy_config(ProduceConfig(strategy="sync"))
    assert sync.build().stale_threshold == 1


def test_is_model_expired_counts_from_the_weights_version() -> None:
    strategy = AsyncProduceStrategyConfig(max_staleness=1).build(sync_weights_interval=2)
    assert not strategy.is_model_expired(train_step=4, model_step=0)  # staleness 3 < 4
    assert strategy.is_model_expired(train_step=5, model_step=0)


def test_versions_of_a_partial_rollout_that_goes_on() -> None:
    prompt = make_prompt()
    rollout = Rollout(rollout_id="t:0.0", prompt_ids=prompt.token_ids, seed=0)
    rollout.append([5], [-0.1], [VersionSegment(1, 1)])
    rollout.append([6, 7], [-0.1, -0.2], [VersionSegment(3, 2)])
    assert expand_segments(rollout.segments) == [1, 3, 3]
    group = Group(group_id="t:0", task="t", cursor=0, prompt=prompt, rollouts=[rollout])
    assert group.staleness(train_step=4) == 2  # by the oldest token


def test_oversampling_deficit_1_batch_4_threshold_1_makes_5_launches(tmp_path: Path) -> None:
    async def main() -> None:
        stage = ProducerStage(
            tmp_path, AsyncProduceStrategyConfig(over_sample_threshold=1.0), batch=4
        )
        for _ in range(3):
            stage.buffered(Status.COMPLETED)
        stage.progress.target_samples["t"] = 4
        task = asyncio.create_task(stage.strategy.produce_batch(stage.ctx))
        await turns()
        assert stage.loop.calls == stage.strategy.pending_task_count() == 5
        stage.loop.finish(next(iter(stage.loop.held)))
        assert await task is ProduceBatchStatus.NORMAL
        assert stage.strategy.pending_task_count() == 4  # the groups continue
        assert stage.loop.calls == 5

    on_virtual_time(main)


def test_consumed_groups_never_look_missing(tmp_path: Path) -> None:
    async def main() -> None:
        stage = ProducerStage(tmp_path, AsyncProduceStrategyConfig())
        stage.progress.target_samples["t"] = 8
        stage.progress.consumed_samples["t"] = 7
        stage.buffered(Status.COMPLETED)
        assert await stage.strategy.produce_batch(stage.ctx) is ProduceBatchStatus.NORMAL
        assert stage.loop.calls == 0

    on_virtual_time(main)


def test_sync_makes_exactly_b_completed_groups_and_refills_filtered_and_aborted(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        refused = {"t:1"}
        stage = ProducerStage(
            tmp_path,
            SyncProduceStrategyConfig(),
            batch=3,
            is_valid=lambda rollouts: rollouts[0].rollout_id.split(".")[0] not in refused,
        )
        stage.progress.target_samples["t"] = 3
        task = asyncio.create_task(stage.strategy.produce_batch(stage.ctx))
        await turns()
        assert sorted(stage.loop.held) == ["t:0", "t:1", "t:2"]
        stage.loop.finish("t:1")  # refused: a fresh prompt takes its place
        await turns()
        assert sorted(stage.loop.held) == ["t:0", "t:2", "t:3"]
        stage.loop.abort("t:0")  # aborted: the same group again
        await turns()
        assert sorted(stage.loop.held) == ["t:0", "t:2", "t:3"]
        stage.finish_all()
        assert await task is ProduceBatchStatus.NORMAL
        assert stage.count(Status.COMPLETED) == 3
        assert stage.strategy.runner.dropped == {"filtered": 1}
        assert stage.strategy.pending_task_count() == 0

    on_virtual_time(main)


def test_tail_batch_draws_expired_then_aborted_then_fresh_without_oversampling(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        config = AsyncProduceStrategyConfig(
            tail_batch_trigger_size=2, over_sample_threshold=1.0, max_staleness=3
        )
        stage = ProducerStage(tmp_path, config, batch=4)
        aborted = stage.buffered(Status.ABORTED)
        expired = [stage.buffered(Status.EXPIRED) for _ in range(2)]
        stage.progress.target_samples["t"] = 4
        task = asyncio.create_task(stage.strategy.produce_batch(stage.ctx))
        await turns()
        old = [expired[0].group_id, expired[1].group_id, aborted.group_id]
        assert list(stage.loop.held) == [*old, "t:3"]  # 4 launches, not 8
        task.cancel()

    on_virtual_time(main)


def test_below_the_trigger_expired_groups_wait(tmp_path: Path) -> None:
    async def main() -> None:
        config = AsyncProduceStrategyConfig(tail_batch_trigger_size=2, over_sample_threshold=0.5)
        stage = ProducerStage(tmp_path, config, batch=4)
        aborted = stage.buffered(Status.ABORTED)
        stage.buffered(Status.EXPIRED)
        stage.progress.target_samples["t"] = 4
        task = asyncio.create_task(stage.strategy.produce_batch(stage.ctx))
        await turns()
        assert list(stage.loop.held) == [aborted.group_id, "t:2", "t:3", "t:4", "t:5", "t:6"]
        assert stage.count(Status.EXPIRED) == 1
        task.cancel()

    on_virtual_time(main)


def test_expired_groups_below_the_trigger_do_not_starve(tmp_path: Path) -> None:
    async def main() -> None:
        config = AsyncProduceStrategyConfig(tail_batch_trigger_size=99, max_tries=2)
        stage = ProducerStage(tmp_path, config, batch=1)
        expired = stage.buffered(Status.EXPIRED)
        stage.progress.target_samples["t"] = 1
        stage.progress.next_consumer_step = stage.ctx.train_step = 4  # it has waited for long
        stage.ctx.model_step = 3
        task = asyncio.create_task(stage.strategy.produce_batch(stage.ctx))
        await turns()
        assert list(stage.loop.held) == [expired.group_id]
        task.cancel()

    on_virtual_time(main)


def test_without_a_tail_batch_expired_groups_are_retried_as_they_come(tmp_path: Path) -> None:
    async def main() -> None:
        stage = ProducerStage(tmp_path, AsyncProduceStrategyConfig(), batch=2)
        expired = stage.buffered(Status.EXPIRED)
        stage.progress.target_samples["t"] = 2
        task = asyncio.create_task(stage.strategy.produce_batch(stage.ctx))
        await turns()
        assert list(stage.loop.held) == [expired.group_id, "t:1"]
        assert all(not len(r.response_ids) for r in expired.rollouts)
        task.cancel()

    on_virtual_time(main)


def test_a_step_that_is_already_expired_is_not_produced(tmp_path: Path) -> None:
    async def main() -> None:
        stage = ProducerStage(tmp_path, AsyncProduceStrategyConfig(max_staleness=1))
        stage.ctx.train_step, stage.ctx.model_step = 3, 0
        assert await stage.strategy.produce_batch(stage.ctx) is ProduceBatchStatus.EXPIRED_BATCH
        assert stage.loop.calls == 0

    on_virtual_time(main)


def test_the_update_event_ends_the_call_and_leaves_groups_in_flight(tmp_path: Path) -> None:
    async def main() -> None:
        stage = ProducerStage(tmp_path, AsyncProduceStrategyConfig(), batch=2)
        stage.progress.target_samples["t"] = 2
        task = asyncio.create_task(stage.strategy.produce_batch(stage.ctx))
        await turns()
        stage.ctx.update_event.set()
        assert await task is ProduceBatchStatus.UPDATE_WEIGHT_AND_ABORT
        assert stage.strategy.pending_task_count() == 2

    on_virtual_time(main)


def test_validity_is_asked_once_and_only_of_completed_groups(tmp_path: Path) -> None:
    async def main() -> None:
        asked: list[str] = []

        def rule(rollouts: list[Rollout]) -> bool:
            asked.append(rollouts[0].rollout_id)
            return True

        stage = ProducerStage(tmp_path, SyncProduceStrategyConfig(), batch=2, is_valid=rule)
        stage.progress.target_samples["t"] = 2
        task = asyncio.create_task(stage.strategy.produce_batch(stage.ctx))
        await turns()
        stage.loop.abort("t:0")
        await turns()
        stage.finish_all()
        await task
        assert sorted(asked) == ["t:0.0", "t:1.0"]

    on_virtual_time(main)


def test_raw_rewards_are_counted_before_filtering_and_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_runner, "MAX_REFUSED_IN_A_ROW", 1)

    async def main() -> None:
        stage = ProducerStage(
            tmp_path,
            SyncProduceStrategyConfig(),
            batch=1,
            is_valid=lambda _: False,
        )
        stage.progress.target_samples["t"] = 1
        task = asyncio.create_task(stage.strategy.produce_batch(stage.ctx))
        await turns()
        stage.loop.finish("t:0", reward=0.5)
        with pytest.raises(RuntimeError, match="refused 1 groups in a row"):
            await task
        metrics = stage.progress.read_metrics()["t"]
        assert (metrics["reward_sum"], metrics["reward_count"]) == (1.0, 2.0)
        assert stage.progress.read_metrics()["t"]["reward_count"] == 0

    on_virtual_time(main)


def test_pause_of_nothing_takes_no_time(tmp_path: Path) -> None:
    async def main() -> None:
        stage = ProducerStage(tmp_path, AsyncProduceStrategyConfig())
        assert await stage.strategy.pause_produce(stage.ctx) < 1e-9
        assert await stage.producer.pause() < 1e-9

    assert on_virtual_time(main) < 1e-9


def test_pause_aborts_at_once_and_everything_lands(tmp_path: Path) -> None:
    async def main() -> None:
        stage = ProducerStage(tmp_path, AsyncProduceStrategyConfig(), batch=3)
        stage.progress.target_samples["t"] = 3
        task = asyncio.create_task(stage.strategy.produce_batch(stage.ctx))
        await turns()
        stage.ctx.update_event.set()
        assert await stage.strategy.pause_produce(stage.ctx) < 1e-9
        assert stage.count(Status.ABORTED) == 3
        assert stage.loop.pauses == 1
        await task

    on_virtual_time(main)


def test_pause_time_out_gives_groups_back_and_counts_them(tmp_path: Path) -> None:
    async def main() -> None:
        stage = ProducerStage(tmp_path, AsyncProduceStrategyConfig(pause_timeout_s=12.0), batch=2)
        stage.loop.deaf = True
        stage.progress.target_samples["t"] = 2
        task = asyncio.create_task(stage.strategy.produce_batch(stage.ctx))
        await turns()
        held = stage.loop.held["t:0"][0]
        finish_rollout(held[0])  # one member is done when the pause gives up
        stage.ctx.update_event.set()
        assert await stage.strategy.pause_produce(stage.ctx) == pytest.approx(12.0)
        assert stage.loop.pauses == 3  # at once, after 5 s, after 10 s
        assert stage.count(Status.ABORTED) == 2
        assert stage.strategy.runner.counters["pause_timeouts"] == 2
        assert stage.producer.snapshot().tasks[0].balanced
        assert held[0].status is Status.COMPLETED  # it is not generated again
        await task

    on_virtual_time(main)


class PartialLoop(FakeAgentLoop):
    """Records how many tokens each member had when the loop got it."""

    def __init__(self) -> None:
        super().__init__()
        self.handed: list[list[int]] = []

    async def generate_group(
        self, rollouts: list[Rollout], *, enable_partial_rollout: bool = False
    ) -> list[Rollout]:
        self.handed.append([len(rollout.response_ids) for rollout in rollouts])
        return await super().generate_group(rollouts)


@pytest.mark.parametrize(("partial", "second"), [(True, [2, 4]), (False, [0, 4])])
def test_partial_rollouts_go_on_and_finished_members_stay(
    tmp_path: Path, partial: bool, second: list[int]
) -> None:
    async def main() -> None:
        config = AsyncProduceStrategyConfig(enable_partial_rollout=partial, max_staleness=3)
        stage = ProducerStage(tmp_path, config, batch=1, agent_loop=PartialLoop())
        stage.progress.target_samples["t"] = 1
        task = asyncio.create_task(stage.strategy.produce_batch(stage.ctx))
        await turns()
        stage.loop.abort("t:0", partial_tokens=2)
        stage.loop.version = 2
        await turns()
        assert stage.loop.handed == [[0, 0], second]
        stage.finish_all()
        await task
        group = stage.buffer.take("t", Status.COMPLETED)
        versions = [expand_segments(rollout.segments) for rollout in group.rollouts]
        assert versions == [[0, 0, 2, 2] if partial else [2] * 4, [0] * 4]

    on_virtual_time(main)


def test_a_ray_actor_serves_as_an_agent_loop(tmp_path: Path) -> None:
    class Method:
        def __init__(self, function: object) -> None:
            self._function = function

        def __call__(self, *args: object, **kwargs: object) -> None:
            raise TypeError("actor methods cannot be called directly")

        def remote(self, *args: object, **kwargs: object) -> object:
            return self._function(*args, **kwargs)  # type: ignore[operator]

    class Actor:
        def __init__(self, loop: FakeAgentLoop) -> None:
            self.generate_group, self.pause = Method(loop.generate_group), Method(loop.pause)

    async def main() -> None:
        loop = FakeAgentLoop()
        stage = ProducerStage(
            tmp_path, AsyncProduceStrategyConfig(), batch=1, agent_loop=ActorCalls(Actor(loop))
        )
        stage.progress.target_samples["t"] = 1
        task = asyncio.create_task(stage.strategy.produce_batch(stage.ctx))
        await turns()
        loop.finish("t:0")
        assert await task is ProduceBatchStatus.NORMAL

    on_virtual_time(main)


def test_a_missing_task_in_the_progress_raises() -> None:
    with pytest.raises(ValueError, match="got task 'other', allowed: t"):
        ProduceProgress.build(["t"]).consumed("other")
