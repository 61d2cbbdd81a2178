"""Whatever hangs is named: the engine, the reward, the trainer, the driver itself; and acted upon."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fakes import CountingReward, FakeEngine, VirtualClock, make_prompt
from penstock.agent.single_turn import SingleTurn
from penstock.config import SamplingConfig, WatchdogConfig
from penstock.edges import Edges
from penstock.errors import RunError
from penstock.launch.inline import watched
from penstock.types import Batch, Rollout
from penstock.watchdog import Watchdog, WatchedReward

STALL_S = 60.0


class Silent:
    """A part that takes every call and answers none."""

    async def _never(self, *args: Any) -> Any:
        await asyncio.get_running_loop().create_future()

    generate_many = score = train = publish = update_weights = _never

    async def abort(self, request_id: str) -> None: ...


class Stage:
    """A virtual clock, edges on it, and a watchdog whose notes are kept."""

    def __init__(self, action: str = "stop", **callbacks: Any) -> None:
        self.clock = VirtualClock()
        self.edges = Edges(lambda: self.clock.now)
        self.notes: list[str] = []
        settings = WatchdogConfig.model_validate({"stall_s": STALL_S, "action": action})
        self.watchdog = Watchdog(self.edges, settings, note=self.notes.append, **callbacks)

    def run(self, work: Any, seconds: float = 1000.0) -> str:
        """Run the work beside the watchdog; the error that stopped it, or nothing."""

        async def both() -> str:
            task = asyncio.create_task(work, name="the waiter")
            try:
                async with asyncio.timeout(seconds):
                    await self.watchdog.run()
            except RunError as error:
                return str(error)
            except TimeoutError:
                return ""
            finally:
                task.cancel()
                await asyncio.wait([task])
            return ""

        return self.clock.run(both())


def agent(stage: Stage, engine: Any, reward: Any) -> SingleTurn:
    return SingleTurn(
        engine=watched("engine-0", engine, stage.edges),  # type: ignore[arg-type]
        reward=WatchedReward(reward, "sums", stage.edges),
        sampling=SamplingConfig(),
        decode=lambda ids: "text",
    )


def one_rollout() -> Rollout:
    prompt = make_prompt()
    return Rollout(rollout_id="sums:0.0", prompt_ids=prompt.token_ids, seed=1, prompt=prompt)


def test_an_engine_that_never_answers_is_named() -> None:
    stage = Stage()
    work = agent(stage, Silent(), CountingReward()).generate_group([one_rollout()])
    line = stage.run(work)
    assert line.startswith("stuck: engine-0 has not answered generate for 60 s")
    assert "the waiter waits for it" in line
    assert "single_turn.py" in stage.notes[0]  # the stack of who waits, since it is in this process


def test_a_reward_that_never_returns_is_named() -> None:
    stage = Stage()
    line = stage.run(agent(stage, FakeEngine(), Silent()).generate_group([one_rollout()]))
    assert line.startswith("stuck: rewards of sums has not answered reward (sums:0.0) for 60 s")


@pytest.mark.parametrize("method", ["train", "publish"])
def test_a_trainer_that_never_returns_is_named(method: str) -> None:
    stage = Stage()
    trainer = watched("trainer", Silent(), stage.edges)
    arguments = [Batch(step=1, groups=())] if method == "train" else []
    line = stage.run(getattr(trainer, method)(*arguments))
    assert line.startswith(f"stuck: trainer has not answered {method} for 60 s")


def test_weights_that_never_arrive_are_named() -> None:
    stage = Stage()
    line = stage.run(watched("engine-3", Silent(), stage.edges).update_weights(2, None))
    assert line.startswith("stuck: engine-3 has not answered sync for 60 s")


def test_parts_of_the_driver_that_wait_for_each_other_are_named() -> None:
    stage = Stage(waits=lambda: ["produce sums waits for step 4 to be consumed (60.0 s)"])

    async def wait() -> None:
        with stage.edges.wait("loop", "wait", "groups of step 4"):
            await asyncio.get_running_loop().create_future()

    line = stage.run(wait())
    assert "loop waits for wait (groups of step 4)" in line
    assert "produce sums waits for step 4" in line


def test_the_deepest_wait_is_the_culprit() -> None:
    stage = Stage()

    async def loop() -> None:
        with stage.edges.wait("loop", "wait", "groups of step 1"):
            await agent(stage, Silent(), CountingReward()).generate_group([one_rollout()])

    assert stage.run(loop()).startswith("stuck: engine-0")


def test_the_culprits_own_stack_is_shown() -> None:
    async def stack_of(name: str) -> str:
        return f"{name} is in forward()"

    stage = Stage(stack_of=stack_of)
    stage.run(watched("trainer", Silent(), stage.edges).train(None))
    assert "trainer is in forward()" in stage.notes[0]


def test_progress_without_an_answer_is_not_stuck() -> None:
    tokens = iter(range(1000))

    async def progress_of(name: str) -> int:
        return next(tokens)

    stage = Stage(progress_of=progress_of)
    assert stage.run(watched("engine-0", Silent(), stage.edges).generate_many([])) == ""
    assert stage.notes == []


def test_a_probe_that_is_not_answered_either_is_no_progress() -> None:
    async def progress_of(name: str) -> int:
        await asyncio.get_running_loop().create_future()
        return 0

    stage = Stage(progress_of=progress_of)
    line = stage.run(watched("engine-0", Silent(), stage.edges).generate_many([]))
    assert line.startswith("stuck: engine-0")


def test_a_slow_step_like_the_ones_before_is_not_stuck() -> None:
    stage = Stage()

    class Slow:
        async def train(self, seconds: float) -> None:
            await asyncio.sleep(seconds)

    async def steps() -> None:
        trainer = watched("trainer", Slow(), stage.edges)
        for seconds in (50.0, 200.0, 240.0):
            await trainer.train(seconds)
        await asyncio.get_running_loop().create_future()

    assert stage.run(steps(), seconds=480.0) == ""


def test_restart_is_asked_for_a_worker_and_the_run_goes_on() -> None:
    asked: list[str] = []
    answered = asyncio.Event()

    async def restart(name: str, reason: str) -> bool:
        asked.append(name)
        answered.set()
        return True

    class HangsOnce:
        async def train(self) -> None:
            await answered.wait()

    stage = Stage("restart", restart=restart)
    assert stage.run(watched("trainer", HangsOnce(), stage.edges).train()) == ""
    assert asked == ["trainer"]


def test_what_cannot_be_restarted_stops_the_run() -> None:
    async def restart(name: str, reason: str) -> bool:
        return False

    stage = Stage("restart", restart=restart)
    line = stage.run(agent(stage, FakeEngine(), Silent()).generate_group([one_rollout()]))
    assert line.startswith("stuck: rewards of sums")


def test_report_only_goes_on_and_tells_again_after_another_while() -> None:
    stage = Stage("report")
    assert stage.run(watched("trainer", Silent(), stage.edges).train(None), seconds=200.0) == ""
    assert len(stage.notes) == 3


def test_a_cancelled_wait_is_no_answer() -> None:
    edges = Edges()

    async def run() -> None:
        task = asyncio.create_task(watched("engine-0", Silent(), edges).generate_many([]))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(run())
    assert edges.answered == {}
    assert edges.open == {}
