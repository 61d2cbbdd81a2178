"""The parts inside simulated worker processes: a trainer and an engine without a model.

The trainer's weights are a digest: each update hashes the weights before it and the batch, so a lost,
doubled or reordered update changes every later digest. The engine makes tokens at a pace
(`stages.paced_engine`) and loads weights from memory that it shares with the trainer. Both check what a
real part would break on, and report to the world what no part may ever see.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

from penstock.engine.protocol import EngineStats
from penstock.errors import DigestMismatch, StopRequested, WeightsGone, WrongStep
from penstock.reward.protocol import Reward
from penstock.types import Batch, Group, Prompt, Rollout, Score, StepReport, WeightHandle, staleness
from penstock.weights.digest import FORM
from stages.paced_engine import PacedEngine

if TYPE_CHECKING:
    from simulation.processes import SimProcess
    from simulation.world import World

START = f"{FORM}start"
STATE = "state.json"


def digest_after(digest: str, groups: tuple[Group, ...], bits: str = "") -> str:
    """Return the digest of the weights after an update with these groups, in this order.

    bits: what makes it another one in another process, on a device that does not repeat bits.
    """
    made = hashlib.sha256(digest.encode() + bits.encode())
    for group in groups:
        made.update(group.group_id.encode())
        for rollout in group.rollouts:
            made.update(rollout.response_ids.tobytes())
    return FORM + made.hexdigest()[:16]


class SimReward(Reward):
    """Scores by the tokens alone, after a moment."""

    async def score(self, rollout: Rollout, prompt: Prompt) -> Score:
        await asyncio.sleep(0.01)
        return Score(float(int(rollout.response_ids.sum()) % 5))

    async def close(self) -> None: ...


class BusyReward(SimReward):
    """Scores every fourth rollout only when it is asked again."""

    def __init__(self) -> None:
        self._asked: set[str] = set()

    async def score(self, rollout: Rollout, prompt: Prompt) -> Score:
        name = rollout.rollout_id
        if name not in self._asked and crc32(name.encode()) % 4 == 0:
            self._asked.add(name)
            raise RuntimeError("the judge is busy")
        return await super().score(rollout, prompt)


def refuse_some(rollouts: list[Rollout]) -> bool:
    """A user's rule of validity: refuses every fourth group."""
    group_id = rollouts[0].rollout_id.rpartition(".")[0]
    return crc32(group_id.encode()) % 4 != 0


@dataclass(eq=False)
class Buffer:
    """Published weights in memory that trainer and engines share."""

    number: int
    version: int
    digest: str
    writer: SimProcess
    whole: bool = False
    ended: bool = False  # no longer being written: whole, abandoned, or its writer died
    readers: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def end(self, *, whole: bool) -> None:
        self.whole, self.ended = self.whole or whole, True
        self.changed.set()


class SharedMemory:
    """The buffers of a run: the newest whole one, and those that are read or written."""

    def __init__(self, *, dies_with_writer: bool) -> None:
        """dies_with_writer: it is the memory of a GPU, which ends with the process that reserved it."""
        self.buffers: dict[int, Buffer] = {}
        self._numbers, self._dies_with_writer = 0, dies_with_writer

    def begin(self, version: int, digest: str, writer: SimProcess) -> Buffer:
        """Begin a buffer; buffers that nobody reads are written again, but never the newest whole one."""
        newest = max((n for n, one in self.buffers.items() if one.whole), default=0)
        for number, one in list(self.buffers.items()):
            if number != newest and not one.readers:
                one.end(whole=False)
                del self.buffers[number]
        self._numbers += 1
        made = self.buffers[self._numbers] = Buffer(self._numbers, version, digest, writer)
        return made

    def writer_died(self, process: SimProcess) -> None:
        for one in self.buffers.values():
            if one.writer is process and not one.ended:
                one.end(whole=False)
        if self._dies_with_writer:
            kept = {n: one for n, one in self.buffers.items() if one.writer is not process}
            self.buffers = kept

    async def read(self, handle: WeightHandle, process: SimProcess) -> Buffer:
        """Wait for the bytes of a handle; raise WeightsGone as `weights/shared_memory.py` does."""
        buffer = self.buffers.get(handle.location)
        if buffer is None:
            raise WeightsGone(f"weights of publication {handle.location} are gone")
        buffer.readers += 1
        try:
            await process.work(0.1)
            await buffer.changed.wait() if not buffer.ended else None
        finally:
            buffer.readers -= 1
        if not buffer.whole:
            raise WeightsGone(f"weights of publication {handle.location} are not whole")
        return buffer


class SimTrainer:
    """One trainer rank; several ranks meet in every update."""

    BLOCKING = ("train", "publish", "announce", "snapshot", "load", "identity", "is_exact")
    BLOCKING += ("sleep", "wake")

    def __init__(self, world: World, process: SimProcess, rank: int, ranks: int) -> None:
        self._world, self._process, self._rank, self._ranks = world, process, rank, ranks
        self.step, self.digest = 0, START
        self._stop = False
        self._announced: Buffer | None = None
        self._knows_layout = False
        self._draft: tuple[Path, dict[str, Any]] | None = None
        life = f"life {world.life}, {process.peers[0] or process.place}"
        self._bits = "" if world.repeats_bits else life
        world.hold_gpu(process.name)

    def _handle(self, buffer: Buffer) -> WeightHandle:
        return WeightHandle(
            version=buffer.version, digest=buffer.digest, kind="shared", location=buffer.number
        )

    async def train(self, batch: Batch) -> StepReport:
        if batch.step != self.step + 1:
            raise WrongStep(f"trainer: got a batch of step {batch.step}, not {self.step + 1}")
        self._world.hold_gpu(self._process.name)
        await self._process.work(0.5)
        if self._stop:
            self._stop = False
            raise StopRequested("stopped before the update")
        groups = await self._process.meet(("train", batch.step), self._rank, batch.groups)
        whole = tuple(
            group
            for place in range(len(groups[0]))
            for share in groups
            for group in share[place : place + 1]
        )
        await self._process.work(0.5)
        before, self.digest = self.digest, digest_after(self.digest, whole, self._bits)
        self.step = batch.step
        if self._rank == 0:
            self._world.trained(replace(batch, groups=whole), before, self.digest)
        await self._process.work(0.1)
        return StepReport(
            step=self.step,
            policy_version=self.step,
            digest=self.digest,
            metrics={"loss": 0.0},
            trained=batch.fingerprints(),
        )

    async def announce(self) -> WeightHandle | None:
        if self._rank or not self._knows_layout:
            return None
        self._abandon()
        self._announced = self._world.memory.begin(self.step, self.digest, self._process)
        return self._handle(self._announced)

    def _abandon(self) -> None:
        if self._announced is not None:
            self._announced.end(whole=False)
            self._announced = None

    async def publish(self) -> WeightHandle:
        await self._process.meet(("publish", self.step), self._rank, None)
        if self._rank:
            return WeightHandle(version=self.step, digest=self.digest, kind="rank")
        buffer = self._announced
        if buffer is None or (buffer.version, buffer.digest) != (self.step, self.digest):
            self._abandon()
            buffer = self._world.memory.begin(self.step, self.digest, self._process)
        self._knows_layout = True
        await self._process.work(0.3)
        buffer.end(whole=True)
        self._announced = None
        return self._handle(buffer)

    async def snapshot(self, folder: str) -> tuple[int, str]:
        await self._process.work(0.1)
        self._draft = (Path(folder), {"step": self.step, "digest": self.digest})
        return await self.identity()

    async def write_snapshot(self) -> None:
        assert self._draft is not None, "a snapshot is taken before it is written"
        (folder, state), self._draft = self._draft, None
        await self._process.work(0.5)
        if self._rank == 0:
            self._world.disk.check("checkpoint")
            (folder / STATE).write_text(json.dumps(state))

    async def load(self, folder: str) -> tuple[int, str]:
        self._world.hold_gpu(self._process.name)
        await self._process.work(0.3)
        state = json.loads((Path(folder) / STATE).read_text())
        self.step, self.digest = state["step"], state["digest"]
        return await self.identity()

    async def identity(self) -> tuple[int, str]:
        return self.step, self.digest

    async def is_exact(self) -> bool:
        return self._world.repeats_bits

    async def request_stop(self) -> None:
        self._stop = True

    async def progress(self) -> int:
        return self._process.pieces

    async def sleep(self) -> None:
        await self._process.work(0.05)
        self._world.leave_gpu(self._process.name)

    async def wake(self) -> None:
        self._world.hold_gpu(self._process.name)
        await self._process.work(0.05)


class SimEngine(PacedEngine):
    """An engine that loads weights from the shared memory and holds the GPU while it is awake."""

    BLOCKING = ()

    def __init__(self, world: World, process: SimProcess, slots: int) -> None:
        super().__init__(0.05, slots=slots, length=lambda request: world.length_of(request))
        self._world, self._process = world, process
        self.digest, self.asleep = START, False
        self.on_begin = self._begins
        world.hold_gpu(process.name)

    async def update_weights(self, version: int, source: WeightHandle | None = None) -> str:
        assert source is not None
        buffer = await self._world.memory.read(source, self._process)
        if buffer.digest != source.digest:
            raise DigestMismatch(f"weights {version}: got {buffer.digest}, not {source.digest}")
        await self._process.work(self._world.seconds_to_load())
        self._count_all()
        self.version, self.digest = version, buffer.digest
        return self.digest

    def _begins(self, name: str) -> None:
        if self.asleep:
            self._world.violated(f"{self._process.name}: runs {name} while it sleeps")

    async def sleep(self) -> None:
        if self._running and not self.paused:
            self._world.violated(f"{self._process.name}: sleeps with running requests")
        await self._process.work(0.05)
        self.asleep = True
        self._world.leave_gpu(self._process.name)

    async def wake(self) -> None:
        self._world.hold_gpu(self._process.name)
        await self._process.work(0.05)
        self.asleep = False

    async def stats(self) -> EngineStats:
        return replace(await super().stats(), digest=self.digest)


def stale_rollouts(batch: Batch, bounds: dict[str, int]) -> list[str]:
    """Return the rollouts of a batch that have a token older than the bound of their task allows."""
    return [
        f"{rollout.rollout_id}: staleness {staleness(batch.step, rollout.oldest_version)}"
        for group in batch.groups
        for rollout in group.rollouts
        if rollout.oldest_version is not None
        and staleness(batch.step, rollout.oldest_version) > bounds[group.task]
    ]
