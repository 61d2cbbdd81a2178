"""Worker processes of this machine, called over a socket pair.

A worker imports torch and transformers for seconds, and the driver checks data, makes the run folder and opens
the journal in others. So `early_workers` (used by `run/entry.py`) starts the processes before the settings of
a run are checked; `ProcessWorker.start` takes the one of its name. Whatever is not taken ends with the block.
Nothing polls: replies, stages of the start and the worker's end all arrive on the socket. When the worker
dies, every waiting call raises WorkerDied with the last line of its log.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.config import Config
from penstock.errors import RunError, WorkerDied
from penstock.inspection.track.console import READY, StartDisplay
from penstock.workers.rpc import (
    STAGE,
    activity_of,
    frame,
    is_stopped,
    one_line,
    read_frame,
    with_log_path,
)

_STREAM_LIMIT = 1 << 20
_CLOSE_TIMEOUT_S = 1.0
_SIGNAL_TIMEOUT_S = 5.0
# On ARM torch allocates by mimalloc, which gives freed memory back to the system after this time, large blocks
# after ten times as long. With mimalloc's own 10 ms a training step clears the same pages again and again.
_PURGE_DELAY_MS = 1000
_MOST_ENGINES = 8  # more wait for the check of the memory that all of them need
_MODEL = ("transformers.modeling_utils", "transformers.models.auto.modeling_auto")


@dataclass(slots=True, kw_only=True)
class WorkerProcess:
    """A process that will be a worker, and the driver's ends of its socket and pipe."""

    process: subprocess.Popen
    threads: int
    connection: socket.socket
    dumped: int  # a pipe: one byte for every stack written to the log
    started: float = field(default_factory=time.time)

    @classmethod
    def spawn(cls, log_path: Path, threads: int, imports: Sequence[str] = ()) -> WorkerProcess:
        """Start a process that first imports these modules (see `worker_main.prepare`)."""
        ours, theirs = socket.socketpair()
        dumped, tell = os.pipe()
        os.set_blocking(dumped, False)
        os.set_blocking(tell, False)
        try:
            process = _spawn((theirs.fileno(), tell), log_path, threads, imports)
        except BaseException:  # Ctrl-C: if the process has started, it ends with its connection
            ours.close()
            os.close(dumped)
            raise
        finally:
            theirs.close()
            os.close(tell)
        return cls(process=process, threads=threads, connection=ours, dumped=dumped)

    def discard(self) -> None:
        """End the process and close its ends here."""
        self.connection.close()
        self.process.kill()
        self.process.wait()
        os.close(self.dumped)


EARLY: ContextVar[dict[str, WorkerProcess]] = ContextVar("early")  # by name, see `early_workers`


class ProcessWorker:
    """See `Worker`. Consumes method calls, produces results from the part in the worker process."""

    can_be_killed = True

    def __init__(
        self,
        name: str,
        worker_process: WorkerProcess,
        log_path: Path,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.name = name
        self._process = worker_process.process
        self._dumped = worker_process.dumped
        self._log_path = log_path
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._ids = itertools.count()
        self._closed = False
        self._end = "the worker ended unexpectedly"
        self._gone = asyncio.Event()
        self._reader, self._writer = reader, writer
        self._receiving = asyncio.create_task(self._receive(), name=f"receive from {name}")

    @classmethod
    async def start(
        cls,
        name: str,
        factory: str,
        *args: Any,
        log_path: Path,
        threads: int,
        timeout_s: float,
        imports: Sequence[str] = (),
    ) -> ProcessWorker:
        """Start a worker that builds `factory(*args)` ("module:callable") and serves it.

        imports: what the process imports before it reads what to build.
        """
        log_path.parent.mkdir(parents=True, exist_ok=True)
        early = EARLY.get({}).pop(name, None)
        if early is not None and (early.process.poll() is not None or early.threads != threads):
            early.discard()  # it has ended, or would compute with other threads
            early = None
        worker_process = early or WorkerProcess.spawn(log_path, threads, imports)
        StartDisplay.worker_stage(name, "starting Python", worker_process.started)
        try:
            reader, writer = await asyncio.open_connection(
                sock=worker_process.connection, limit=_STREAM_LIMIT
            )
        except BaseException:  # a stop during the start: the process must not outlive it
            worker_process.discard()
            raise
        writer.write(frame((sys.path, name, str(log_path.absolute()), factory, args)))
        worker = cls(name, worker_process, log_path, reader, writer)
        try:
            async with asyncio.timeout(timeout_s):
                await worker.call("__start__")
        except TimeoutError:
            await worker.close()
            raise RunError(
                f"{name}: not ready after {timeout_s:g} s; its log is {log_path}"
            ) from None
        except BaseException:  # a failed or stopped start: the process must not outlive it
            await worker.close()
            raise
        StartDisplay.worker_stage(name, READY, time.time())
        return worker

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def place(self) -> str:
        return f"pid {self.pid}"

    async def call(self, method: str, *args: Any) -> Any:
        if self._closed:
            raise WorkerDied(f"{self.name}: the worker has ended{self._last_log_line()}")
        call_id = next(self._ids)
        future = asyncio.get_running_loop().create_future()
        self._waiting[call_id] = future
        try:
            self._writer.write(frame((call_id, method, args)))
            await self._writer.drain()
            return await future
        except ConnectionError:
            raise WorkerDied(f"{self.name}: the worker has ended{self._last_log_line()}") from None
        finally:
            self._waiting.pop(call_id, None)

    async def _receive(self) -> None:
        """Consumes replies, wakes their callers; when the worker ends, fails every waiting call."""
        try:
            while True:
                call_id, result, error = await read_frame(self._reader)
                if call_id == STAGE:
                    StartDisplay.worker_stage(self.name, *result)
                    continue
                future = self._waiting.get(call_id)
                if future is None or future.done():
                    continue  # the caller was cancelled
                if error is None:
                    future.set_result(result)
                else:
                    future.set_exception(with_log_path(error, self._log_path))
        except (asyncio.IncompleteReadError, ConnectionError):
            self._kill()  # what it has started
        except Exception as error:  # an answer that cannot be read: nor can those after it
            self._end = f"its answer cannot be read: {one_line(error)}"
            self._kill()
        finally:
            self._closed = True
            died = WorkerDied(f"{self.name}: {self._end}{self._last_log_line()}")
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(died)
            self._gone.set()

    async def ended(self) -> str:
        await self._gone.wait()
        return f"{self.name}: {self._end}{self._last_log_line()}"

    async def stack(self) -> str:
        """Send a signal and read the stacks from the log, also of a worker whose event loop is blocked.

        Waits for the byte that the worker writes after the last line, or for its end.
        """
        if is_stopped(self.pid):
            return f"(its process is stopped: kill -CONT {self.pid} lets it go on)"
        loop, written, pipe = asyncio.get_running_loop(), asyncio.Event(), self._dumped
        if pipe < 0:
            return "(it was closed)"
        with contextlib.suppress(BlockingIOError):
            os.read(pipe, 4096)  # drop the bytes of earlier stacks
        before = self._log_path.stat().st_size
        loop.add_reader(pipe, written.set)
        try:
            self._process.send_signal(signal.SIGUSR1)
            async with asyncio.timeout(_SIGNAL_TIMEOUT_S):
                await written.wait()
        except TimeoutError:
            return f"(it has not answered the signal for {_SIGNAL_TIMEOUT_S:g} s)"
        finally:
            loop.remove_reader(pipe)
        with self._log_path.open(errors="replace") as log:
            log.seek(before)
            return log.read().rstrip()

    async def activity(self) -> float | None:
        return await asyncio.to_thread(activity_of, self.pid)

    async def kill(self) -> None:
        self._kill()
        await asyncio.to_thread(self._process.wait)

    def _kill(self) -> None:
        """Kill the worker and the processes it has started: both are in the worker's process group."""
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(self.pid) == self.pid:
                os.killpg(self.pid, signal.SIGKILL)
        self._process.kill()

    def _last_log_line(self) -> str:
        try:
            written = self._log_path.read_text(errors="replace")
        except OSError as error:  # a log that is gone must not hide the death
            return f" (log: {self._log_path}: {error.strerror})"
        lines = [line for line in written.splitlines()[-20:] if line.strip()]
        last = f": {lines[-1].strip()[:300]}" if lines else ""
        return f"{last} (log: {self._log_path})"

    async def close(self) -> None:
        """Close the socket, on which the worker exits; kill it if it does not."""
        self._closed = True
        self._writer.close()
        self._receiving.cancel()
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await asyncio.to_thread(self._process.wait, _CLOSE_TIMEOUT_S)
        except (TimeoutError, subprocess.TimeoutExpired):
            self._kill()
            await asyncio.to_thread(self._process.wait)
        finally:
            dumped, self._dumped = self._dumped, -1
            if dumped >= 0:
                os.close(dumped)


def _spawn(
    descriptors: tuple[int, int], log_path: Path, threads: int, imports: Sequence[str]
) -> subprocess.Popen:
    program = [sys.executable, "-m", "penstock.workers.processes.worker_main"]
    with log_path.open("ab") as log:
        return subprocess.Popen(
            [*program, *map(str, descriptors), *imports],
            pass_fds=descriptors,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=_worker_environment(threads),
            start_new_session=True,  # the driver handles Ctrl-C
        )


def _worker_environment(threads: int) -> dict[str, str]:
    count = str(threads)
    return {
        "MIMALLOC_PURGE_DELAY": str(_PURGE_DELAY_MS),
        **os.environ,
        "OMP_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }


def trainer_imports(config: Config, rank: int) -> list[str]:
    """What the process of a trainer rank needs in every run (`worker_main.prepare`)."""
    adapters = ["peft"] if config.model.lora.rank else []
    return [*_context(config, rank), "penstock.training.consumer", *_MODEL, *adapters]


def engine_imports(config: Config, number: int) -> list[str]:
    """What the process of an engine needs in every run; nothing for engines that are not ours."""
    if config.of_engine(number).engine.name != "transformers":
        return []
    before = 0 if config.launch.colocate else config.launch.num_consumers
    return [*_context(config, before + number), "penstock.engine.transformers.engine", *_MODEL]


def _context(config: Config, index: int) -> list[str]:
    """The GPU to open as `models.loading.choose_device` will choose it."""
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
    early, no_log = dict[str, WorkerProcess](), Path(os.devnull)
    token = EARLY.set(early)
    try:
        if config.launch.kind == "local":
            for rank, name in enumerate(trainer_names(config)[:_MOST_ENGINES]):
                imports = trainer_imports(config, rank)
                early[name] = WorkerProcess.spawn(no_log, config.train.threads, imports)
            for number in range(min(config.num_engines, _MOST_ENGINES)):
                if imports := engine_imports(config, number):
                    threads = config.of_engine(number).engine.threads
                    early[f"engine-{number}"] = WorkerProcess.spawn(no_log, threads, imports)
        yield
    finally:
        EARLY.reset(token)
        while early:
            early.popitem()[1].discard()
