"""Worker processes that are started before the settings of a run are checked."""

from __future__ import annotations

import asyncio
import contextvars
import io
import os
import subprocess
from pathlib import Path

import pytest
from rich.console import Console

from penstock.config.source import load_config
from penstock.inspection.track.console import StartDisplay
from penstock.workers.processes.process_worker import (
    EARLY,
    ProcessWorker,
    WorkerProcess,
    early_workers,
    engine_imports,
    trainer_imports,
)
from stages.echo import ECHO


def config_with(*words: str) -> object:
    return load_config(None, list(words)).config


async def started(tmp_path: Path) -> tuple[int, str]:
    """Start an echo worker; return its pid and what it answers."""
    worker = await ProcessWorker.start(
        "echo", ECHO, "hello", log_path=tmp_path / "echo.log", threads=1, timeout_s=60
    )
    try:
        return worker.pid, await worker.call("greet", "you")
    finally:
        await worker.close()


@pytest.mark.parametrize(("dead", "threads"), [(False, 1), (True, 1), (False, 2)])
def test_a_worker_takes_its_early_process_if_that_is_alive_and_like_it(
    tmp_path: Path, dead: bool, threads: int
) -> None:
    early = WorkerProcess.spawn(Path(os.devnull), threads, ["colorsys", "no.such.module"])
    waiting = {"echo": early}
    context = contextvars.copy_context()
    context.run(EARLY.set, waiting)
    taken = not dead and threads == 1
    if dead:
        early.process.kill()
        early.process.wait()
    with StartDisplay("starting") as display:
        pid, said = context.run(asyncio.run, started(tmp_path))
    assert said == "hello you"
    assert (pid == early.process.pid) is taken
    assert not waiting
    assert early.process.poll() is not None
    assert (tmp_path / "echo.log").exists()  # an early process learns its log when it is taken
    (line,) = display.report()
    assert line.startswith("start of echo: starting Python ")
    assert ("importing torch and transformers" in line) is taken


def test_what_nobody_takes_ends_with_the_command(tmp_path: Path) -> None:
    made: dict[str, subprocess.Popen] = {}

    def command_that_fails() -> None:
        with early_workers(config_with("launch.num_producers=2")):
            made.update({name: one.process for name, one in EARLY.get().items()})
            raise KeyError("a check failed")

    with pytest.raises(KeyError):
        command_that_fails()
    assert sorted(made) == ["engine-0", "engine-1", "trainer"]
    assert all(process.poll() is not None for process in made.values())
    assert not EARLY.get({})


def test_two_runs_of_one_program_keep_their_processes_apart() -> None:
    config = config_with("engine.name=openai")
    with early_workers(config):
        (outer,) = EARLY.get().values()
        with early_workers(config):
            (inner,) = EARLY.get().values()
        assert inner.process.poll() is not None
        assert outer.process.poll() is None
    assert outer.process.poll() is not None


def test_only_our_own_processes_are_started_early() -> None:
    with early_workers(config_with("launch.kind=inline")):
        assert not EARLY.get()
    many = config_with("launch.num_producers=1000", "engine.name=vllm")
    with early_workers(many):
        assert list(EARLY.get()) == ["trainer"]


def test_the_gpu_that_is_opened_early_is_the_one_that_the_part_will_use() -> None:
    apart = config_with("launch.num_consumers=2", "launch.num_producers=2")
    assert trainer_imports(apart, 1)[0] == "cuda:1"
    assert engine_imports(apart, 1)[0] == "cuda:3"
    fixed = config_with("model.device=cuda:5")
    assert [trainer_imports(fixed, 0)[0], engine_imports(fixed, 0)[0]] == ["cuda:5", "cuda:5"]
    on_cpu = config_with("model.device=cpu")
    imports = [*trainer_imports(on_cpu, 0), *engine_imports(on_cpu, 0)]
    assert not any(name.startswith("cuda") for name in imports)


def test_the_display_says_what_each_worker_does(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Console(file=io.StringIO(), width=120, force_terminal=True)
    monkeypatch.setattr("penstock.files.console", lambda stderr: made)
    with StartDisplay("reading the data") as display:
        for number in range(4):
            StartDisplay.worker_stage(f"engine-{number}", "loading the model", 10.0 + number)
        StartDisplay.worker_stage("trainer", "checking the model", 10.0)
        StartDisplay.worker_stage("trainer", "ready", 12.5)
        display._progress.refresh()
        StartDisplay.worker_stage("engine-0", "capturing CUDA graphs", 11.0)
        display._progress.refresh()
    shown = made.file.getvalue()  # type: ignore[attr-defined]
    assert "engine-0, engine-1 and 2 more: loading the model" in shown
    assert "engine-0: capturing CUDA graphs; engine-1, engine-2 and 1 more: loading" in shown
    lines = display.report()
    assert lines[-1].startswith("start of trainer: checking the model 2.50 s; 2.50 s in all since ")
