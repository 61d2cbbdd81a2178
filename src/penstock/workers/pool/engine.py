"""One engine of the pool: its states, and the handle through which one user borrows it."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum

from penstock.engine.protocol import EngineStats, Generation, GenerationRequest
from penstock.errors import EngineError, PartFailed, RunError, WorkerDied
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


# Judges the answer of an engine, or its error: returns what its requests get, and whether it died.
Judge = Callable[
    [Engine, list[GenerationRequest], list[Generation] | RunError],
    Awaitable[tuple[list[Generation], bool]],
]


async def abort_on(engine: Engine, request_ids: list[str]) -> None:
    for request_id in request_ids:
        with contextlib.suppress(RunError):  # a failed abort costs tokens and no more
            await engine.supervised.call("abort", request_id)


class LentEngine:
    """One engine that was set aside; its death is an EngineError to its user."""

    def __init__(
        self,
        engine: Engine,
        judge: Judge,
        stats: Callable[[Engine], Awaitable[EngineStats]],
    ) -> None:
        """stats: raises WorkerDied if the engine has died."""
        self._engine, self._judge, self._stats = engine, judge, stats

    async def generate_many(self, requests: list[GenerationRequest]) -> list[Generation]:
        try:
            answer = await self._engine.supervised.call("generate_many", requests)
        except (WorkerDied, PartFailed, EngineError) as error:
            answer = error
        generations, died = await self._judge(self._engine, requests, answer)
        if died:
            raise EngineError(f"{self._engine.name}: it died with {len(requests)} requests")
        return generations

    async def abort(self, request_id: str) -> None:
        await abort_on(self._engine, [request_id])

    async def stats(self) -> EngineStats:
        """Wait for a worker that is being restarted, then ask it."""
        try:
            if self._engine.supervised.worker is None:
                await self._engine.supervised.ready()
            return await self._stats(self._engine)
        except WorkerDied as error:
            raise EngineError(str(error)) from error
