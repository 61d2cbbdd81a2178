"""Engines and a trainer that share devices take turns, whatever dies and whatever arrives meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from test_supervise import HANDLE, Crew, FakeWorker, nothing, request, settings

from fakes import FakeEngine
from penstock.errors import EngineError
from penstock.launch.engines import Engines
from penstock.launch.services import Workers
from penstock.launch.supervise import Supervised
from penstock.launch.trainer import ColocatedTrainer
from penstock.types import Batch, StepReport, WeightHandle


class Sleeper(FakeEngine):
    """Holds memory while it is awake; cannot take weights while it sleeps."""

    asleep = paused = False

    def __init__(self) -> None:
        super().__init__(seconds_per_token=0)
        self.told_to_pause, self.fell_asleep = asyncio.Event(), asyncio.Event()
        self.drained = asyncio.Event()
        self.drained.set()

    async def pause(self, mode: Any = "abort") -> None:
        self.paused = True
        self.told_to_pause.set()
        await self.drained.wait()

    async def resume(self) -> None:
        self.paused = False

    async def sleep(self) -> None:
        self.asleep = True
        self.fell_asleep.set()

    async def wake(self) -> None:
        self.asleep = False

    async def update_weights(self, version: int, source: WeightHandle | None = None) -> str:
        if self.asleep:
            raise EngineError("got new weights while asleep")
        return await super().update_weights(version, source)


class Shift(Crew):
    """Engines that share devices with a trainer, whose every step does `during`."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.started: asyncio.Queue[Sleeper] = asyncio.Queue()

    def _spawner(self, name: str) -> Any:
        async def spawn() -> FakeWorker:
            engine = Sleeper()
            self.made[name].append(FakeWorker(name, engine))
            self.started.put_nowait(engine)
            return self.made[name][-1]

        return spawn

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

    async def step(self, engines: Engines, during: Callable[[], Awaitable[None]]) -> None:
        class Part:
            async def train(self, batch: Batch) -> StepReport:
                await during()
                return StepReport(step=1, policy_version=1, digest="d")

        async def spawn() -> Any:
            return FakeWorker("trainer", Part())  # type: ignore[arg-type]

        trainer = Supervised("trainer", spawn, settings(), self.around)
        await trainer.start()
        colocated = ColocatedTrainer(trainer, self.around.edges, engines)
        await colocated.train(Batch(step=1, groups=()))
        await trainer.close()


def test_an_engine_that_comes_back_in_the_trainers_turn_sleeps_until_the_others_wake() -> None:
    async def run() -> None:
        shift = Shift(2)
        engines = await shift.start()
        await engines.update_weights(1, HANDLE)

        async def during() -> None:
            assert all(shift.newest(name).asleep for name in shift.made)
            again = await shift.die("engine-1")
            await again.fell_asleep.wait()
            assert again.version == 1

        await shift.step(engines, during)
        assert len(shift.made["engine-1"]) == 2
        for name in shift.made:
            assert not shift.newest(name).asleep
            assert not shift.newest(name).paused
        made = await engines.generate_many([request("a"), request("bb")])
        assert [one.finish_reason for one in made] == ["stop", "stop"]
        await engines.close()

    asyncio.run(run())


def test_the_last_engine_may_die_in_the_trainers_turn() -> None:
    async def run() -> None:
        shift = Shift(1)
        engines = await shift.start()

        async def during() -> None:
            shift.made["engine-0"][0].die()  # before or after it is back, the engines are to wake

        await shift.step(engines, during)
        assert (await engines.generate(request("a"))).finish_reason == "stop"
        assert not shift.newest("engine-0").asleep
        await engines.close()

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
        again = await shift.die("engine-1")
        made = await engines.generate_many([request("a" * n) for n in range(1, 5)])
        assert {one.finish_reason for one in made} == {"stop"}
        assert again.calls
        first.drained.set()
        await pausing
        await engines.close()

    asyncio.run(run())


def test_weights_that_come_in_the_trainers_turn_are_loaded_after_it() -> None:
    async def run() -> None:
        shift = Shift(2)
        engines = await shift.start()
        coming: list[asyncio.Task[str]] = []

        async def during() -> None:
            coming.append(asyncio.create_task(engines.update_weights(1, HANDLE)))
            await asyncio.sleep(0)
            assert shift.newest("engine-0").version == 0

        await shift.step(engines, during)
        assert await coming[0] == "digest-1"
        assert [shift.newest(name).version for name in shift.made] == [1, 1]
        await engines.close()

    asyncio.run(run())


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
