"""A trainer with nothing that generates, for steps that a journal already has. Layer 5.

As many ranks as the run had, because the order of sums is part of the digest: one on a thread of this
process, several in worker processes of this machine, wherever the run had them. A rank that dies
ends the work; nothing is restarted here.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import cast

from penstock.config import Config
from penstock.edges import Edges
from penstock.launch.services import InThread, TrainerPart, TrainerService
from penstock.launch.supervise import Supervised, Surroundings
from penstock.launch.trainer import RestartingTrainer

_NOTHING_IS_PUBLISHED = ("shared_memory", "")


def trainer_alone(
    config: Config, total_steps: int, log_folder: Path
) -> AbstractAsyncContextManager[TrainerPart]:
    """The trainer of `config`; the logs of its ranks go to `log_folder`."""
    if config.launch.num_consumers == 1:
        return _in_this_process(config, total_steps)
    return _in_workers(config, total_steps, log_folder)


@asynccontextmanager
async def _in_this_process(config: Config, total_steps: int) -> AsyncIterator[TrainerPart]:
    from penstock.sync.in_process import InProcessSync

    service = await asyncio.to_thread(TrainerService, config, total_steps, InProcessSync())
    trainer = InThread(service)
    try:
        yield cast(TrainerPart, trainer)
    finally:
        service.request_stop()
        await trainer.close()


@asynccontextmanager
async def _in_workers(
    config: Config, total_steps: int, log_folder: Path
) -> AsyncIterator[TrainerPart]:
    from penstock.launch.local import spawn_trainer

    spawn = spawn_trainer(config, total_steps, log_folder, _NOTHING_IS_PUBLISHED)
    around = Surroundings(edges=Edges())
    ranks = Supervised("trainer", spawn, config.launch, around)
    await ranks.start()
    try:
        yield RestartingTrainer(ranks, around.edges)
    finally:
        await ranks.close()
