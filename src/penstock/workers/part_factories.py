"""The parts that run inside workers, and the functions that build these parts in the worker.

A part is a trainer rank, an engine, a distributor or an agent loop. Worker processes and Ray
actors build it by the name of its factory; `inline.py` uses the classes directly.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.config import Config
from penstock.config.plugins import load
from penstock.engine import ENGINES
from penstock.engine.protocol import Fetch, InferenceEngine
from penstock.errors import UserError, WrongStep
from penstock.files import ScratchFolder, weight_folder
from penstock.store.space import folder_bytes
from penstock.types import Batch, StepReport, WeightHandle
from penstock.waits import tell_stage
from penstock.weights import SHARED, sync_kind
from penstock.weights.protocol import Publish, WeightSync

if TYPE_CHECKING:
    from penstock.weights.shared_memory import SharedMemorySync

TRAINER = "penstock.workers.part_factories:trainer_part"
ENGINE = "penstock.workers.part_factories:engine_part"
DISTRIBUTOR = "penstock.weights.distributor:Distributor"
AGENT = "penstock.workers.ray.agents:AgentPart"


class TrainerService:
    """A Consumer and the publishing end of a weight sync: the part of a trainer worker."""

    def __init__(
        self,
        config: Config,
        total_steps: int,
        sync: WeightSync,
        folder: ScratchFolder | None = None,
    ) -> None:
        from penstock.model.arithmetic import explain_refusal
        from penstock.training.consumer import Consumer
        from penstock.weights.offload import explain_out_of_memory

        self._memory = partial(explain_out_of_memory, "trainer", _memory_advice(config))
        self._refusal = explain_refusal
        with self._memory(), self._refusal():
            self._consumer = Consumer.from_config(config, total_steps=total_steps)
        self._sync, self._folder = sync, folder
        tell_stage("hashing the weights")
        self._digest = self._consumer.digest()
        self._write: Callable[[], None] | None = None
        self._draft: Path | None = None  # the folder of the newest snapshot

    def train(self, batch: Batch) -> StepReport:
        """Train the next step; refuse any other, whose update would belong to another policy."""
        step = self._consumer.policy_version + 1
        if batch.step != step:
            raise WrongStep(f"trainer: got a batch of step {batch.step}, allowed: step {step}")
        with self._memory(), self._refusal():
            report = self._consumer.train(batch)
        self._digest = report.digest
        return report

    def sleep(self) -> None:
        """Free device memory for the engines; publishing and checkpoints still work."""
        self._consumer.offload()

    def wake(self) -> None:
        """Undo `sleep`."""
        with self._memory():
            self._consumer.reload()

    def publish(self) -> WeightHandle:
        """Publish the weights; every rank takes part in gathering them and the first rank writes them."""
        consumer = self._consumer
        if not consumer.ranks.is_first:
            for _ in consumer.weights():
                pass
            return WeightHandle(version=consumer.policy_version, digest=self._digest, kind="rank")
        return self._sync.publish(consumer.policy_version, self._digest, consumer.weights())

    def announce(self) -> WeightHandle | None:
        """The handle of the next publication, so that engines can begin to read early; or None."""
        if not self._consumer.ranks.is_first:
            return None
        return self._sync.announce(self._consumer.policy_version, self._digest)

    async def weights_folder(self) -> str:
        return str(self._folder.path) if self._folder is not None else ""

    async def remove_weights(self) -> None:
        """Free the weights in this node's memory at the end of the run."""
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
        return not self._consumer.arithmetic.doubt

    def adapters(self) -> str:
        return self._consumer.adapters

    def request_stop(self) -> None:
        self._consumer.request_stop()

    def progress(self) -> tuple[int, int]:
        """How many pieces of work are done and the bytes of the newest snapshot; thread-safe."""
        return self._consumer.work_done, folder_bytes(self._draft) if self._draft else 0


def _memory_advice(config: Config) -> str:
    smaller = "lower train.micro_batch_tokens or set train.gradient_checkpointing=true"
    if config.launch.colocate:
        return f"{smaller}; with launch.colocate the engines have freed all of their memory"
    return f"{smaller}; with launch.colocate=true an engine on the same device frees its memory"


Meeting = tuple[str, int]  # address and port at which trainer ranks meet


def trainer_part(
    config: Config,
    total_steps: int,
    kind: str,
    folder: str,
    rank: int,
    meeting: Meeting,
    node: str = "",
) -> TrainerService:
    """Build a trainer rank. `node`: the name of its node in a cluster, where it has its own folder."""
    if config.launch.num_consumers > 1:
        os.environ.update(
            RANK=str(rank),
            WORLD_SIZE=str(config.launch.num_consumers),
            LOCAL_RANK=str(rank),
            MASTER_ADDR=meeting[0],
            MASTER_PORT=str(meeting[1]),
        )
    node_folder: ScratchFolder | None = None
    if node and rank == 0:
        node_folder = ScratchFolder(Path(folder)) if folder else weight_folder()
        folder = str(node_folder.path)
    sync = _shared_memory(config, kind, folder, node)
    return TrainerService(config, total_steps, sync, node_folder)


def weights_of_here(config: Config, node: str = "") -> tuple[Publish, Callable[[], None]]:
    """What publishes weights of this process to engines that are workers, and what frees their memory."""
    folder = weight_folder()
    sync = _shared_memory(config, sync_kind(config), str(folder.path), node)

    def free() -> None:
        sync.close()
        folder.remove()

    return lambda version, digest, read: sync.publish(version, digest, read()), free


def _shared_memory(config: Config, kind: str, folder: str, node: str) -> SharedMemorySync:
    """The consumer's end of a weight sync, in the memory of the GPU or of the host."""
    from penstock.weights.shared_memory import SharedMemorySync

    return SharedMemorySync(folder, node=node, on_device=_shares_device(config, kind))


def _shares_device(config: Config, kind: str) -> bool:
    """Whether weights are published on the GPU; with colocation `auto` saves its memory."""
    if kind not in ("cuda_ipc", SHARED):
        return False
    from penstock.training.policy import trainer_device

    device = trainer_device(config.model).type
    if kind == "cuda_ipc" and device != "cuda":
        raise UserError(
            f"sync.kind: got cuda_ipc with a model on {device}, allowed: auto, shared_memory"
        )
    return device == "cuda" and (kind == "cuda_ipc" or not config.launch.colocate)


def engine_part(
    config: Config, index: int, fetch: Fetch | None = None, adapters: bool = False
) -> InferenceEngine:
    """Build an engine; without `fetch`, its weights come through shared memory.

    adapters: requests may name adapters, which engines of other programs cannot hold.
    """
    if fetch is None:
        from penstock.weights.shared_memory import SharedMemorySync

        fetch = SharedMemorySync().fetch
    config = config.of_engine(index)
    engine_class = load("engine.name", config.engine.name, ENGINES)
    more = {"adapters": True} if adapters else {}
    engine: InferenceEngine = engine_class.from_config(config, fetch=fetch, index=index, **more)
    return engine
