"""One engine of the pool: its states, and the handle through which one user borrows it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum

from penstock.engine.protocol import EngineStats, Generation, GenerationRequest
from penstock.errors import EngineError, WorkerDied
from penstock.types import WeightHandle
from penstock.workers.supervise.supervised import Supervised


class EngineState(StrEnum):
    """The state of one engine; `EnginePool` documents the moves."""

    STARTING = "starting"
    SERVING = "serving"
    ASIDE = "set aside"
    DEAD = "dead"
    RETIRED = "retired"


WORKING = (EngineState.SERVING, EngineState.ASIDE)  # states of an engine with a worker
ENDED = (EngineState.DEAD, EngineState.RETIRED)
MOVES = {
    EngineState.STARTING: {EngineState.SERVING, *ENDED},
    EngineState.SERVING: {EngineState.STARTING, EngineState.ASIDE, *ENDED},
    EngineState.ASIDE: {EngineState.STARTING, EngineState.SERVING, *ENDED},
    EngineState.DEAD: set(),
    EngineState.RETIRED: set(),
}


@dataclass(slots=True, eq=False)
class Engine:
    """One engine: its supervised worker and what the pool knows of it."""

    supervised: Supervised
    index: int
    state: EngineState = EngineState.SERVING
    reason: str = ""  # why it is dead
    loaded: tuple[int, str] | None = None  # version and digest that its worker confirmed
    loading: WeightHandle | None = None  # what its worker was asked to load and has not confirmed
    slots: int = 0  # requests that it runs at once, from its last stats; 0: unknown
    tokens: int = 0  # tokens that the current worker generated, from its last stats
    earlier_tokens: int = 0  # tokens that its dead workers generated

    @property
    def name(self) -> str:
        return self.supervised.name


class LentEngine:
    """One engine that was set aside; its death is an EngineError to its user."""

    def __init__(
        self,
        engine: Engine,
        generate: Callable[
            [Engine, list[GenerationRequest]], Awaitable[tuple[list[Generation], bool]]
        ],
        abort: Callable[[Engine, list[str]], Awaitable[None]],
        stats: Callable[[Engine], Awaitable[EngineStats]],
    ) -> None:
        """generate: returns answers and whether the engine died. stats: raises WorkerDied then."""
        self._engine, self._generate, self._abort, self._stats = engine, generate, abort, stats

    async def generate_many(self, requests: list[GenerationRequest]) -> list[Generation]:
        made, died = await self._generate(self._engine, requests)
        if died:
            raise EngineError(f"{self._engine.name}: it died with {len(requests)} requests")
        return made

    async def abort(self, request_id: str) -> None:
        await self._abort(self._engine, [request_id])

    async def stats(self) -> EngineStats:
        """Wait for a worker that is being restarted, then ask it."""
        try:
            if self._engine.supervised.worker is None:
                await self._engine.supervised.ready()
            return await self._stats(self._engine)
        except WorkerDied as error:
            raise EngineError(str(error)) from error
