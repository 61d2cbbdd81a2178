"""Everything in this process: the trainer on one thread, the engine on another.

For debuggers, notebooks and tests. Python threads share one interpreter lock, so generation and training
overlap less than with `local`. A thread cannot be killed: an engine that dies of an error is started
again, a part that hangs is not.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from penstock.config import Config
from penstock.config.plugins import load
from penstock.engine import ENGINES
from penstock.waits import Waits
from penstock.workers.assemble import assemble
from penstock.workers.part_factories import TrainerService
from penstock.workers.rpc_server import RpcServer, append_to_log
from penstock.workers.supervise.activity import activity_of
from penstock.workers.supervise.supervised import Supervised, SupervisionCallbacks
from penstock.workers.workers import Workers


class ThreadWorker:
    """See `Worker`: a part of this process, its blocking methods on a thread of their own."""

    can_be_killed = False
    place = "a thread of this process"

    def __init__(self, name: str) -> None:
        self.name = name
        self._server = RpcServer(name)
        self._closed = asyncio.Event()

    @classmethod
    async def start(cls, name: str, make: Callable[[], Any]) -> ThreadWorker:
        """Start a worker that serves the part that `make` returns."""
        worker = cls(name)
        await worker._server.build(make)
        return worker

    async def call(self, method: str, *args: Any) -> Any:
        return await self._server.call(method, args)

    async def ended(self) -> str:
        await self._closed.wait()
        return f"{self.name}: it was closed"

    async def stack(self) -> str:
        return ""

    async def activity(self) -> float | None:
        return await asyncio.to_thread(activity_of, os.getpid())

    async def kill(self) -> None:
        """Give up a part that has died inside: its thread has ended, or ends when it is closed."""
        self._closed.set()

    async def close(self) -> None:
        self._closed.set()
        await self._server.close()


async def start(config: Config, total_steps: int, log_folder: Path) -> Workers:
    """Build trainer and engine in this process."""
    from penstock.weights.in_process import InProcessSync

    sync, config = InProcessSync(), config.of_engine(0)
    engine_class = load("engine.name", config.engine.name, ENGINES)
    callbacks = SupervisionCallbacks(waits=Waits(), log=partial(append_to_log, log_folder))

    async def spawn_trainer() -> ThreadWorker:
        return await ThreadWorker.start(
            "trainer", lambda: TrainerService(config, total_steps, sync)
        )

    async def spawn_engine() -> ThreadWorker:
        return await ThreadWorker.start(
            "engine-0", lambda: engine_class.from_config(config, fetch=sync.fetch, index=0)
        )

    trainer = Supervised("trainer", spawn_trainer, config.launch, callbacks)
    engine = Supervised("engine-0", spawn_engine, config.launch, callbacks)

    async def clean_up() -> None:
        sync.close()

    try:
        await trainer.start()  # engine after trainer, because concurrent imports race
        await engine.start()
    except BaseException:
        await trainer.close()
        await clean_up()
        raise
    return assemble(
        "inline", trainer, [engine], clean_up, callbacks, "in_process", settings=config.engine
    )
