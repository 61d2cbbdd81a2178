"""What runs inside a worker: a plain part joined to its weight sync.

The same classes serve a worker process, this process and a Ray actor.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from penstock.config import Config
from penstock.engine import ENGINES
from penstock.engine.protocol import EngineStats, InferenceEngine, SetAside
from penstock.errors import UserError
from penstock.plugins import load
from penstock.supervise.supervised import Supervised, SupervisionCallbacks
from penstock.supervise.trainer import TrainerClient
from penstock.types import Batch, StepReport, WeightHandle
from penstock.weights import SHARED
from penstock.weights.protocol import Announcing, WeightSync

if TYPE_CHECKING:
    from penstock.weights.collective import Distributor
    from penstock.weights.shared_memory import Folder


class TrainerPart(Protocol):
    """The consumer as the loop sees it: every method awaited, wherever it runs."""

    async def train(self, batch: Batch) -> StepReport:
        """One update."""

    async def publish(self) -> WeightHandle:
        """Copy the current weights out for the engines."""

    async def snapshot(self, folder: str) -> tuple[int, str]:
        """Copy the whole training state, to be written to `folder`; the step and its digest."""

    async def write_snapshot(self) -> None:
        """Write that copy; training goes on meanwhile."""

    async def load(self, folder: str) -> tuple[int, str]:
        """Restore it."""

    async def identity(self) -> tuple[int, str]:
        """The policy version and the digest of its weights."""

    async def is_exact(self) -> bool:
        """Whether the same step done again gives the same bits here."""

    async def request_stop(self) -> None:
        """Make a running `train` give up before it changes the weights."""


@dataclass(slots=True, kw_only=True)
class Workers:
    """What a launcher hands to the loop."""

    engine: InferenceEngine | None  # None: nothing is generated
    trainer: TrainerPart
    close: Callable[[], Awaitable[None]]
    description: str  # who sits where, in one line
    callbacks: SupervisionCallbacks  # the open waits, and where notes to the user go
    supervised: dict[str, Supervised] = field(default_factory=dict)  # workers that may come back

    scale: Callable[[int], Awaitable[str]] | None = None  # to so many engines; what was done
    set_aside: SetAside | None = None  # lends an engine that keeps its weights meanwhile

    def restore_trainer_with(self, restore: Callable[[TrainerPart], Awaitable[None]]) -> None:
        """From now on a trainer that dies is started again and given to `restore` first."""
        self.supervised["trainer"].prepare = lambda call: restore(TrainerClient(call))

    async def stack_of(self, name: str) -> str:
        """Return what a worker is doing; empty if `name` is no worker."""
        return await self.supervised[name].stack() if name in self.supervised else ""

    async def progress_of(self, name: str) -> object:
        """Return something that changes with every token or micro-batch; None if unknown."""
        worker = self.supervised.get(name)
        if worker is None:
            return None
        if name == "trainer":
            return await worker.progress("progress")
        stats: EngineStats | None = await worker.progress("stats")
        if stats is not None and stats.paused:
            return time.monotonic()  # a paused engine that answers is alive
        return stats.tokens_generated if stats is not None and stats.live else None

    async def activity_of(self, name: str) -> float | None:
        """Return the seconds of work that a worker's process has spent; None if unknown."""
        return await self.supervised[name].activity() if name in self.supervised else None

    async def restart(self, name: str, reason: str) -> bool:
        """Kill a worker that does not answer, so that it is restarted; False if it cannot be."""
        worker = self.supervised.get(name)
        if worker is None or not worker.can_restart:
            return False
        await worker.replace(reason)
        return True


class TrainerService:
    """A Consumer and the publishing side of a weight sync."""

    def __init__(
        self, config: Config, total_steps: int, sync: WeightSync, folder: Folder | None = None
    ) -> None:
        from penstock.train.consumer import Consumer
        from penstock.weights.offload import explain_out_of_memory

        self._memory = partial(explain_out_of_memory, "trainer", _memory_advice(config))
        with self._memory():
            self._consumer = Consumer.from_config(config, total_steps=total_steps)
        self._sync, self._folder = sync, folder
        self._digest = self._consumer.digest()
        self._write: Callable[[], None] | None = None
        self._draft: Path | None = None  # of the checkpoint that is being written

    def train(self, batch: Batch) -> StepReport:
        with self._memory():
            report = self._consumer.train(batch)
        self._digest = report.digest
        return report

    def sleep(self) -> None:
        """Give device memory to the engines; publishing and checkpoints work on."""
        self._consumer.offload()

    def wake(self) -> None:
        """Undo `sleep`."""
        with self._memory():
            self._consumer.reload()

    def publish(self) -> WeightHandle:
        """Every rank takes part, since shards are gathered; the first one hands them over."""
        consumer = self._consumer
        if not consumer.ranks.is_first:
            for _ in consumer.weights():
                pass
            return WeightHandle(version=consumer.policy_version, digest=self._digest, kind="rank")
        return self._sync.publish(consumer.policy_version, self._digest, consumer.weights())

    def weight_chunk(self, number: int) -> Any:
        """One part of what was published last, for the object store."""
        return cast(Any, self._sync).chunk(number)

    def announce(self) -> WeightHandle | None:
        """The handle of what `publish` writes next, for engines that begin early; None: not yet."""
        if not self._consumer.ranks.is_first:
            return None
        sync = cast(Announcing, self._sync)
        return sync.announce(self._consumer.policy_version, self._digest)

    async def weights_folder(self) -> str:
        return str(self._folder.path) if self._folder is not None else ""

    async def remove_weights(self) -> None:
        """At the end of the run: give the memory of this node back."""
        if self._folder is not None:
            self._folder.remove()
            self._folder = None

    def snapshot(self, folder: str) -> tuple[int, str]:
        self._draft = Path(folder)
        self._write = self._consumer.snapshot(self._draft)
        return self.identity()

    async def write_snapshot(self) -> None:
        write, self._write = self._write, None
        assert write is not None, "a snapshot is taken before it is written"
        await asyncio.to_thread(write)

    def load(self, folder: str) -> tuple[int, str]:
        with self._memory():
            self._consumer.load(Path(folder))
        self._digest = self._consumer.digest()
        return self.identity()

    def identity(self) -> tuple[int, str]:
        return self._consumer.policy_version, self._digest

    def is_exact(self) -> bool:
        return bool(self._consumer.policy.device.type == "cpu")

    def request_stop(self) -> None:
        self._consumer.request_stop()

    def progress(self) -> tuple[int, int]:
        """Pieces of work that are done, and bytes of the newest checkpoint; from any thread."""
        return self._consumer.work_done, _size_of(self._draft)


def _memory_advice(config: Config) -> str:
    smaller = "lower train.micro_batch_tokens or set train.gradient_checkpointing=true"
    if config.launch.colocate:
        return f"{smaller}; with launch.colocate the engines have given all of theirs back"
    return f"{smaller}; an engine on the same device gives way with launch.colocate=true"


def _size_of(folder: Path | None) -> int:
    """Bytes of all its files; it may be renamed or removed meanwhile."""
    if folder is None:
        return 0
    total = 0
    with contextlib.suppress(OSError):
        for path in folder.rglob("*"):
            total += path.stat().st_size
    return total


Meeting = tuple[str, int]  # address and port at which trainer ranks find each other


def trainer_part(
    config: Config,
    total_steps: int,
    kind: str,
    folder: str,
    rank: int,
    meeting: Meeting,
    node: str = "",
) -> TrainerService:
    """A trainer rank in a worker. `node`: one of several, in whose memory it has its own folder."""
    _describe_ranks(config, rank, meeting)
    own: Folder | None = None
    if kind == "collective" and node and rank == 0:
        from penstock.weights.shared_memory import Folder

        own = Folder(Path(folder)) if folder else Folder.new()
        folder = str(own.path)
    sync = _make_sync(kind, folder, node, on_device=_shares_device(config, kind))
    return TrainerService(config, total_steps, sync, own)


def _shares_device(config: Config, kind: str) -> bool:
    """Whether weights stay on the GPU; colocated, its memory is worth more than the time."""
    if kind not in ("cuda_ipc", SHARED):
        return False
    from penstock.train.policy import trainer_device

    device = trainer_device(config.model).type
    if kind == "cuda_ipc" and device != "cuda":
        raise UserError(
            f"sync.kind: got cuda_ipc with a model on {device}, allowed: auto, shared_memory"
        )
    return device == "cuda" and (kind == "cuda_ipc" or not config.launch.colocate)


def engine_part(config: Config, kind: str, folder: str, index: int) -> InferenceEngine:
    """An engine in a worker."""
    sync = _make_sync(kind, folder)
    engine_class = load("engine.name", config.engine.name, ENGINES)
    engine: InferenceEngine = engine_class.from_config(config, fetch=sync.fetch, index=index)
    return engine


def distributor_part(folder: str, node: str, address: str, backend: str = "gloo") -> Distributor:
    """What passes weights between nodes, in a worker."""
    from penstock.weights.collective import Distributor

    return Distributor(folder, node=node, address=address, backend=backend)


def _make_sync(kind: str, folder: str, node: str = "", *, on_device: bool = False) -> WeightSync:
    if kind != "object_store":  # between nodes, distributors do the rest
        from penstock.weights.shared_memory import SharedMemorySync

        return SharedMemorySync(folder, node=node, on_device=on_device)
    from penstock.weights.object_store import ObjectStoreSync

    return ObjectStoreSync()


def _describe_ranks(config: Config, rank: int, meeting: Meeting) -> None:
    """What torch.distributed reads; a trainer that is alone needs none of it."""
    if config.launch.num_consumers > 1:
        os.environ.update(
            RANK=str(rank),
            WORLD_SIZE=str(config.launch.num_consumers),
            LOCAL_RANK=str(rank),
            MASTER_ADDR=meeting[0],
            MASTER_PORT=str(meeting[1]),
        )
