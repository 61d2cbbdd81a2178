"""Fake engines and a fake trainer on a device that notices when both hold its memory."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from penstock.types import Batch, StepReport, WeightHandle
from penstock.workers.pool.pool import EnginePool
from penstock.workers.supervise.supervised import Supervised
from penstock.workers.supervise.trainer import ColocatedTrainer, RestartingTrainer, TrainerClient
from penstock.workers.workers import start_all
from stages.fake_engine import FakeEngine
from stages.supervised import Crew, FakeWorker, settings


class Device:
    """A device that logs events and records when an engine and the trainer hold its memory together."""

    def __init__(self) -> None:
        self.holders: set[str] = set()
        self.log: list[str] = []
        self.crowded: list[str] = []
        self.at: dict[int, Callable[[], None]] = {}  # number of lines -> what happens then

    def note(self, line: str) -> None:
        """Log an event; then do what the test planned for this line, such as a death."""
        self.log.append(line)
        self.at.pop(len(self.log), lambda: None)()

    def take(self, who: str) -> None:
        self.holders.add(who)
        if len({name.split("-")[0] for name in self.holders}) > 1:
            self.crowded.append(f"{sorted(self.holders)} after {self.log}")

    def leave(self, who: str) -> None:
        self.holders.discard(who)


class Sleeper(FakeEngine):
    """An engine that holds memory while it is awake, and loads weights asleep too."""

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
    """A worker whose memory on the device is freed when it dies."""

    def __init__(self, name: str, part: Any, device: Device) -> None:
        super().__init__(name, part)
        self._device = device

    def die(self) -> None:
        self._device.leave(self.name)
        super().die()


class TrainerFake:
    """A trainer that holds memory from its start; `during` runs in each of its steps."""

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

    async def announce(self) -> None: ...

    async def publish(self) -> WeightHandle:
        self._device.note(f"publish {self.step}")
        return WeightHandle(version=self.step, digest=f"digest-{self.step}", kind="none")

    async def identity(self) -> tuple[int, str]:
        return self.step, f"digest-{self.step}"


class Shift(Crew):
    """A pool that shares a device with a trainer; each training step runs `during`."""

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

    async def both(self, *, every: int = 1) -> tuple[EnginePool, ColocatedTrainer]:
        async def spawn() -> Any:
            part = TrainerFake(self.device, lambda: self.during())
            self.trainers.append(Tenant("trainer", part, self.device))
            return self.trainers[-1]

        async def restore(part: TrainerClient) -> None:
            for step in range(1, self.committed + 1):
                await part.train(Batch(step=step, groups=()))

        trainer = Supervised("trainer", spawn, settings(max_restarts=9), self.events)
        engines = [
            Supervised(name, self._spawner(name), settings(max_restarts=9), self.events)
            for name in self.made
        ]
        await start_all(trainer, engines, settings(colocate=True))
        together = EnginePool(engines, self.events, make=self._make, shares_gpu=True)
        publishes = lambda step: step % every == 0  # noqa: E731
        part = ColocatedTrainer(RestartingTrainer(trainer), together, publishes)
        part.restart_with(restore)
        self.supervised = trainer
        self.device.log.clear()
        return together, part

    async def step(self, trainer: ColocatedTrainer, number: int, *, publish: bool = True) -> None:
        """Train and publish one step as the loop does."""
        report = await trainer.train(Batch(step=number, groups=()))
        assert (report.step, self.trainers[-1].engine.step) == (number, number)  # type: ignore[attr-defined]
        self.committed = number
        if publish:
            await self.publish(trainer)

    async def publish(self, trainer: ColocatedTrainer) -> str:
        handle = await trainer.publish()
        digest = await trainer._engines.update_weights(handle.version, handle)
        await trainer.engines_loaded()
        return digest

    async def end(self, engines: EnginePool) -> None:
        await self.supervised.close()
        await engines.close()
        assert self.device.crowded == []

    async def die(self, name: str) -> Sleeper:
        """Kill an engine's worker; return the engine that is started in its place."""
        while not self.started.empty():
            self.started.get_nowait()
        self.made[name][-1].die()
        return await self.started.get()

    def newest(self, name: str) -> Sleeper:
        engine = self.made[name][-1].engine
        assert isinstance(engine, Sleeper)
        return engine

    def supervised_engine(self, engines: EnginePool, index: int) -> Supervised:
        return engines._engines[index].supervised

    def return_of(self, engines: EnginePool, index: int) -> asyncio.Event:
        """Return an event that is set when a dead engine serves again."""
        one, back = self.supervised_engine(engines, index), asyncio.Event()
        owner = one._owner

        async def told() -> None:
            await owner.when_back()
            back.set()

        one.restart_with(replace(owner, when_back=told))
        return back

    def all_serve(self) -> bool:
        return not any(self.newest(name).asleep or self.newest(name).paused for name in self.made)
