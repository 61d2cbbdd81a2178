"""A trainer with nothing that generates, for steps that a journal already has.

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
from penstock.launch.part_factories import InThread, TrainerPart, TrainerService
from penstock.supervise.supervised import Supervised, SupervisionCallbacks
from penstock.supervise.trainer import RestartingTrainer
from penstock.watch.waits import Waits

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
    from penstock.weights.in_process import InProcessSync

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
    from penstock.launch.processes.local import spawn_trainer

    spawn = spawn_trainer(config, total_steps, log_folder, _NOTHING_IS_PUBLISHED)
    callbacks = SupervisionCallbacks(waits=Waits())
    ranks = Supervised("trainer", spawn, config.launch, callbacks)
    await ranks.start()
    try:
        yield RestartingTrainer(ranks, callbacks.waits)
    finally:
        await ranks.close()
