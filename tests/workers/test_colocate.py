"""Engines and a trainer that share devices take turns, also when one dies during a turn."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.workers.supervise.supervised import Supervised
from penstock.workers.workers import Workers
from stages.fake_engine import FakeEngine
from stages.shared_device import Shift, Sleeper
from stages.supervised import HANDLE, FakeWorker, nothing, request, settings


def test_engines_wake_with_the_new_weights_and_the_device_is_never_shared() -> None:
    async def run() -> None:
        shift = Shift(2)
        engines, trainer = await shift.both()
        await shift.step(trainer, 1)
        assert shift.device.log == [
            "engine-0 sleeps",
            "engine-1 sleeps",
            "train 1",
            "trainer sleeps",
            "publish 1",
            "engine-0 loads 1",
            "engine-1 loads 1",
            "engine-0 wakes with 1",
            "engine-1 wakes with 1",
            "engine-0 resumes",
            "engine-1 resumes",
        ]
        assert await shift.publish(trainer) == "digest-1"
        assert shift.device.log[-1] == "publish 1"  # held already: nothing is loaded twice
        await shift.end(engines)

    asyncio.run(run())


def test_without_a_publication_they_wake_with_the_old_ones() -> None:
    async def run() -> None:
        shift = Shift(1)
        engines, trainer = await shift.both(every=2)
        await shift.step(trainer, 1, publish=False)
        assert shift.all_serve()
        assert shift.device.log[-2:] == ["engine-0 wakes with 0", "engine-0 resumes"]
        await shift.step(trainer, 2)
        assert shift.device.log[-2:] == ["engine-0 wakes with 2", "engine-0 resumes"]
        await shift.end(engines)

    asyncio.run(run())


def test_a_checkpoint_is_loaded_in_the_trainers_turn_and_steps_are_redone_in_one() -> None:
    async def run() -> None:
        shift = Shift(1)
        engines, trainer = await shift.both()
        await trainer.load("folder")
        assert shift.all_serve()
        shift.device.log.clear()
        for number in (1, 2, 3):
            await shift.step(trainer, number, publish=number == 3)
        told = [line for line in shift.device.log if line.startswith("engine")]
        assert told == [
            "engine-0 sleeps",
            "engine-0 loads 3",
            "engine-0 wakes with 3",
            "engine-0 resumes",
        ]
        await shift.end(engines)

    asyncio.run(run())


def test_a_trainer_that_dies_in_its_turn_does_the_step_again_while_the_engines_sleep() -> None:
    async def run() -> None:
        shift = Shift(1)
        engines, trainer = await shift.both()
        await shift.step(trainer, 1)

        async def dies() -> None:
            shift.during = shift._nothing
            shift.trainers[-1].die()
            await asyncio.Event().wait()

        shift.during = dies
        await shift.step(trainer, 2)
        assert len(shift.trainers) == 2
        assert shift.all_serve()
        assert shift.newest("engine-0").version == 2
        assert shift.device.log.count("engine-0 sleeps") == 2
        await shift.end(engines)

    asyncio.run(run())


def test_a_trainer_that_dies_as_it_gives_its_memory_back_does_the_step_again() -> None:
    """The journal does not have that step yet, so the restored trainer repeats it."""

    async def run() -> None:
        shift = Shift(1)
        engines, trainer = await shift.both()
        part = shift.trainers[-1].engine

        async def dies() -> None:
            shift.trainers[-1].die()

        part.sleep = dies  # type: ignore[method-assign]
        await shift.step(trainer, 1)
        assert len(shift.trainers) == 2
        assert shift.device.log.count("train 1") == 2
        assert shift.all_serve()
        await shift.end(engines)

    asyncio.run(run())


def test_a_trainer_that_dies_in_the_engines_turn_is_restored_while_they_sleep() -> None:
    async def run() -> None:
        shift = Shift(2)
        engines, trainer = await shift.both()
        await shift.step(trainer, 1)
        redone = asyncio.Event()

        async def look() -> None:
            assert all(shift.newest(name).asleep for name in shift.made)
            redone.set()

        shift.during = look
        shift.trainers[-1].die()
        await redone.wait()
        made = await engines.generate(request("a"))
        assert made.finish_reason == "stop"
        shift.during = shift._nothing
        await shift.step(trainer, 2)
        assert shift.all_serve()
        assert shift.newest("engine-1").version == 2
        await shift.end(engines)

    asyncio.run(run())


def test_a_trainer_that_dies_before_it_published_publishes_after_its_return() -> None:
    async def run() -> None:
        shift = Shift(1)
        engines, trainer = await shift.both()
        await shift.step(trainer, 1, publish=False)
        assert shift.newest("engine-0").asleep
        shift.trainers[-1].die()
        await shift.publish(trainer)
        assert shift.all_serve()
        assert shift.newest("engine-0").version == 1
        await shift.end(engines)

    asyncio.run(run())


def test_an_engine_that_dies_in_the_trainers_turn_is_started_after_it_with_the_newest_weights() -> (
    None
):
    async def run() -> None:
        shift = Shift(2)
        engines, trainer = await shift.both()
        await shift.step(trainer, 1)

        async def during() -> None:
            shift.made["engine-1"][-1].die()
            await shift.newest("engine-0").stats()
            assert len(shift.made["engine-1"]) == 1

        shift.during = during
        back = shift.return_of(engines, 1)
        await shift.step(trainer, 2)
        await back.wait()
        assert shift.all_serve()
        assert [shift.newest(name).version for name in shift.made] == [2, 2]
        made = await engines.generate_many([request("a"), request("bb")])
        assert [one.finish_reason for one in made] == ["stop", "stop"]
        await shift.end(engines)

    asyncio.run(run())


def test_the_last_engine_may_die_in_the_trainers_turn() -> None:
    async def run() -> None:
        shift = Shift(1)
        engines, trainer = await shift.both()

        async def during() -> None:
            shift.made["engine-0"][0].die()

        shift.during = during
        await shift.step(trainer, 1)
        assert (await engines.generate(request("a"))).finish_reason == "stop"
        assert not shift.newest("engine-0").asleep
        assert shift.newest("engine-0").version == 1
        assert await engines.stats()
        await shift.end(engines)

    asyncio.run(run())


def test_the_trainers_turn_waits_for_an_engine_that_is_starting() -> None:
    async def run() -> None:
        shift = Shift(2)
        engines, trainer = await shift.both()
        await shift.step(trainer, 1)
        may_load = asyncio.Event()
        load = Sleeper.update_weights

        class Slow(Sleeper):
            async def update_weights(self, version: int, source: Any = None) -> str:
                await may_load.wait()
                return await load(self, version, source)

        one = shift.supervised_engine(engines, 1)
        spawn = one._spawn

        async def slow_spawn() -> Any:
            worker = await spawn()
            worker.engine.__class__ = Slow
            return worker

        one._spawn = slow_spawn
        again = await shift.die("engine-1")
        training = asyncio.create_task(shift.step(trainer, 2))
        await shift.newest("engine-0").told_to_pause.wait()
        assert "train 2" not in shift.device.log
        may_load.set()
        await training
        assert shift.device.log.index("engine-1 sleeps", 2) < shift.device.log.index("train 2")
        assert again.version == 2
        await shift.end(engines)

    asyncio.run(run())


def test_an_engine_that_dies_and_is_back_before_the_others_are_through_ends_nothing() -> None:
    async def run() -> None:
        shift = Shift(2)
        engines = await shift.start()
        first, second = shift.newest("engine-0"), shift.newest("engine-1")
        first.drained.clear()
        second.drained.clear()
        pausing = asyncio.create_task(engines.pause("wait"))
        await second.told_to_pause.wait()
        back = shift.return_of(engines, 1)
        again = await shift.die("engine-1")
        await back.wait()
        first.drained.set()
        await pausing
        await engines.resume()
        made = await asyncio.gather(*(engines.generate(request("a" * n)) for n in range(1, 5)))
        assert {one.finish_reason for one in made} == {"stop"}
        assert again.calls
        await engines.close()

    asyncio.run(run())


def test_weights_that_come_in_the_trainers_turn_are_loaded_after_it() -> None:
    async def run() -> None:
        shift = Shift(2)
        engines, trainer = await shift.both(every=2)
        coming: list[asyncio.Task[str]] = []

        async def during() -> None:
            coming.append(asyncio.create_task(engines.update_weights(1, HANDLE)))
            await asyncio.sleep(0)
            assert shift.newest("engine-0").version == 0

        shift.during = during
        await shift.step(trainer, 1, publish=False)
        assert await coming[0] == "digest-1"
        assert [shift.newest(name).version for name in shift.made] == [1, 1]
        await shift.end(engines)

    asyncio.run(run())


STEPS, EVERY = 3, 2
MOST_LINES = 30  # length of the log of an undisturbed run of three steps


async def three_steps(deaths: dict[int, str]) -> None:
    """Train three steps with deaths after given log lines; check that no two sides held the device."""
    shift = Shift(2)
    engines, trainer = await shift.both(every=EVERY)
    shift.device.at = {at: partial(shift.kill, name) for at, name in deaths.items()}
    async with asyncio.timeout(30):  # a deadlock fails here instead of hanging
        for number in range(1, STEPS + 1):
            await shift.step(trainer, number, publish=number % EVERY == 0)
            made = await engines.generate_many([request("a" * n) for n in range(1, 5)])
            assert {one.finish_reason for one in made} == {"stop"}
            versions = {segment.version for one in made for segment in one.segments}
            assert versions == {number - number % EVERY}
    await shift.end(engines)


@pytest.mark.parametrize("victim", ["trainer", "engine-0", "engine-1"])
def test_whoever_dies_at_any_point_the_steps_are_done_and_the_device_is_never_shared(
    victim: str,
) -> None:
    for at in range(1, MOST_LINES):
        asyncio.run(three_steps({at: victim}))


@hypothesis.settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(
        st.integers(1, MOST_LINES + 10),
        st.sampled_from(["trainer", "engine-0", "engine-1"]),
        min_size=2,
        max_size=5,
    )
)
def test_several_may_die(deaths: dict[int, str]) -> None:
    asyncio.run(three_steps(deaths))


def test_an_engine_that_was_told_to_pause_is_not_taken_for_stuck() -> None:
    class Paused(FakeEngine):
        async def stats(self) -> Any:
            from dataclasses import replace

            return replace(await super().stats(), paused=True)

    async def run() -> None:
        async def spawn() -> Any:
            return FakeWorker("engine-0", Paused())

        shift = Shift(0)
        one = Supervised("engine-0", spawn, settings(), shift.events)
        await one.start()
        workers = Workers(
            engine=FakeEngine(),
            trainer=None,  # type: ignore[arg-type]
            close=lambda: nothing(None),
            description="",
            events=shift.events,
            supervised={"engine-0": one},
        )
        assert await workers.progress_of("engine-0") != await workers.progress_of("engine-0")
        assert await workers.progress_of("rewards of sums") is None
        await one.close()

    asyncio.run(run())
