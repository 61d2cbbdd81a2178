"""Run one schedule: lives of the driver until the run is done; check every promise after each life."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import gc
import io
import itertools
import os
import shutil
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from penstock.config import Config
from penstock.errors import PenstockError
from penstock.inspection.audit import audit_journal
from penstock.rollout.agent import build
from penstock.run import job, session
from penstock.store import run_folder
from penstock.store.journal import Journal, writer
from penstock.store.journal import journal as journal_module
from penstock.store.run_folder import CONFIG, RunFolder, _copy
from penstock.workers.processes import local
from simulation.agents import SimBridge, agent_faults
from simulation.disk import SimOs, SimWriter
from simulation.event_loop import DriverKilled, SimLoop, Stuck, place_of
from simulation.parts import START, digest_after
from simulation.processes import Processes
from simulation.world import PROMPTS, TASKS, USER, World

LONGEST_S = 30_000.0  # of one life of the driver; a stalled worker is replaced after 300 s
MOST_TICKS = 400_000
MOST_LIVES = 8
_schedules = itertools.count(1)
MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None


@dataclass(slots=True)
class Result:
    """What one schedule showed."""

    seed: int
    happened: list[str]  # the faults that struck
    settings: str = ""
    lives: list[str] = field(default_factory=list)  # how each life of the driver ended
    violations: list[str] = field(default_factory=list)
    notes: str = ""
    ticks: int = 0
    seconds: float = 0.0  # virtual

    @property
    def failed(self) -> bool:
        return bool(self.violations)


class _Data:
    """Stands in for the datasets and the tokenizer."""

    end_tokens = SimpleNamespace(difference=lambda tokenizer: [])
    chat = SimpleNamespace(decode=lambda ids: "text", tokenizer=None, end_tokens=end_tokens)
    train = dict.fromkeys(TASKS, PROMPTS)
    evaluation = {"held": PROMPTS}  # noqa: RUF012

    @classmethod
    async def read(cls, config: Config, with_training: bool = True) -> _Data:
        return cls()

    def by_key(self) -> dict[str, Any]:
        return {}


async def _left_behind(work: Callable[[], Any]) -> Any:
    """Stands in for a thread that a stop leaves behind."""
    return await asyncio.get_running_loop().run_in_executor(None, work)


class _Control:
    """Stands in for the control socket."""

    def __init__(self, pointer: Path, handlers: Any) -> None:
        SimWriter.world.scale = handlers["scale"]

    async def start(self) -> None: ...

    async def close(self) -> None: ...


async def _no_endpoint(*_: Any) -> None:
    """Start no HTTP server: the agents of the simulation are in the driver."""


class _NoFolder:
    path = Path("shared memory")

    def remove(self) -> None: ...


@contextlib.contextmanager
def installed(world: World) -> Iterator[None]:
    """Put the simulated machine in the place of the real one."""
    ports = iter(range(1, 1_000_000))
    keep_trainer_alive = session.keep_trainer_alive

    def now_training(job: Any) -> None:
        keep_trainer_alive(job)
        world.is_training = True

    places: list[tuple[Any, str, Any]] = [
        (local, "ProcessWorker", Processes(world)),
        (local, "weight_folder", _NoFolder),
        (local, "reserve_port", lambda address: contextlib.nullcontext(next(ports))),
        (local, "port_of", lambda port: port),
        (run_folder, "_read", lambda path: world.config),  # of a run that has not begun
        (job, "RunData", _Data),
        (job, "left_behind", _left_behind),
        (job, "measure", lambda config, datasets: {}),
        (job, "Control", _Control),
        (job, "serve_agents", _no_endpoint),
        (build, "Bridge", SimBridge),
        (journal_module, "Writer", SimWriter),
        (journal_module, "open_database", world.disk.open),
        (writer, "os", SimOs(world.disk)),
        (
            session,
            "signal",
            SimpleNamespace(
                **{
                    name: getattr(signal, name)
                    for name in ("SIGHUP", "SIGINT", "SIGTERM", "SIG_IGN")
                },
                getsignal=lambda number: None,
                signal=world.handle_signal,
            ),
        ),
        (session, "write_report", lambda folders: None),
        (session, "print_summary", lambda *args, **kwargs: None),
        (session, "keep_trainer_alive", now_training),
        (session, "tuned_interpreter", contextlib.nullcontext),  # garbage is collected in between
        (SimWriter, "world", world),
    ]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in places]
    for owner, name, value in places:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


@cache
def _empty_journal() -> Path:
    """Return a journal without records; a copy of it is made faster than a new one."""
    folder = tempfile.mkdtemp(prefix="penstock-simulation-", dir=MEMORY)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = Path(folder) / "journal.db"
    Journal.open(path).close()
    return path


def run_seed(seed: int, *, trace: str | None = None, **given: Any) -> Result:
    """Run the schedule of a seed; return what was seen. `trace`: a file for every callback.

    given: see `World`.
    """
    folder = Path(tempfile.mkdtemp(prefix="penstock-simulation-", dir=MEMORY))
    shutil.copy(_empty_journal(), folder / "journal.db")
    gc.disable()  # a dead driver's coroutines must not be freed while another loop runs
    # a `finally` of a dead driver that gathers must not find a loop: its tasks would stay there
    asyncio.set_event_loop(None)
    try:
        world = World(seed, folder, **given)
        (folder / CONFIG).write_text(_copy(world.config))
        return _run(world, trace)
    finally:
        if next(_schedules) % 25 == 0:
            gc.collect()
        shutil.rmtree(folder, ignore_errors=True)


def _run(world: World, trace: str | None) -> Result:
    result = Result(world.seed, world.happened, settings=world.settings())
    traced: list[str] | None = None if trace is None else []
    notes = io.StringIO()
    graves: list[Any] = []
    with installed(world), contextlib.redirect_stderr(notes):
        for life in range(MOST_LIVES):
            world.life = life
            world.begin_life()
            end = _live(world, result, graves, traced)
            result.lives.append(end)
            world.disk.driver_died()
            result.violations += world.violations
            is_lost = not world.disk.put_back(world.folder / "journal.db")
            if is_lost and end != "killed":
                result.violations.append(f"the journal is lost, and the driver ended: {end}")
            if is_lost or end == "done" or result.violations:
                break
        else:
            result.violations.append(f"not done after {MOST_LIVES} lives: {result.lives}")
        if not result.violations and not is_lost:
            result.violations += check_journal(world)
        result.notes = notes.getvalue()
        _bury(graves)
    if trace is not None and traced is not None:
        Path(trace).write_text("\n".join(traced))
    return result


def _bury(graves: list[Any]) -> None:
    """Free the coroutines of dead drivers; what they do while they are freed reaches nothing."""
    for tasks in graves:
        for task in tasks:
            with contextlib.suppress(BaseException):
                task.get_coro().close()
    graves.clear()


def _live(world: World, result: Result, graves: list[Any], traced: list[str] | None) -> str:
    """Run the driver until it is done, stopped, killed or ended by an error; return which."""
    loop = world.loop = SimLoop(
        world.random.getrandbits(32),
        now=getattr(world, "now", 0.0),
        longest_s=LONGEST_S,
        most_ticks=MOST_TICKS,
        shuffled=world.random.choice((0.0, 0.1, 0.5)),
        at_tick=world.at_tick,
    )
    loop.trace = traced
    folder = RunFolder(world.folder)
    resumed = world.life > 0
    end = ""
    try:
        loop.run_until_complete(session._train(world.config, folder, resumed=resumed))
        end = "done"
    except DriverKilled:
        end = "killed"
    except Stuck as error:
        end = "stuck"
        result.violations.append(f"stuck: {error}")
    except PenstockError as error:
        end = f"{type(error).__name__}: {error}"
        if not world.excuses:
            result.violations.append(f"the run stopped without need: {end}")
    except (Exception, asyncio.CancelledError):
        end = "error"
        result.violations.append(traceback.format_exc())
    world.now = loop.now  # type: ignore[attr-defined]
    result.ticks += loop.ticks
    result.seconds = loop.now
    if end not in ("killed", "stuck"):
        left = [task for task in asyncio.all_tasks(loop) if not is_outside(task)]
        result.violations += [f"left running: {place_of(task)}" for task in left]
    result.violations += loop.complaints
    graves.append(loop.abandon())
    return end


def is_outside(task: asyncio.Task[Any]) -> bool:
    """Return whether a task stands for another process: a worker, or the user's command."""
    return task.get_name() == USER or task.get_name().endswith(" serves")


def check_journal(world: World) -> list[str]:
    """Compare the journal with every promise; return what is broken."""
    journal = Journal.open(world.folder / "journal.db", readonly=True)
    try:
        found = audit_journal(journal, [world.bounds])
        faults = list(found.faults)
        if not world.has_lost_records:
            faults += agent_faults(journal, world.effects)
        digest, pruned = START, journal.pruned_to()
        for number, report in enumerate(journal.steps(), start=1):
            if (report.step, digest, report.digest) not in world.updates:
                faults.append(f"step {report.step} has a digest that no update after the last gave")
            if report.step > pruned and world.repeats_bits:
                digest = digest_after(digest, journal.batch(report.step).groups)
            else:
                digest = report.digest
            if (report.step, report.policy_version) != (number, number):
                faults.append(f"step {report.step} has version {report.policy_version}")
            if report.digest != digest:
                faults.append(f"step {report.step} has a digest that its batches do not give")
        if found.committed_steps != world.config.train.steps:
            faults.append(f"done after {found.committed_steps} steps")
        return faults
    finally:
        journal.close()
        world.disk.driver_died()
