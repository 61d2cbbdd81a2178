"""A process that has imported everything and forks a child per command, which may be killed inside.

`serve` reads one JSON request per line and answers with one JSON line; `CrashServer` starts it.
A request names the arguments of `penstock`, a log file for its output, and faults: at the n-th passing
of a point the driver sends a signal to itself (SIGKILL) or to a worker (SIGSTOP engine-0), the call
there raises an OSError from then on, or a shell command is run (sh rm FILE). The child counts how often it passes each point. The child is the driver; points in its
workers are not seen.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import gc
import inspect
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import typer.main

import penstock.engine.transformers.engine as engine
import penstock.training.snapshot as snapshot
from penstock.cli import main
from penstock.inspection.track.logs import JsonlTracker, LineFile
from penstock.rollout.producer import Producer
from penstock.store.checkpoint import CheckpointStore
from penstock.store.journal import records, writer
from penstock.weights.in_process import InProcessSync
from penstock.workers.part_factories import TrainerService
from penstock.workers.pool.pool import EnginePool
from penstock.workers.processes import process_worker
from penstock.workers.supervise.supervised import Supervised
from penstock.workers.supervise.trainer import RestartingTrainer, TrainerClient
from stages import quick_transformers
from stages.nursery import Nursery, renew_thread_pool
from stages.tiny_run import TINY
from stages.warm_workers import install

POINTS: dict[str, list[tuple[Any, str]]] = {
    "journal record": [
        (writer, "write_in_order"),
        (records.StepBegun, "write"),
        (records.StepCommitted, "write"),
        (records.WeightsSeen, "write"),
    ],
    "journal commit": [(writer.Writer, "_commit")],
    "worker start": [(process_worker.ProcessWorker, "start")],
    "worker return": [(Supervised, "_tell_of_return")],
    "step": [(TrainerClient, "train"), (RestartingTrainer, "train")],
    "take": [(Producer, "take_batch")],
    "publish": [(InProcessSync, "publish"), (RestartingTrainer, "publish")],
    "engine update": [
        (engine.TransformersEngine, "update_weights"),
        (EnginePool, "update_weights"),
    ],
    "snapshot": [(TrainerService, "snapshot"), (RestartingTrainer, "snapshot")],
    "snapshot write": [
        (snapshot, "_save_model"),
        (torch, "save"),
        (RestartingTrainer, "write_snapshot"),
    ],
    "seal": [(CheckpointStore, "_seal")],
    "sync to disk": [(os, "fsync")],
    "rename": [(Path, "rename")],
    "removal": [(shutil, "rmtree")],
    "metrics line": [(JsonlTracker, "log_step")],
    "line write": [(LineFile, "_write")],
}


class Points:
    """Counts the points that are passed; sends a signal, or raises, at chosen ones."""

    def __init__(self, faults: list[tuple[str, int, str]]) -> None:
        self.passed: Counter[str] = Counter()
        self._faults = faults

    def reach(self, point: str) -> None:
        self.passed[point] += 1
        for chosen, number, fault in self._faults:
            if point != chosen or self.passed[point] < number:
                continue
            if fault.startswith("sh "):
                if self.passed[point] == number:
                    subprocess.run(["sh", "-c", fault.removeprefix("sh ")], check=True)
                continue
            if not fault.startswith("SIG"):
                code = getattr(errno, fault)
                raise OSError(code, os.strerror(code))
            if self.passed[point] == number:
                sign, *worker = fault.split()
                for pid in pids_of(worker[0]) if worker else [os.getpid()]:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, getattr(signal, sign))

    def install(self) -> None:
        for name, places in POINTS.items():
            for owner, attribute in places:
                setattr(owner, attribute, self._wrap(name, getattr(owner, attribute)))

    def _wrap(self, name: str, function: Any) -> Any:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.reach(f"before {name}")
            result = function(*args, **kwargs)
            self.reach(f"after {name}")
            return result

        @functools.wraps(function)
        async def async_call(*args: Any, **kwargs: Any) -> Any:
            self.reach(f"before {name}")
            result = await function(*args, **kwargs)
            self.reach(f"after {name}")
            return result

        return async_call if inspect.iscoroutinefunction(function) else call


SUPERVISED: dict[str, Supervised] = {}  # the workers of this driver by name


def pids_of(name: str) -> list[int]:
    """Return the processes of a worker, all ranks of a trainer; none while it is being restarted."""
    worker: Any = SUPERVISED[name].worker if name in SUPERVISED else None
    return [one.pid for one in getattr(worker, "_ranks", [worker]) if one is not None]


def know_workers() -> None:
    start = Supervised.start

    async def started(supervised: Supervised) -> None:
        SUPERVISED[supervised.name] = supervised
        await start(supervised)

    Supervised.start = started  # type: ignore[method-assign]


def write_down_folders(record: Path) -> None:
    """Write the name of every temporary folder that this driver makes to `record`."""
    make = os.mkdir

    def mkdir(path: Any, *args: Any, **kwargs: Any) -> None:
        make(path, *args, **kwargs)
        if os.path.basename(path).startswith("penstock-"):
            with record.open("a") as file:
                file.write(f"{path}\n")

    os.mkdir = mkdir


def run_child(request: dict[str, Any], nursery: Nursery) -> int:
    """Run the command in the child with the points installed; return the exit code."""
    os.chdir(request["directory"])
    install(nursery.path)
    write_down_folders(Path(request["folders"]))
    log = os.open(request["log"], os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    know_workers()
    points = Points(request["faults"])
    points.install()
    sys.argv = ["penstock", *request["arguments"]]
    try:
        main()
    except SystemExit as end:
        return int(end.code or 0)
    finally:
        sys.stdout.flush()
        if "counts" in request:
            Path(request["counts"]).write_text(json.dumps(points.passed))
    return 0


def warm_up(folder: str) -> None:
    """Do one small run, so that no child has to load what is loaded at first use."""
    sys.argv = ["penstock", "train", *TINY, f"run.dir={folder}", "train.steps=1"]
    with open(os.devnull, "w") as nowhere, contextlib.suppress(SystemExit):
        with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            main()


def serve() -> None:
    torch.set_num_threads(1)
    quick_transformers.install()
    typer.main.get_command = functools.cache(typer.main.get_command)  # made by the warm-up
    with tempfile.TemporaryDirectory() as folder:
        warm_up(folder)
        gc.enable()
        gc.collect()
        gc.freeze()  # no collection in a child walks through the modules
        gc.get_freeze_count = lambda: (
            1
        )  # a run asks whether there are any; counting them takes 50 ms
        nursery = Nursery(Path(folder) / "nursery")
        print(nursery.path, flush=True)
        answer_requests(nursery)


def answer_requests(nursery: Nursery) -> None:
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            code = 70
            try:
                renew_thread_pool()
                code = run_child(json.loads(line), nursery)
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        _, status = os.waitpid(child, 0)
        print(json.dumps(os.waitstatus_to_exitcode(status)), flush=True)
