"""Engines and a trainer that share devices take turns, whatever dies and whatever arrives meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_supervise import HANDLE, Crew, FakeWorker, nothing, request, settings

from fakes import FakeEngine
from penstock.launch.colocated import ColocatedTrainer
from penstock.launch.engines import Engines
from penstock.launch.services import Workers
from penstock.launch.supervise import Supervised
from penstock.launch.together import start_all
from penstock.types import Batch, StepReport, WeightHandle


class Device:
    """Who holds its memory, in the order of things; engine and trainer together are one too many."""

    def __init__(self) -> None:
        self.holders: set[str] = set()
        self.log: list[str] = []
        self.crowded: list[str] = []
        self.at: dict[int, Callable[[], None]] = {}  # what befalls after so many lines

    def note(self, line: str) -> None:
        """The last thing that a part does before it may die of it."""
        self.log.append(line)
        self.at.pop(len(self.log), lambda: None)()

    def take(self, who: str) -> None:
        self.holders.add(who)
        if len({name.split("-")[0] for name in self.holders}) > 1:
            self.crowded.append(f"{sorted(self.holders)} after {self.log}")

    def leave(self, who: str) -> None:
        self.holders.discard(who)


class Sleeper(FakeEngine):
    """Holds memory while it is awake; takes weights asleep too."""

    asleep = paused = False

    def __init__(self, name: str, device: Device) -> None:
        super().__init__(seconds_per_token=0)
        self.name, self.device = name, device
        self.told_to_pause, self.fell_asleep = asyncio.Event(), asyncio.Event()
        self.drained = asyncio.Event()
        self.drained.set()
        device.take(name)

    def _log(self, what: str) -> None:
        self.device.note(f"{self.name} {what}")

    async def pause(self, mode: Any = "abort") -> None:
        self.paused = True
        self.told_to_pause.set()
        await self.drained.wait()

    async def resume(self) -> None:
        assert not self.asleep
        self.paused = False
        self._log("resumes")

    async def sleep(self) -> None:
        before, self.asleep = self.asleep, True
        self.device.leave(self.name)
        self.fell_asleep.set()
        if not before:
            self._log("sleeps")

    async def wake(self) -> None:
        before, self.asleep = self.asleep, False
        self.device.take(self.name)
        if before:
            self._log(f"wakes with {self.version}")

    async def update_weights(self, version: int, source: WeightHandle | None = None) -> str:
        digest = await super().update_weights(version, source)
        self._log(f"loads {version}")
        return digest


class Tenant(FakeWorker):
    """A worker whose death frees the device's memory."""

    def __init__(self, name: str, part: Any, device: Device) -> None:
        super().__init__(name, part)
        self._device = device

    def die(self) -> None:
        self._device.leave(self.name)
        super().die()


class TrainerFake:
    """Holds memory from its start on; `during` is what happens in each of its steps."""

    def __init__(self, device: Device, during: Callable[[], Awaitable[None]]) -> None:
        self._device, self._during, self.step = device, during, 0
        device.take("trainer")

    async def wake(self) -> None:
        self._device.take("trainer")

    async def train(self, batch: Batch) -> StepReport:
        self._device.take("trainer")
        self._device.note(f"train {batch.step}")
        await self._during()
        self.step = batch.step
        return StepReport(step=batch.step, policy_version=batch.step, digest=f"digest-{batch.step}")

    async def sleep(self) -> None:
        self._device.leave("trainer")
        self._device.note("trainer sleeps")

    async def load(self, folder: str) -> tuple[int, str]:
        self._device.take("trainer")
        return await self.identity()

    async def publish(self) -> WeightHandle:
        self._device.note(f"publish {self.step}")
        return WeightHandle(version=self.step, digest=f"digest-{self.step}", kind="none")

    async def identity(self) -> tuple[int, str]:
        return self.step, f"digest-{self.step}"


class Shift(Crew):
    """Engines that share a device with a trainer, whose every step does `during`."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.device = Device()
        self.started: asyncio.Queue[Sleeper] = asyncio.Queue()
        self.trainers: list[Tenant] = []
        self.during: Callable[[], Awaitable[None]] = self._nothing
        self.committed = 0

    async def _nothing(self) -> None: ...

    def _spawner(self, name: str) -> Any:
        async def spawn() -> FakeWorker:
            engine = Sleeper(name, self.device)
            self.made[name].append(Tenant(name, engine, self.device))
            self.started.put_nowait(engine)
            return self.made[name][-1]

        return spawn

    def kill(self, name: str) -> None:
        (self.trainers if name == "trainer" else self.made[name])[-1].die()

    async def both(self, *, every: int = 1) -> tuple[Engines, ColocatedTrainer]:
        async def spawn() -> Any:
            part = TrainerFake(self.device, lambda: self.during())
            self.trainers.append(Tenant("trainer", part, self.device))
            return self.trainers[-1]

        async def restore(trainer: Any) -> None:
            for step in range(1, self.committed + 1):
                await trainer.train(Batch(step=step, groups=()))

        trainer = Supervised("trainer", spawn, settings(max_restarts=9), self.around)
        engines = [
            Supervised(name, self._spawner(name), settings(max_restarts=9), self.around)
            for name in self.made
        ]
        await start_all(trainer, engines, colocate=True)
        trainer.prepare = restore
        together = Engines(engines, self.around.edges, make=self._make)
        publishes = lambda step: step % every == 0  # noqa: E731
        part = ColocatedTrainer(trainer, self.around.edges, together, publishes)
        self.supervised = trainer
        self.device.log.clear()
        return together, part

    async def step(self, trainer: ColocatedTrainer, number: int, *, publish: bool = True) -> None:
        """As the loop does it."""
        report = await trainer.train(Batch(step=number, groups=()))
        assert (report.step, self.trainers[-1].engine.step) == (number, number)  # type: ignore[attr-defined]
        self.committed = number
        if publish:
            await self.publish(trainer)

    async def publish(self, trainer: ColocatedTrainer) -> str:
        handle = await trainer.publish()
        return await trainer._engines.update_weights(handle.version, handle)

    async def end(self, engines: Engines) -> None:
        await self.supervised.close()
        await engines.close()
        assert self.device.crowded == []

    async def die(self, name: str) -> Sleeper:
        """The one that is started in its place."""
        while not self.started.empty():
            self.started.get_nowait()
        self.made[name][-1].die()
        return await self.started.get()

    def newest(self, name: str) -> Sleeper:
        engine = self.made[name][-1].engine
        assert isinstance(engine, Sleeper)
        return engine

    def supervised_engine(self, engines: Engines, index: int) -> Supervised:
        return engines._workers[index].supervised

    def return_of(self, engines: Engines, index: int) -> asyncio.Event:
        """Set once an engine that died is back among the others."""
        one, back = self.supervised_engine(engines, index), asyncio.Event()
        take_back = one.when_back

        async def told() -> None:
            await take_back()
            back.set()

        one.when_back = told
        return back

    def all_serve(self) -> bool:
        return not any(self.newest(name).asleep or self.newest(name).paused for name in self.made)


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
    """The journal does not have that step yet, so a restored trainer has not either."""

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
        made = await engines.generate_many([request("a" * n) for n in range(1, 5)])
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
MOST_LINES = 30  # of a run of so many steps in which nobody dies


async def three_steps(deaths: dict[int, str]) -> None:
    """After so many lines of the log somebody dies; the steps are done, and nobody was in the way."""
    shift = Shift(2)
    engines, trainer = await shift.both(every=EVERY)
    shift.device.at = {at: partial(shift.kill, name) for at, name in deaths.items()}
    async with asyncio.timeout(30):  # a deadlock is to fail here, not to hang
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
        one = Supervised("engine-0", spawn, settings(), shift.around)
        await one.start()
        workers = Workers(
            engine=FakeEngine(),
            trainer=None,  # type: ignore[arg-type]
            close=lambda: nothing(None),
            description="",
            around=shift.around,
            supervised={"engine-0": one},
        )
        assert await workers.progress_of("engine-0") != await workers.progress_of("engine-0")
        assert await workers.progress_of("rewards of sums") is None
        await one.close()

    asyncio.run(run())
