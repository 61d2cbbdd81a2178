"""The adapters that each engine holds: it gets those that its requests name, and the longest unused make room.

An engine that was started again holds none, and gets them with the next requests.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from penstock.engine.protocol import Generation, GenerationRequest
from penstock.errors import WorkerDied
from penstock.types import WeightHandle
from penstock.workers.pool.requests import Engine
from penstock.workers.supervise.supervised import Supervised, Worker


class Held:
    """The adapters of one worker, and how many requests use each; the longest unused is first."""

    def __init__(self, engine: Supervised) -> None:
        self.users: OrderedDict[str, int] = OrderedDict()
        self.worker: Worker | None = engine.worker
        self._engine, self._most = engine, 0
        self._loading, self._freed = asyncio.Lock(), asyncio.Event()

    def check(self) -> None:
        """Raise unless this worker still serves: its successor holds nothing of this."""
        if self._engine.worker is not self.worker:
            raise WorkerDied(f"{self._engine.name}: it was started again")

    async def _call(self, method: str, *values: Any) -> Any:
        self.check()
        return await self._engine.call(method, *values)

    async def hold(self, name: str, read: Callable[[str], WeightHandle]) -> None:
        """Make room for an adapter that is not held, and send it; waits for one that no request uses."""
        async with self._loading:
            if name in self.users:
                return
            if not self._most:
                self._most = (await self._call("stats")).most_adapters
            while len(self.users) >= self._most:
                idle = next((other for other, users in self.users.items() if not users), None)
                if idle is None:
                    self._freed.clear()
                    await self._freed.wait()
                    continue
                del self.users[idle]
                await self._call("drop_adapter", idle)
            await self._call("hold_adapter", name, await asyncio.to_thread(read, name))
            self.users[name] = 0

    @asynccontextmanager
    async def use(self, name: str, read: Callable[[str], WeightHandle]) -> AsyncIterator[None]:
        """Keep an adapter inside the context."""
        while name not in self.users:  # it may be dropped again before we run
            await self.hold(name, read)
        self.users[name] += 1
        self.users.move_to_end(name)
        try:
            yield
        finally:
            self.users[name] -= 1
            self._freed.set()


class Adapters:
    """What every engine holds. `read` yields an adapter by its name, with its content; called in a thread."""

    def __init__(self, read: Callable[[str], WeightHandle]) -> None:
        self._read = read
        self.held: dict[str, Held] = {}  # by engine

    async def generate(self, engine: Engine, requests: list[GenerationRequest]) -> list[Generation]:
        """Let an engine answer requests of one adapter, or of none."""
        worker = engine.supervised
        async with contextlib.AsyncExitStack() as using:
            if adapter := requests[0].adapter:
                held = self.held.get(engine.name)
                if held is None or held.worker is not worker.worker:
                    held = self.held[engine.name] = Held(worker)
                await using.enter_async_context(held.use(adapter, self._read))
                held.check()
            answers: list[Generation] = await worker.call("generate_many", requests)
            return answers
