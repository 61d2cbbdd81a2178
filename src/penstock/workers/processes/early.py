"""Worker processes that are started before the settings of a run are checked, to import meanwhile.

A worker imports torch and transformers for seconds, and the driver checks data, makes the run folder and
opens the journal in others. `early_workers` (used by `run/entry.py`) starts the processes first; `ProcessWorker.start`
takes the one of its name. Whatever is not taken ends with the block.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.config import Config
from penstock.workers.processes.process_worker import EARLY, WorkerProcess

_MOST_ENGINES = 8  # more wait for the check of the memory that all of them need
_MODEL = ("transformers.modeling_utils", "transformers.models.auto.modeling_auto")


def trainer_imports(config: Config, rank: int) -> list[str]:
    """Return what the process of a trainer rank needs in every run (`worker_main.prepare`)."""
    adapters = ["peft"] if config.model.lora.rank else []
    return [*_context(config, rank), "penstock.training.consumer", *_MODEL, *adapters]


def engine_imports(config: Config, number: int) -> list[str]:
    """Return what the process of an engine needs in every run; nothing for engines that are not ours."""
    if config.of_engine(number).engine.name != "transformers":
        return []
    before = 0 if config.launch.colocate else config.launch.num_consumers
    return [*_context(config, before + number), "penstock.engine.transformers.engine", *_MODEL]


def _context(config: Config, index: int) -> list[str]:
    """Return the GPU to open as `models.loading.choose_device` will choose it."""
    device = config.model.device
    if device in ("auto", "cuda"):
        return [f"cuda:{index}"]
    return [device] if device.startswith("cuda:") else []


def trainer_names(config: Config) -> list[str]:
    world = config.launch.num_consumers
    return ["trainer"] if world == 1 else [f"trainer-{rank}" for rank in range(world)]


@contextmanager
def early_workers(config: Config) -> Iterator[None]:
    """Start the trainer's processes and those of the first engines of a local run; end what is not taken.

    Only workers that are started inside the block, also in its tasks and threads, take them.
    """
    early = dict[str, WorkerProcess]()
    token = EARLY.set(early)
    try:
        if config.launch.kind == "local":
            for name, threads, imports in _first_workers(config):
                early[name] = WorkerProcess.spawn(Path(os.devnull), threads, imports)
        yield
    finally:
        EARLY.reset(token)
        while early:
            early.popitem()[1].discard()


def _first_workers(config: Config) -> Iterator[tuple[str, int, list[str]]]:
    ranks = trainer_names(config)[:_MOST_ENGINES]
    for rank, name in enumerate(ranks):
        yield name, config.train.threads, trainer_imports(config, rank)
    for number in range(min(config.launch.num_producers, _MOST_ENGINES)):
        if imports := engine_imports(config, number):
            yield f"engine-{number}", config.of_engine(number).engine.threads, imports
