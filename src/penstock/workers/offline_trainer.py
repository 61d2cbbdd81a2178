"""A trainer without engines, for steps that a journal already has.

Runs as many ranks as the run had, because the order of sums is part of the digest: one rank on a
thread of this process, several in worker processes of this machine, even if the run had them on a
cluster. The end of a rank is final unless somebody says how to restore it
(`RestartingTrainer.restart_with`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from penstock.config import Config
from penstock.workers.inline import ThreadWorker
from penstock.workers.part_factories import TrainerService
from penstock.workers.processes.local import spawn_trainer
from penstock.workers.supervise.supervised import Supervised, SupervisionCallbacks
from penstock.workers.supervise.trainer import RestartingTrainer
from penstock.workers.workers import Workers

_NOTHING_IS_PUBLISHED = ("shared_memory", "")


@asynccontextmanager
async def offline_trainer(
    config: Config, total_steps: int, log_folder: Path, events: SupervisionCallbacks
) -> AsyncIterator[Workers]:
    """Yield the trainer of `config` without an engine; the logs of its ranks go to `log_folder`."""

    async def spawn_thread() -> ThreadWorker:
        from penstock.weights.in_process import InProcessSync

        return await ThreadWorker.start(
            "trainer", lambda: TrainerService(config, total_steps, InProcessSync())
        )

    spawn_processes = spawn_trainer(config, total_steps, log_folder, _NOTHING_IS_PUBLISHED)
    spawn = spawn_thread if config.launch.num_consumers == 1 else spawn_processes
    supervised = Supervised("trainer", spawn, config.launch, events)
    await supervised.start()
    workers = Workers(
        engine=None,
        trainer=RestartingTrainer(supervised, replaced=events.replaced),
        close=supervised.close,
        description="offline: the trainer alone",
        events=events,
        supervised={"trainer": supervised},
    )
    try:
        yield workers
    finally:
        await workers.close()  # sends no request: a rank that hangs would not answer
