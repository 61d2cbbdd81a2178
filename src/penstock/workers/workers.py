"""What a launcher returns: the engine and the trainer of a run, and their supervised workers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from penstock.config import SamplingConfig
from penstock.engine.protocol import EngineStats, InferenceEngine, SetAside
from penstock.waits import WaitKind, loop_time
from penstock.workers.supervise.supervised import Supervised, SupervisionCallbacks
from penstock.workers.supervise.trainer import TrainerPart

if TYPE_CHECKING:
    from penstock.workers.ray.agents import ActorAgentLoop


# of (workers, task, sampling, is_chat)
StartAgent = Callable[["Workers", str, SamplingConfig, bool], Awaitable["ActorAgentLoop"]]


class RestartableTrainer(TrainerPart, Protocol):
    """A trainer that can be restarted when it dies."""

    def restart_with(self, restore: Callable[[TrainerPart], Awaitable[None]]) -> None:
        """From now on, restart a trainer that dies; `restore` brings it to its last state."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Workers:
    """The parts that the loop drives, and what the watchdog asks of their workers."""

    engine: InferenceEngine | None  # None: nothing is generated
    trainer: RestartableTrainer
    close: Callable[[], Awaitable[None]]
    description: str  # the place of every worker, in one line
    events: SupervisionCallbacks  # the open waits, and where notes to the user go
    supervised: MutableMapping[str, Supervised] = field(default_factory=dict)  # by worker name
    # changes the number of engines; returns what was done
    scale: Callable[[int], Awaitable[str]] | None = None
    # starts the actors of a task's agent loop; only Ray has it
    start_agent: StartAgent | None = None
    set_aside: SetAside | None = None  # lends out an engine, which keeps its weights meanwhile

    @property
    def restarts(self) -> int:
        """How often workers were restarted in this run."""
        return sum(worker.restarts for worker in self.supervised.values())

    async def stack_of(self, name: str) -> str:
        """Return what a worker is doing; empty if `name` is no worker."""
        return await self.supervised[name].stack() if name in self.supervised else ""

    async def progress_of(self, name: str) -> object:
        """Return something that changes with every token or micro-batch; None if unknown."""
        worker = self.supervised.get(name)
        if worker is None:
            return None
        if name == "trainer" or name.startswith("distributor"):
            return await worker.progress("progress")
        stats: EngineStats | None = await worker.progress("stats")
        if stats is not None and stats.paused and not self._is_asked(name):
            return loop_time()  # a paused engine that answers is alive
        return stats.tokens_generated if stats is not None and stats.live else None

    def _is_asked(self, name: str) -> bool:
        """Return whether a worker owes an answer that its pause does not delay."""
        return any(
            wait.responder == name and wait.what is not WaitKind.GENERATE
            for wait in self.events.waits.open.values()
        )

    async def activity_of(self, name: str) -> float | None:
        """Return the seconds of work that a worker's process has spent; None if unknown."""
        return await self.supervised[name].activity() if name in self.supervised else None

    async def end(self, reason: str) -> None:
        """Kill every worker for good, so that nothing waits for one any more."""
        await asyncio.gather(*(worker.end(reason) for worker in self.supervised.values()))

    async def restart(self, name: str, reason: str) -> bool:
        """Kill a worker that does not answer, so that it is restarted; False if it cannot be."""
        worker = self.supervised.get(name)
        if worker is None or not worker.can_restart:
            return False
        await worker.replace(reason)
        return True
