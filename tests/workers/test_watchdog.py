"""The watchdog tells a hang from slow work, shows the stack and acts; see also `test_hangs.py`."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.errors import RunError, WorkerDied
from penstock.waits import WaitKind, Waits
from penstock.workers.watchdog import watched
from stages.fake_engine import FakeEngine
from stages.producing import on_virtual_time
from stages.rewards import CountingReward
from stages.watching import Called, Silent, SilentReward, WatchdogStage, agent, never, one_rollout


def test_an_engine_that_never_answers_is_named() -> None:
    stage = WatchdogStage()
    work = agent(stage, Silent(), CountingReward()).generate_group([one_rollout()])
    line = stage.run(work)
    assert line.startswith("stuck: engine-0 has not answered generate for 60 s")
    assert "the waiter waits for it" in line
    assert "single_turn.py" in stage.notes[0]  # the stack of the task that waits


def test_parts_of_the_driver_that_wait_for_each_other_are_named() -> None:
    stage = WatchdogStage()

    async def wait() -> None:
        with (
            stage.waits.wait("loop", WaitKind.WAIT, "groups of step 4"),
            stage.waits.wait("produce sums", WaitKind.WAIT, "step 3 to be consumed"),
        ):
            await asyncio.get_running_loop().create_future()

    line = stage.run(wait())
    assert line.startswith("stuck: nothing has moved for 360 s: loop waits for wait (groups of")
    assert "produce sums waits for wait (step 3 to be consumed)" in line


def test_the_deepest_wait_is_the_culprit() -> None:
    stage = WatchdogStage()

    async def loop() -> None:
        with stage.waits.wait("loop", WaitKind.WAIT, "groups of step 1"):
            await agent(stage, Silent(), CountingReward()).generate_group([one_rollout()])

    assert stage.run(loop()).startswith("stuck: engine-0")


def test_the_culprits_own_stack_is_shown() -> None:
    async def stack_of(name: str) -> str:
        return f"{name} is in forward()"

    stage = WatchdogStage(stack_of=stack_of)
    stage.run(Called("trainer", Silent(), stage.waits).train(None))
    assert "trainer is in forward()" in stage.notes[0]


def test_progress_without_an_answer_is_not_stuck() -> None:
    tokens = iter(range(1000))

    async def progress_of(name: str) -> int:
        return next(tokens)

    stage = WatchdogStage(progress_of=progress_of)
    assert stage.run(Called("engine-0", Silent(), stage.waits).generate_many([])) == ""
    assert stage.notes == []


def test_only_the_second_half_of_a_silence_must_show_something() -> None:
    """A micro-batch that ended just before the first look does not count as progress at the second."""
    stage = WatchdogStage(progress_of=lambda name: at(stage, 29.0))
    line = stage.run(Called("trainer", Silent(), stage.waits).train())
    assert line.startswith("stuck: trainer has not answered train for 60 s")
    stage = WatchdogStage(progress_of=lambda name: at(stage, 31.0))
    line = stage.run(Called("trainer", Silent(), stage.waits).train())
    assert line.startswith("stuck: trainer has not answered train for 120 s")


async def at(stage: WatchdogStage, seconds: float) -> int:
    """Return a part that does one piece of work, at that time."""
    return int(stage.clock.now > seconds)


def test_a_probe_that_is_not_answered_either_is_no_progress() -> None:
    stage = WatchdogStage(progress_of=never)
    line = stage.run(Called("engine-0", Silent(), stage.waits).generate_many([]))
    assert line.startswith("stuck: engine-0 has not answered generate for 80 s")


def test_a_question_that_fails_ends_nothing() -> None:
    async def fails(name: str) -> Any:
        raise OSError("the log is gone")

    stage = WatchdogStage("report", progress_of=fails, activity_of=fails, stack_of=fails)
    assert stage.run(Called("trainer", Silent(), stage.waits).train(), seconds=100.0) == ""
    assert stage.notes[0].endswith("(no stack: OSError: the log is gone)")


def spends(stage: WatchdogStage, share: float) -> Any:
    async def activity_of(name: str) -> float:
        return share * stage.clock.now

    return activity_of


def test_one_huge_micro_batch_or_a_compilation_is_told_of_and_left_alone() -> None:
    stage = WatchdogStage("restart", activity_of=lambda name: spends(stage, 0.8)(name))
    assert stage.run(Called("trainer", Silent(), stage.waits).train(), seconds=350.0) == ""
    assert len(stage.notes) == 5
    assert "(its process is busy with something)" in stage.notes[0]


def test_a_collective_that_waits_by_spinning_is_ended_at_last() -> None:
    stage = WatchdogStage(activity_of=lambda name: spends(stage, 1.0)(name))
    line = stage.run(Called("trainer", Silent(), stage.waits).train())
    assert line.startswith("stuck: trainer has not answered train for 360 s")


def test_the_little_that_an_idle_worker_spends_is_not_work() -> None:
    stage = WatchdogStage(activity_of=lambda name: spends(stage, 0.02)(name))
    line = stage.run(Called("trainer", Silent(), stage.waits).train())
    assert line.startswith("stuck: trainer has not answered train for 60 s")


def test_what_cannot_be_asked_is_told_of_and_given_six_times_as_long() -> None:
    async def cannot_be_told(name: str) -> None: ...

    stage = WatchdogStage(progress_of=cannot_be_told, activity_of=cannot_be_told)
    line = stage.run(agent(stage, FakeEngine(), SilentReward()).generate_group([one_rollout()]))
    assert line.startswith("stuck: rewards of sums has not answered reward (sums:0.0) for 360 s")
    assert len(stage.notes) == 6


def test_of_one_tasks_waits_the_last_one_is_the_culprit() -> None:
    stage = WatchdogStage()

    async def publish() -> None:
        with stage.waits.wait("trainer", WaitKind.PUBLISH, responder="trainer"):
            with stage.waits.wait("trainer", WaitKind.COLLECTIVE, responder="distributor-1"):
                await never()

    assert stage.run(publish()).startswith("stuck: distributor-1 has not answered collective")


def test_a_restart_is_told_of_and_left_to_its_own_time_out() -> None:
    stage = WatchdogStage()

    async def ready() -> None:
        with stage.waits.wait("driver", WaitKind.RESTART, "engine-0"):
            await never()

    assert stage.run(ready()) == ""
    assert "driver waits for restart (engine-0)" in stage.notes[0]


def test_a_slow_step_like_the_ones_before_is_not_stuck() -> None:
    stage = WatchdogStage()

    class Slow:
        async def train(self, seconds: float) -> None:
            await asyncio.sleep(seconds)

    async def steps() -> None:
        trainer = Called("trainer", Slow(), stage.waits)
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

    stage = WatchdogStage("restart", restart=restart)
    assert stage.run(Called("trainer", HangsOnce(), stage.waits).train()) == ""
    assert asked == ["trainer"]


def test_what_cannot_be_restarted_stops_the_run() -> None:
    async def restart(name: str, reason: str) -> bool:
        return False

    stage = WatchdogStage("restart", restart=restart)
    line = stage.run(agent(stage, FakeEngine(), SilentReward()).generate_group([one_rollout()]))
    assert line.startswith("stuck: rewards of sums")


def test_report_only_goes_on_and_tells_again_after_another_while() -> None:
    stage = WatchdogStage("report")
    assert stage.run(Called("trainer", Silent(), stage.waits).train(None), seconds=200.0) == ""
    assert len(stage.notes) == 3


def test_a_cancelled_wait_is_no_answer() -> None:
    waits = Waits()

    async def run() -> None:
        task = asyncio.create_task(Called("engine-0", Silent(), waits).generate_many([]))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(run())
    assert waits.answered == {}
    assert waits.open == {}


def test_a_death_is_no_answer_and_does_not_raise_the_limit() -> None:
    """A hang that a restart ended made the next one be noticed five times later."""
    now = [0.0]
    waits = Waits(lambda: now[0])

    def die() -> None:
        with waits.wait("trainer", WaitKind.TRAIN, responder="trainer"):
            now[0] = 300.0
            raise WorkerDied("trainer: it was killed")

    with pytest.raises(WorkerDied):
        die()
    assert waits.longest == {}
    assert waits.moved_at == 300.0


def test_the_watchdog_ends_the_workers_of_a_run_that_it_stops() -> None:
    """Nobody watches what unwinds then: no call may wait for a worker that hangs."""
    ended: list[str] = []

    async def end(reason: str) -> None:
        ended.append(reason)

    stage = WatchdogStage("stop", end=end)
    line = stage.run(Called("trainer", Silent(), stage.waits).train())
    assert ended == [line] != [""]


def test_a_watched_block_raises_the_error_of_the_watchdog() -> None:
    async def main() -> None:
        stage = WatchdogStage("stop")
        stage.waits.clock = asyncio.get_running_loop().time

        async def train() -> None:
            async with watched(stage.watchdog):
                await Called("trainer", Silent(), stage.waits).train()

        with pytest.raises(RunError, match="stuck: trainer"):
            await train()
        async with watched(stage.watchdog):
            await asyncio.sleep(1)

    on_virtual_time(main)
