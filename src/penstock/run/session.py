"""What one command does: train a new run, resume a run, replay a run, evaluate once.

Owns the event loop, the signals and the closing summary; the work itself is in `run/loop.py`.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

from rich.text import Text

from penstock import reward
from penstock.config import Config
from penstock.config.changes import Change
from penstock.config.doubts import doubts
from penstock.config.plugins import PYTHON, model_folder
from penstock.config.source import with_overrides
from penstock.data.identity import absolute_paths, check_copy, check_files, differences
from penstock.errors import JournalDamaged, PenstockError, RunError, StopRequested, UserError
from penstock.files import ScratchFolder, console, pasted, progress_bar, say
from penstock.inspection.export import choose_checkpoint
from penstock.inspection.report import write_report
from penstock.inspection.summary import print_evaluations, print_summary
from penstock.inspection.track.console import StartDisplay
from penstock.inspection.track.logs import NoteLog, Notes
from penstock.rollout.evaluation.evaluate import EvalResult, evaluate, restore_summaries
from penstock.run.job import Job, open_evaluation, open_job
from penstock.run.loop import Loop
from penstock.run.recover import (
    begin,
    catch_up,
    check_journal,
    keep_trainer_alive,
    recover,
    save_at_stop,
    with_way_out,
)
from penstock.run.replay import check_run, make_fork, open_fork
from penstock.run.run_data import in_thread
from penstock.store import run_folder, trust
from penstock.store.checkpoint import MANIFEST
from penstock.store.run_folder import RunFolder
from penstock.training.algo.doubts import algorithm_doubts
from penstock.types import StepReport

T = TypeVar("T")
_SWITCH_INTERVAL_S = 0.0005
_STOPPED_EARLY = "stopped during the start; nothing was trained"


def train_new(config: Config, own_data: Sequence[Path] = ()) -> RunFolder:
    """Make the run folder and train to the end; the run keeps the files `own_data` in its folder."""
    folder = run_folder.create(absolute_paths(config), own_data=own_data)
    config = folder.config()
    try:
        with folder.lock():
            asyncio.run(_train(config, folder, resumed=False))
    except (UserError, StopRequested):
        _remove_if_unused(folder)
        raise
    except KeyboardInterrupt:
        _remove_if_unused(folder)
        raise StopRequested(
            f"stopped; {_way_on(folder, config)}" if folder.path.exists() else _STOPPED_EARLY
        ) from None
    return folder


def _remove_if_unused(folder: RunFolder) -> None:
    if not run_folder.has_progress(folder.path):
        run_folder.remove(folder)


def resume_run(
    folder: RunFolder, config: Config, changes: list[Change], *, accept_changes: bool = False
) -> None:
    """Continue a run that is locked and trusted with these settings (see `entry.resume`)."""
    try:
        if folder.origin() is None:
            notes = check_journal(folder)
            run_folder.check_disk(folder.path, config)
            notes += check_copy(folder, config)
            for task in (*config.tasks.values(), *config.eval.tasks.values()):
                reward.check(task.rewards)
            check_files(folder, config, accept_changes)
            trust.remember(folder.path, config)  # the user gave the overrides
            for note in [*(f"changed: {change}" for change in changes), *notes]:
                _tell(note)

            async def redo_and_continue() -> None:
                await catch_up(folder, config, changes, _tell)
                await _train(config, folder, resumed=True, accept=accept_changes)

            try:
                asyncio.run(redo_and_continue())
            except JournalDamaged as error:
                raise JournalDamaged(with_way_out(str(error), folder)) from error
        else:
            for note in check_copy(folder, config):
                _tell(note)
            asyncio.run(_train(config, folder, resumed=True))
    except KeyboardInterrupt:
        raise StopRequested(
            "stopped before the first new step; nothing is lost; "
            f"{_way_on(folder, folder.config())}"
        ) from None


def _way_on(folder: RunFolder, config: Config) -> str:
    rewards = (reward.type for task in config.tasks.values() for reward in task.rewards)
    if any(name.startswith(PYTHON) for name in rewards):
        return f'continue with: penstock.resume("{folder.path}", reward=...)'
    return f"continue with: penstock resume {pasted(folder.path)}"


def replay_run(
    folder: RunFolder,
    *,
    to_step: int | None,
    algorithm: str | None,
    overrides: Sequence[str],
    trusted: bool = False,
) -> None:
    """Recompute a run and compare its digests, or fork it with another algorithm or settings."""
    trust.check(folder.path, [era.config for era in folder.eras()], trust=trusted)
    for note in differences(folder):
        _tell(note)
    if algorithm is not None or overrides:
        fork = make_fork(folder, algorithm, overrides, to_step)
        with fork.lock():
            asyncio.run(_train(fork.config(), fork, resumed=True))
        return
    with progress_bar(f"replaying {folder.name}", console(stderr=True)) as show:

        def tell_equal(report: StepReport, total: int) -> None:
            show(report.step, total)
            say(f"step {report.step}/{total}  {report.digest}  equal")

        said = asyncio.run(check_run(folder, to_step, tell_equal))
    say(said)


def _tell(text: str | Text) -> None:
    StartDisplay.console().print(text, highlight=False, soft_wrap=True)


async def _train(config: Config, folder: RunFolder, *, resumed: bool, accept: bool = False) -> None:
    """Train to the end; the line that ends the run before is also in its logs/run.log."""
    try:
        await _train_to_the_end(config, folder, resumed, accept)
    except (PenstockError, OSError) as error:
        kind = "" if isinstance(error, StopRequested) else "error: "
        NoteLog(folder.logs / "run.log").note(f"{kind}{' '.join(str(error).split())}")
        if kind and not isinstance(error, UserError):
            with suppress(OSError):  # the folder itself may be what is gone
                text = traceback.format_exc().encode("utf-8", "backslashreplace")
                (folder.logs / "traceback.txt").write_bytes(text)
        raise


async def _train_to_the_end(config: Config, folder: RunFolder, resumed: bool, accept: bool) -> None:
    for warning in [*doubts(config), *algorithm_doubts(config)]:
        _tell(Text.assemble(("warning: ", "yellow"), warning))
    _tell(Text.assemble("run folder: ", (str(folder.path), "bold")))
    is_fork = folder.origin() is not None
    # models may take minutes to load
    launch, model = config.launch, config.model
    ranks = "trainer" if launch.num_consumers == 1 else f"{launch.num_consumers} trainer ranks"
    engines = "engine" if config.num_engines == 1 else f"{config.num_engines} engines"
    generates = config.num_engines and not is_fork
    parts = f"{engines} ({config.engine.name}) and {ranks}" if generates else ranks
    _tell(f"starting: {parts}, model {model.path}, device {model.device}; reading the data")
    notes = Notes(_tell)
    with StopSignals(_way_on(folder, config), notes.add) as signals:
        async with AsyncExitStack() as closing:
            opening = open_fork(folder, notes) if is_fork else open_job(config, folder, notes)
            job = await signals.run(closing.enter_async_context(opening), "closing the workers")
            if job is None:
                raise StopRequested(_STOPPED_EARLY)
            await closing.enter_async_context(job.watched())
            closing.enter_context(tuned_interpreter())
            if config.launch.kind == "ray":
                job.tracker.note(job.workers.description)
            last = "saving a checkpoint; press Ctrl-C again to stop without it"
            finished = await signals.run(_recover_and_train(job, resumed, accept), last)
            await job.trainer.request_stop()
            saving = save_at_stop(job.checkpoints, job.trainer, job.journal)
            words = "stopping without a checkpoint, unless it is written already"
            saved = await signals.run(saving, words, allowed=signals.count)
            if saved is None:
                job.checkpoints.abandon()
            done = job.journal.last_committed_step()
    try:
        write_report([folder])
    except OSError as error:  # the journal is whole: `penstock report` can write it later
        _tell(f"report not written: {error}")
    if finished is None or saved is None:  # stopped in training, or before the last checkpoint
        state = "checkpoint written" if saved else "no checkpoint written"
        raise StopRequested(
            f"stopped after step {done} of {job.total_steps}, {state}; {signals.way_on}"
        )
    print_summary(console(), folder)


@contextmanager
def tuned_interpreter() -> Iterator[None]:
    """Collect cyclic garbage less often, and let threads wait less for the interpreter lock.

    Thousands of rollouts a second trigger collections, which took a third of the driver's time; the
    objects of before the first step stay out of them. What the program around a run froze stays
    frozen: its objects are then out of them already. A busy event loop keeps the lock for a whole
    switch interval, and a step waits for the journal's thread, whose work takes a tenth of the default.
    """
    threshold, interval_s = gc.get_threshold(), sys.getswitchinterval()
    freezes = not gc.get_freeze_count()
    gc.collect()
    if freezes:
        gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    try:
        yield
    finally:
        sys.setswitchinterval(interval_s)
        gc.set_threshold(*threshold)
        if freezes:
            gc.unfreeze()


async def _recover_and_train(job: Job, resumed: bool, accept: bool) -> bool:
    """Bring the trainer to its last step, then train to the end."""
    keep_trainer_alive(job)
    first_step = await recover(job, accept_changes=accept) if resumed else await begin(job)
    log = NoteLog(job.folder.logs / "run.log")
    for line in job.start_report:
        log.note(line)
    if resumed:
        restore_summaries(job.folder.evaluations, first_step)
    try:
        await Loop(job, first_step=first_step).run()
    except BaseExceptionGroup as group:
        job.journal.check_place()  # a folder that is gone may show first as another fault
        # the error to show: the first PenstockError in the group, else the first error
        cause: BaseException = group.subgroup(PenstockError) or group
        while isinstance(cause, BaseExceptionGroup):
            cause = cause.exceptions[0]
        raise cause from group
    return True


def outside_a_loop(work: Callable[[], T], *, saves: bool = False) -> T:
    """Call `work` here; or, if this thread runs an event loop (a notebook), in a thread of its own.

    `saves`: Ctrl-C stops the work with a checkpoint; other work is left behind to end by itself.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return work()
    if saves:
        StopSignals.forget()
    if not saves or threading.current_thread() is not threading.main_thread():
        return in_thread(work, "penstock").result()
    before = signal.signal(signal.SIGINT, lambda number, frame: StopSignals.interrupt())
    try:
        return in_thread(work, "penstock").result()
    finally:
        signal.signal(signal.SIGINT, before)


class StopSignals:
    """Ctrl-C, SIGTERM and SIGHUP: the first stops and saves, the second stops without saving, the third kills.

    A signal cancels the work that `run` runs; what closes the parts of a run is never cancelled.
    Only the main thread gets signals; a run in another thread is told by `interrupt`.
    """

    _open: ClassVar[StopSignals | None] = None  # of the run in another thread than the main one
    _early: ClassVar[int] = 0  # interrupts that came before it was open

    def __init__(self, way_on: str, tell: Callable[[str], None]) -> None:
        """way_on: tells the user how to continue. tell: takes lines to the user."""
        self.way_on, self._tell = way_on, tell
        self.count = 0  # signals that were acted on
        self._received = 0
        self._work: asyncio.Task[Any] | None = None
        self._words = "closing the workers"
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
                    self._before[number] = signal.signal(number, self._receive)
            return self
        StopSignals._open, early = self, StopSignals._early
        for _ in range(early):
            self._receive(signal.SIGINT, None)
        return self

    @classmethod
    def forget(cls) -> None:
        """Drop interrupts that no run has seen."""
        cls._open, cls._early = None, 0

    @classmethod
    def interrupt(cls) -> None:
        """Stop the run in another thread as Ctrl-C stops one in the main thread."""
        if cls._open is not None:
            cls._open._receive(signal.SIGINT, None)
        else:
            cls._early += 1

    def __exit__(self, *error: object) -> None:
        self.forget()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    async def run(self, work: Coroutine[Any, Any, T], words: str, *, allowed: int = 0) -> T | None:
        """The result of the work; None if more signals than `allowed` have come."""
        self._words = words  # what happens after the next signal
        self._work = asyncio.create_task(work)
        if self.count > allowed:
            self._work.cancel()
        try:
            return await self._work
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if self.count > allowed and caller is not None and not caller.cancelling():
                return None
            raise
        finally:
            self._work = None

    def _receive(self, number: int, frame: object) -> None:
        self._received += 1
        if self._received > 2 and not self._before:
            return  # a notebook: its process lives on
        if self._received > 2:  # nothing is printed through a lock that the main thread may hold
            os.write(2, f"killed; nothing that was journalled is lost; {self.way_on}\n".encode())
            os._exit(130)
        self._loop.call_soon_threadsafe(self._stop)

    def _stop(self) -> None:
        self.count += 1
        self._tell(f"stop requested: {self._words}")
        if self._work is not None:
            self._work.cancel()


def evaluate_once(
    path: str | None, overrides: Sequence[str], out: Path | None, *, trusted: bool = False
) -> None:
    """Evaluate the model of a config, or the newest checkpoint of a run; print the results."""
    results = evaluate_model(path, overrides, out, trusted=trusted)
    print_evaluations(console(), results)
    if errors := [result.error for result in results if result.failures]:
        failed = sum(result.failures for result in results)
        total = sum(result.samples for result in results)
        raise RunError(f"{failed} of {total} samples failed; the first: {errors[0]}")


def evaluate_model(
    path: str | None, overrides: Sequence[str], out: Path | None, *, trusted: bool = False
) -> list[EvalResult]:
    """Evaluate the model of a config, or the newest checkpoint of a run."""
    config = model_config(path, overrides, trusted=trusted)
    if not config.eval.tasks:
        raise UserError(
            "eval.tasks: got none, allowed: at least one [eval.tasks.NAME], such as eval.tasks.test.data=FILE"
        )
    from penstock.run import preflight

    preflight.check_for_evaluation(config)

    async def evaluate_tasks(folder: Path) -> list[EvalResult]:
        async with open_evaluation(config) as (engine, tasks):
            return [
                await evaluate(engine, task, step=0, version=0, folder=folder) for task in tasks
            ]

    with ScratchFolder.new("eval") as scratch:
        return asyncio.run(evaluate_tasks(out or scratch))


def model_config(path: str | None, overrides: Sequence[str], *, trusted: bool = False) -> Config:
    """The config whose model generate, eval and chat use; refuse a model or engine that cannot work.

    path: a config file, a model folder, a hub name, a checkpoint, or a run, whose newest weights are used.
    """
    from penstock.run import preflight

    config = _model_config(path, overrides, trusted)
    preflight.check_engine(config)
    return config


def _model_config(path: str | None, overrides: Sequence[str], trusted: bool) -> Config:
    if path is None or Path(path).is_file():
        return trust.load_trusted(path, overrides, trust=trusted)
    checkpoint = Path(path).absolute() if (Path(path) / MANIFEST).is_file() else None
    if checkpoint is not None:  # with the settings of its run, unless it lies elsewhere
        of_run = (checkpoint.parents[1] / run_folder.CONFIG).is_file()
        path = str(checkpoint.parents[1] if of_run else model_folder(checkpoint))
    # a path that is not there and looks like the hub name of a model, owner/name
    there = Path(path.partition("/")[0]).exists() or (Path("runs") / path).exists()
    is_hub_name = path.count("/") == 1 and path[0] not in "./~" and not there
    known = (
        "config.json",
        "adapter_config.json",
    )  # adapters are refused by what looks at model.path
    if path == "demo" or any((Path(path) / name).is_file() for name in known) or is_hub_name:
        return trust.load_trusted(None, [f"model.path={path}", *overrides], bare=True)
    try:
        folder = run_folder.find(path)
    except UserError:
        raise UserError(
            f"model: got {path!r}, allowed: a config file, a run (its folder, or its name in runs/), a "
            "model folder (one with config.json), a hub name owner/name, or demo"
        ) from None
    used = model_folder(checkpoint or choose_checkpoint(folder).path)
    if folder.config().train.ema_decay:
        _tell(f"the running average of the weights is used: {used}")
    model = [f"model.path={used}", "run.name="]  # what serves it is not the run
    trust.check(folder.path, [folder.config()], trust=trusted)
    return with_overrides(folder.config(), [*model, *overrides])
