"""This machine: one process for the trainer, one for each engine. Layer 5.

Processes, not threads: small models are bound by Python itself, and one interpreter lock would let
only one side run at a time. Weights go through shared memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, cast

from penstock.config import Config
from penstock.engine.protocol import InferenceEngine
from penstock.launch.remote import Remote
from penstock.launch.services import TrainerPart, Workers
from penstock.sync.shared_memory import make_folder


async def start(config: Config, total_steps: int, log_folder: Path) -> Workers:
    """Start the workers together; if one cannot start, the others are stopped and its error rises."""
    folder = make_folder()
    started: list[Remote] = []

    async def launch(name: str, factory: str, threads: int, *args: object) -> Remote:
        remote = await Remote.start(
            name,
            f"penstock.launch.services:{factory}",
            *args,
            log_path=log_folder / f"{name}.log",
            threads=threads,
            timeout_s=config.launch.start_timeout_s,
        )
        started.append(remote)
        return remote

    async def close() -> None:
        await asyncio.gather(*(remote.close() for remote in started))
        shutil.rmtree(folder, ignore_errors=True)

    try:
        trainer, *engines = await _all_or_first_error(
            launch(
                "trainer",
                "shared_memory_trainer",
                config.train.threads,
                config,
                total_steps,
                str(folder),
            ),
            *(
                launch(
                    f"engine-{index}",
                    "shared_memory_engine",
                    config.engine.threads,
                    config,
                    str(folder),
                    index,
                )
                for index in range(config.launch.num_producers)
            ),
        )
    except BaseException:
        await close()
        raise
    places = ", ".join(f"{remote._name} pid {remote.pid}" for remote in (trainer, *engines))
    return Workers(
        engine=_join(engines),
        trainer=cast(TrainerPart, trainer),
        close=close,
        description=f"local: {places}",
    )


async def _all_or_first_error(*starting: Coroutine[Any, Any, Remote]) -> list[Remote]:
    tasks = [asyncio.create_task(work) for work in starting]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        with contextlib.suppress(BaseException):
            await asyncio.gather(*tasks, return_exceptions=True)
        raise


def _join(engines: list[Remote]) -> InferenceEngine:
    if len(engines) == 1:
        return cast(InferenceEngine, engines[0])
    from penstock.engine.pool import EnginePool

    return EnginePool([cast(InferenceEngine, engine) for engine in engines])
