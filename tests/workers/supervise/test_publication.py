"""Weights whose trainer dies while it writes them: written again before anything else is trained."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from penstock.errors import EngineError, WeightsGone, WrongStep
from penstock.types import Batch, WeightHandle
from penstock.workers.pool.pool import EnginePool
from penstock.workers.supervise.supervised import Restarts, Supervised
from penstock.workers.supervise.trainer import RestartingTrainer
from stages.fake_engine import FakeEngine
from stages.producing import on_virtual_time
from stages.supervised import FakeWorker, Play, nothing, settings

BATCH = Batch(step=2, groups=())


def handle(where: str, version: int = 1) -> WeightHandle:
    return WeightHandle(
        version=version, digest=f"digest-{version}", kind="shared_memory", location=where
    )


class TrainerFake:
    """Answers as a trainer does; with `hangs` it never finishes writing."""

    def __init__(self, number: int, log: list[str], *, hangs: bool) -> None:
        self._number, self._log, self._hangs = number, log, hangs
        self.writing = asyncio.Event()

    def _note(self, what: str) -> str:
        self._log.append(f"{what} by {self._number}")
        return f"side of {self._number}"

    async def announce(self) -> WeightHandle:
        return handle(self._note("announce"))

    async def publish(self) -> WeightHandle:
        where = self._note("publish")
        self.writing.set()
        if self._hangs:
            await asyncio.Event().wait()
        return handle(where)

    async def identity(self) -> tuple[int, str]:
        return 1, "digest-1"

    async def progress(self) -> int:
        return 0

    async def train(self, batch: Batch) -> str:
        return self._note("train")


class Trainers(Play):
    def __init__(self, *, first_hangs: bool, part: type[TrainerFake] = TrainerFake) -> None:
        super().__init__()
        self._first_hangs, self._part = first_hangs, part
        self.log: list[str] = []
        self.made: list[FakeWorker] = []
        self.replaced: list[tuple[int, str]] = []

    async def start(self) -> RestartingTrainer:
        async def spawn() -> FakeWorker:
            number = len(self.made)
            part: Any = self._part(number, self.log, hangs=self._first_hangs and not number)
            self.made.append(FakeWorker("trainer", part))
            return self.made[-1]

        events = replace(self.events, replaced=self._replace)
        self.supervised = Supervised("trainer", spawn, settings(), events)
        self.supervised.restart_with(Restarts(prepare=nothing))
        await self.supervised.start()
        return RestartingTrainer(self.supervised)

    def _replace(self, version: int, digest: str) -> None:
        self.replaced.append((version, digest))


def test_a_publication_that_dies_with_its_trainer_is_made_again_before_the_next_step() -> None:
    async def run() -> None:
        trainers = Trainers(first_hangs=True)
        trainer = await trainers.start()
        published = await trainer.publish()
        assert published.location == "side of 0"  # given out while it is written
        training = asyncio.create_task(trainer.train(BATCH))
        renewing = asyncio.create_task(trainer.renewed(published))
        await trainers.made[0].engine.writing.wait()
        trainers.made[0].die()
        renewed = await renewing
        assert (renewed.version, renewed.digest) == (published.version, published.digest)
        assert renewed.location == "side of 1"
        await training
        assert trainers.log == ["announce by 0", "publish by 0", "publish by 1", "train by 1"]
        await trainers.supervised.close()

    asyncio.run(run())


def test_a_trainer_that_dies_after_it_published_publishes_the_same_again() -> None:
    async def run() -> None:
        trainers = Trainers(first_hangs=False)
        trainer = await trainers.start()
        published = await trainer.publish()
        await trainer.train(BATCH)
        trainers.made[0].die()
        assert (await trainer.renewed(published)).location == "side of 1"
        assert trainers.log[-1] == "publish by 1"
        await trainers.supervised.close()

    asyncio.run(run())


class OtherBits(TrainerFake):
    """Redoes a step with other bits than the worker before it, as a GPU may."""

    async def publish(self) -> WeightHandle:
        return replace(await super().publish(), digest=f"digest of {self._number}")

    async def identity(self) -> tuple[int, str]:
        return 1, f"digest of {self._number}"


def test_a_trainer_that_redid_its_step_with_other_bits_publishes_those() -> None:
    """The handle of the dead worker was handed out again, so the engines could never load that version."""

    async def run() -> None:
        trainers = Trainers(first_hangs=True, part=OtherBits)
        trainer = await trainers.start()
        published = await trainer.publish()
        trainers.made[0].die()
        renewed = await trainer.renewed(published)
        assert renewed.location == "side of 1"
        assert (renewed.version, renewed.digest) == (published.version, "digest of 1")
        assert await trainer.renewed(published) == renewed
        await trainers.supervised.close()

    asyncio.run(run())


class PastIt(TrainerFake):
    """A restarted worker was restored to a later step than the one that was published last."""

    async def publish(self) -> WeightHandle:
        return replace(await super().publish(), version=1 + self._number)


def test_a_trainer_that_is_past_the_lost_version_publishes_its_own_before_it_trains() -> None:
    """The handle of the dead worker was handed out, which is unreadable if it names GPU memory."""

    async def run() -> None:
        trainers = Trainers(first_hangs=False, part=PastIt)
        trainer = await trainers.start()
        told = trainers.replaced
        published = await trainer.publish()
        await trainer.train(BATCH)
        trainers.made[0].die()
        await trainer.train(BATCH)
        assert trainers.log[-2:] == ["publish by 1", "train by 1"]
        assert told == [], "no engine has asked for it"
        renewed = await trainer.renewed(published)
        assert (renewed.version, renewed.location) == (2, "side of 1")
        assert told == [(renewed.version, renewed.digest)]
        await trainers.supervised.close()

    asyncio.run(run())


class Picky(FakeEngine):
    """Can read only what lies on the right side."""

    async def update_weights(self, version: int, source: WeightHandle) -> str:
        if source.location != "right":
            raise WeightsGone("its writer ended")
        return await super().update_weights(version, source)


async def picky_engines(play: Play, renewed: str) -> tuple[EnginePool, Supervised]:
    async def spawn() -> FakeWorker:
        return FakeWorker("engine-0", Picky(seconds_per_token=0))

    async def renew(old: WeightHandle) -> WeightHandle:
        return handle(renewed, old.version)

    one = Supervised("engine-0", spawn, settings(), play.events)
    await one.start()
    return EnginePool([one], play.events, renew=renew), one


def test_engines_that_find_weights_gone_load_them_when_they_are_there_again() -> None:
    async def run() -> None:
        engines, one = await picky_engines(Play(), "right")
        assert await engines.update_weights(1, handle("left")) == "digest-1"
        await one.replace("it is tried again")
        await one.ready()
        assert (await engines.stats()).policy_version == 1
        await engines.close()

    asyncio.run(run())


def test_weights_that_stay_gone_end_the_run_with_a_line() -> None:
    async def run() -> None:
        engines, _ = await picky_engines(Play(), "wrong again")
        with pytest.raises(EngineError, match="version 1 cannot be read by all engines"):
            await engines.update_weights(1, handle("left"))
        await engines.close()

    asyncio.run(run())


class AtStep(TrainerFake):
    """A trainer that refuses any step but its next."""

    async def train(self, batch: Batch) -> str:
        if self._number == 0:
            raise WrongStep("trainer: got a batch of step 2, allowed: step 1")
        return await super().train(batch)

    async def request_stop(self) -> None:
        await asyncio.Event().wait()


def test_a_trainer_that_is_at_another_step_is_replaced_and_restored() -> None:
    async def run() -> None:
        trainers = Trainers(first_hangs=False, part=AtStep)
        trainer = await trainers.start()
        await trainer.train(BATCH)
        assert trainers.log == ["train by 1"]
        assert "allowed: step 1; starting it again (1 of 3)" in trainers.notes[0]
        await trainers.supervised.close()

    asyncio.run(run())


def test_a_stop_does_without_the_answer_of_a_blocked_rank() -> None:
    async def run() -> None:
        trainers = Trainers(first_hangs=False, part=AtStep)
        trainer = await trainers.start()
        await trainer.request_stop()  # blocked
        trainers.made[0].die()
        await trainer.request_stop()  # dead
        await trainers.supervised.close()

    on_virtual_time(run)
