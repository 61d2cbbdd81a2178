"""What one command does: train a new run, resume a run, replay a run, evaluate once.

Owns the event loop, the signals and the closing summary; the work itself is in `run.py`.
"""

from __future__ import annotations

import asyncio
import signal
import tempfile
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from penstock import run_folder
from penstock.config import Config
from penstock.config.changes import Change, allowed_changes
from penstock.config.source import load_config
from penstock.errors import JournalDamaged, PenstockError, RunError, StopRequested, UserError
from penstock.evaluation.evaluate import EvalResult, evaluate, restore_summaries
from penstock.inspection.replay import check_run, make_fork, open_fork
from penstock.inspection.report import write_report
from penstock.inspection.summary import ReplayProgress, print_evaluations, print_summary
from penstock.job import open_evaluation, open_job
from penstock.journal import Journal
from penstock.recover import (
    begin,
    catch_up,
    check_journal,
    keep_trainer_alive,
    last_step_of_old_configs,
    recover,
    save_at_stop,
    with_way_out,
)
from penstock.run import Loop
from penstock.run_folder import RunFolder

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def train_new(config: Config) -> RunFolder:
    """Make the run folder and train to the end."""
    folder = run_folder.create(config)
    try:
        with folder.lock():
            asyncio.run(_train(config, folder, resumed=False))
    except UserError:
        if not run_folder.has_progress(folder.path):
            run_folder.remove(folder)
        raise
    return folder


def resume_run(folder: RunFolder, overrides: Sequence[str]) -> None:
    """Continue a run, with the setting changes that are allowed."""
    with folder.lock():
        _resume_locked(folder, overrides)


def _resume_locked(folder: RunFolder, overrides: Sequence[str]) -> None:
    if folder.origin() is not None:
        if overrides:
            raise UserError(
                f"resume of a fork: got {overrides[0]}, allowed: no changes; fork again"
            )
        asyncio.run(_train(folder.config(), folder, resumed=True))
        return
    config = load_config(folder.path / run_folder.CONFIG, overrides).config
    changes = allowed_changes(folder.config(), config)
    for note in [*(f"changed: {change}" for change in changes), *check_journal(folder)]:
        _tell(note)
    try:
        asyncio.run(_resume(config, folder, changes))
    except JournalDamaged as error:
        raise JournalDamaged(with_way_out(str(error), folder)) from error


def replay_run(
    folder: RunFolder, *, to_step: int | None, algorithm: str | None, overrides: Sequence[str]
) -> None:
    """Recompute a run and compare its digests, or fork it with another algorithm or settings."""
    if algorithm is not None or overrides:
        fork = make_fork(folder, algorithm, overrides, to_step)
        with fork.lock():
            asyncio.run(_train(fork.config(), fork, resumed=True))
        return
    with ReplayProgress(folder.name) as progress:
        steps = asyncio.run(check_run(folder, to_step, progress.step))
    print(f"{steps} steps recomputed: every digest is the journalled one")


async def _resume(config: Config, folder: RunFolder, changes: list[Change]) -> None:
    """Redo steps that were done under other settings with those settings; then continue."""
    journal = Journal.open(folder.journal)
    try:
        committed = journal.last_committed_step()
        needed = last_step_of_old_configs(folder)
        if any(change.in_update for change in changes):
            needed = committed
        if needed:
            await catch_up(folder, journal, min(needed, committed), _tell)
    finally:
        journal.close()
    await _train(config, folder, resumed=True)


def _tell(text: str) -> None:
    Console(stderr=True).print(text, highlight=False, soft_wrap=True)


async def _train(config: Config, folder: RunFolder, *, resumed: bool) -> None:
    started = time.monotonic()
    console = Console(stderr=True)
    for warning in config.warnings():
        console.print(f"[yellow]warning:[/yellow] {warning}", soft_wrap=True)
    console.print(f"run folder: [bold]{folder.path}[/bold]", highlight=False, soft_wrap=True)
    is_fork = folder.origin() is not None
    async with open_fork(folder) if is_fork else open_job(config, folder) as job:
        if config.launch.kind == "ray":
            job.tracker.note(job.workers.description)
        first_step = await recover(job) if resumed else await begin(job)
        keep_trainer_alive(job)
        if resumed:
            restore_summaries(folder.evaluations, first_step)
        if resumed and config != folder.config():
            folder.change_config(config, after_step=first_step)
        loop = Loop(job, first_step=first_step)
        stopped = await _until_stopped(loop.run())
        await job.trainer.request_stop()
        kept = await save_at_stop(job.checkpoints, job.trainer, job.journal)
        done = job.journal.last_committed_step()
    write_report([folder])
    if stopped:
        state = "checkpoint written" if kept else "the step under way will be repeated"
        raise StopRequested(
            f"stopped after step {done} of {job.total_steps}, {state}; "
            f"continue with: penstock resume {folder.path}"
        )
    print_summary(Console(), folder, seconds=time.monotonic() - started)


async def _until_stopped(work: Coroutine[Any, Any, object]) -> bool:
    """Run to the end or to the first Ctrl-C; return whether it was stopped."""
    task = asyncio.create_task(work, name="train")
    loop = asyncio.get_running_loop()
    for number in _STOP_SIGNALS:
        loop.add_signal_handler(number, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        return True
    except BaseExceptionGroup as group:
        raise _first_cause(group) from group
    finally:
        for number in _STOP_SIGNALS:
            loop.remove_signal_handler(number)
    return False


def _first_cause(group: BaseExceptionGroup) -> BaseException:
    """Return the error to show: the first PenstockError in the group, else the first error."""
    leaves = list(_leaves(group))
    ours = [leaf for leaf in leaves if isinstance(leaf, PenstockError)]
    return (ours or leaves)[0]


def _leaves(group: BaseExceptionGroup) -> list[BaseException]:
    found: list[BaseException] = []
    for error in group.exceptions:
        found.extend(_leaves(error) if isinstance(error, BaseExceptionGroup) else [error])
    return found


def evaluate_once(path: str | None, overrides: Sequence[str], out: Path | None) -> None:
    """Evaluate the model of a config, or the newest checkpoint of a run."""
    config = _evaluation_config(path, overrides)
    if not config.eval.tasks:
        raise UserError("eval.tasks: got none, allowed: at least one [eval.tasks.NAME]")
    from penstock import preflight

    preflight.check_for_evaluation(config)
    results = asyncio.run(_evaluate(config, out))
    print_evaluations(Console(), results)
    if any(result.failures for result in results):
        failed = sum(result.failures for result in results)
        raise RunError(f"{failed} of {sum(r.samples for r in results)} samples failed")


async def _evaluate(config: Config, out: Path | None) -> list[EvalResult]:
    with tempfile.TemporaryDirectory() as scratch:
        async with open_evaluation(config) as (engine, tasks):
            folder = out or Path(scratch)
            return [
                await evaluate(engine, task, step=0, version=0, folder=folder) for task in tasks
            ]


def _evaluation_config(path: str | None, overrides: Sequence[str]) -> Config:
    """Load the config of a config file, of a bare model folder, or of a run with its newest weights."""
    if path is None or Path(path).is_file():
        return load_config(path, overrides).config
    if (Path(path) / "config.json").is_file():
        return load_config(None, [f"model.path={path}", *overrides], bare=True).config
    folder = run_folder.find(path)
    from penstock.checkpoint import CheckpointStore

    newest = CheckpointStore(folder.checkpoints).newest()
    if newest is None:
        raise UserError(f"run {path}: got no valid checkpoint, allowed: a run that wrote one")
    model = [f"model.path={newest.path / 'model'}"]
    return load_config(folder.path / run_folder.CONFIG, [*model, *overrides]).config
