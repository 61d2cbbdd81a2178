"""Everything in this process: the trainer on a thread, the engine on its own.

For debuggers, notebooks and tests. Python threads share one interpreter lock, so generation and
training overlap less than with `local`.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

from penstock.config import Config
from penstock.engine import ENGINES
from penstock.engine.protocol import InferenceEngine
from penstock.launch.part_factories import InThread, TrainerPart, TrainerService, Workers
from penstock.plugins import load
from penstock.supervise.supervised import SupervisionCallbacks, Watched
from penstock.watch.waits import Waits


async def start(config: Config, total_steps: int, log_folder: Path) -> Workers:
    """Build trainer and engine here. `log_folder` is not needed: errors rise in this process."""
    from penstock.weights.in_process import InProcessSync

    sync = InProcessSync()
    service = await asyncio.to_thread(TrainerService, config, total_steps, sync)
    trainer = InThread(service)
    engine_class = load("engine.name", config.engine.name, ENGINES)
    engine = engine_class.from_config(config, fetch=sync.fetch, index=0)
    await engine.start()

    async def close() -> None:
        service.request_stop()
        await engine.close()
        await trainer.close()
        sync.close()

    callbacks = SupervisionCallbacks(waits=Waits())
    return Workers(
        engine=cast(InferenceEngine, watched("engine-0", engine, callbacks.waits)),
        trainer=cast(TrainerPart, watched("trainer", trainer, callbacks.waits)),
        callbacks=callbacks,
        close=close,
        description="inline: engine and trainer are threads of this process",
    )


def watched(name: str, part: Any, waits: Waits) -> Watched:
    """A part of this process whose calls are waits, as those of a worker are."""

    async def call(method: str, *args: Any, **kwargs: Any) -> Any:
        return await getattr(part, method)(*args, **kwargs)

    return Watched(name, waits, call)
