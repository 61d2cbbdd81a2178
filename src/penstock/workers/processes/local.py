"""The launcher of this machine: one process for each trainer rank, one for each engine.

Processes, not threads: small models are bound by Python itself, and with one interpreter lock only one of
them would run at a time. Weights go through shared memory.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from penstock.config import Config
from penstock.files import weight_folder
from penstock.weights import sync_kind
from penstock.workers.part_factories import ENGINE, TRAINER, weights_of_here
from penstock.workers.pool.requests import Generate
from penstock.workers.processes.process_worker import (
    ProcessWorker,
    engine_imports,
    trainer_imports,
    trainer_names,
)
from penstock.workers.supervise.supervised import Supervised, SupervisionCallbacks, Worker
from penstock.workers.supervise.trainer import as_one_worker, port_of, reserve_port
from penstock.workers.workers import (
    Engines,
    Workers,
    all_or_first_error,
    start_engine_workers,
    start_workers,
)


async def start(
    config: Config, total_steps: int, log_folder: Path, events: SupervisionCallbacks
) -> Workers:
    """Start all workers at once; if one cannot start, stop the others and raise its error."""
    settings, kind = config.launch, sync_kind(config)
    folder = weight_folder()
    link = (kind, str(folder.path))
    trainer = Supervised(
        "trainer", spawn_trainer(config, total_steps, log_folder, link), settings, events
    )

    def make_engine(number: int) -> Supervised:
        spawn = _spawn_engine(config, log_folder, number)
        return Supervised(f"engine-{number}", spawn, settings, events)

    engines = [make_engine(number) for number in range(config.num_engines)]

    return await start_workers(
        config,
        total_steps,
        events,
        trainer,
        engines,
        make_engine=make_engine,
        clean_up=folder.remove,
    )


async def start_engines(
    config: Config, log_folder: Path, events: SupervisionCallbacks, generate: Generate
) -> Engines:
    """Start engines that hold adapters; this process publishes their weights."""
    settings, (publish, free) = config.launch, weights_of_here(config)
    engines = [
        Supervised(f"engine-{n}", _spawn_engine(config, log_folder, n, True), settings, events)
        for n in range(settings.num_producers)
    ]

    return await start_engine_workers(config, events, engines, publish, generate, clean_up=free)


def _spawn_engine(
    config: Config, log_folder: Path, number: int, adapters: bool = False
) -> Callable[[], Awaitable[Worker]]:
    async def spawn() -> Worker:
        return await ProcessWorker.start(
            f"engine-{number}",
            ENGINE,
            config,
            number,
            None,
            adapters,
            log_path=log_folder / f"engine-{number}.log",
            threads=config.of_engine(number).engine.threads,
            timeout_s=config.launch.start_timeout_s,
            imports=engine_imports(config, number),
        )

    return spawn


def spawn_trainer(
    config: Config, total_steps: int, log_folder: Path, link: tuple[str, str]
) -> Callable[[], Awaitable[Worker]]:
    """A function that starts every rank; `link` is the kind and folder of the weight sync."""
    names = trainer_names(config)

    async def spawn() -> Worker:
        with reserve_port("127.0.0.1") as reserved:
            meeting = ("127.0.0.1", port_of(reserved))
            ranks = await all_or_first_error(
                *(
                    ProcessWorker.start(
                        name,
                        TRAINER,
                        config,
                        total_steps,
                        *link,
                        rank,
                        meeting,
                        log_path=log_folder / f"{name}.log",
                        threads=config.train.threads,
                        timeout_s=config.launch.start_timeout_s,
                        imports=trainer_imports(config, rank),
                    )
                    for rank, name in enumerate(names)
                ),
                discard=ProcessWorker.close,
            )
        return as_one_worker(ranks, config.train.parallel)

    return spawn
