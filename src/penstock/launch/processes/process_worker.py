"""A part that lives in a worker process, called as if it were here.

`ProcessWorker` starts `python -m penstock.launch.processes.worker_main` with one end of a socket pair and turns every
attribute into an async method. Nothing polls: replies and the worker's end both arrive on the
socket. When the worker dies, every waiting call raises WorkerDied with the last line of its log.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.errors import PartFailed, RunError, WorkerDied
from penstock.supervise.activity import activity_of

FRAME = struct.Struct("!Q")
_STREAM_LIMIT = 1 << 20
_CLOSE_TIMEOUT_S = 1.0
_STACK_TIMEOUT_S = 2.0
_SIGNAL_TIMEOUT_S = 5.0


async def read_frame(reader: asyncio.StreamReader) -> Any:
    """One pickled message; raises IncompleteReadError at the end of the stream."""
    (length,) = FRAME.unpack(await reader.readexactly(FRAME.size))
    return pickle.loads(await reader.readexactly(length))


def write_frame(writer: asyncio.StreamWriter, message: Any) -> None:
    payload = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    writer.write(FRAME.pack(len(payload)))
    writer.write(payload)


def with_log(error: Exception, log_path: Path) -> Exception:
    """Says where the traceback is, of what a part did not raise on purpose."""
    if isinstance(error, PartFailed):
        error.args = (f"{error} (traceback: {log_path})",)
    return error


class ProcessWorker:
    """See `Worker`. Consumes method calls, produces results from the part in the worker process."""

    can_be_killed = True

    def __init__(self, name: str, process: subprocess.Popen, log_path: Path, dumped: int) -> None:
        self.name = name
        self._process = process
        self._dumped = dumped  # a pipe: a byte for every stack that went to the log
        self._log_path = log_path
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._ids = itertools.count()
        self._closed = False
        self._gone = asyncio.Event()
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter
        self._receiving: asyncio.Task[None]

    @classmethod
    async def start(
        cls,
        name: str,
        factory: str,
        *args: Any,
        log_path: Path,
        threads: int,
        timeout_s: float,
        **kwargs: Any,
    ) -> ProcessWorker:
        """Start a worker that builds `factory(*args, **kwargs)` ("module:callable") and serves it."""
        ours, theirs = socket.socketpair()
        log_path.parent.mkdir(parents=True, exist_ok=True)
        dumped, tell = os.pipe()
        os.set_blocking(dumped, False)
        os.set_blocking(tell, False)
        with theirs:
            process = _spawn((theirs.fileno(), tell), log_path, threads)
            os.close(tell)
        remote = cls(name, process, log_path, dumped)
        remote._reader, remote._writer = await asyncio.open_connection(
            sock=ours, limit=_STREAM_LIMIT
        )
        write_frame(remote._writer, (sys.path, name, factory, args, kwargs))
        remote._receiving = asyncio.create_task(remote._receive(), name=f"receive from {name}")
        try:
            async with asyncio.timeout(timeout_s):
                await remote.call("__start__")
        except TimeoutError:
            await remote.close()
            raise RunError(
                f"{name}: not ready after {timeout_s:g} s; its log is {log_path}"
            ) from None
        except BaseException:
            await remote.close()
            raise
        return remote

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def place(self) -> str:
        return f"pid {self.pid}"

    def __getattr__(self, method: str) -> Callable[..., Any]:
        if method.startswith("_"):
            raise AttributeError(method)

        async def call(*args: Any, **kwargs: Any) -> Any:
            return await self.call(method, *args, **kwargs)

        return call

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        if self._closed:
            raise WorkerDied(f"{self.name}: the worker has ended{self._last_words()}")
        call_id = next(self._ids)
        future = asyncio.get_running_loop().create_future()
        self._waiting[call_id] = future
        try:
            write_frame(self._writer, (call_id, method, args, kwargs))
            await self._writer.drain()
            return await future
        except ConnectionError:
            raise WorkerDied(f"{self.name}: the worker has ended{self._last_words()}") from None
        finally:
            self._waiting.pop(call_id, None)

    async def _receive(self) -> None:
        """Consumes replies, wakes their callers; at the worker's end fails every waiting call."""
        try:
            while True:
                call_id, result, error = await read_frame(self._reader)
                future = self._waiting.get(call_id)
                if future is None or future.done():
                    continue  # the caller was cancelled
                if error is None:
                    future.set_result(result)
                else:
                    future.set_exception(with_log(error, self._log_path))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._closed = True
            died = WorkerDied(f"{self.name}: the worker ended unexpectedly{self._last_words()}")
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(died)
            self._gone.set()

    async def ended(self) -> str:
        await self._gone.wait()
        return f"{self.name}: the worker ended unexpectedly{self._last_words()}"

    async def stack(self) -> str:
        """From its event loop; where that is blocked, by a signal, from its log."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STACK_TIMEOUT_S):
                return str(await self.call("__stack__"))
        return "its event loop is blocked; by signal:\n" + await self._stack_by_signal()

    async def _stack_by_signal(self) -> str:
        """Waits for: the worker's byte after its last line, or its end."""
        loop, written, pipe = asyncio.get_running_loop(), asyncio.Event(), self._dumped
        if pipe < 0:
            return "(it was closed)"
        with contextlib.suppress(BlockingIOError):
            os.read(pipe, 4096)  # of dumps that nobody waited for
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
        self._process.kill()
        await asyncio.to_thread(self._process.wait)

    def _last_words(self) -> str:
        lines = [
            line
            for line in self._log_path.read_text(errors="replace").splitlines()[-20:]
            if line.strip()
        ]
        last = f": {lines[-1].strip()[:300]}" if lines else ""
        return f"{last} (log: {self._log_path})"

    async def close(self) -> None:
        """Close the socket (the worker leaves by itself), then make sure that it is gone."""
        self._closed = True
        self._writer.close()
        self._receiving.cancel()
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await asyncio.to_thread(self._process.wait, _CLOSE_TIMEOUT_S)
        except (TimeoutError, subprocess.TimeoutExpired):
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
        finally:
            self._close_pipe()

    def _close_pipe(self) -> None:
        dumped, self._dumped = self._dumped, -1
        if dumped >= 0:
            os.close(dumped)


def _spawn(descriptors: tuple[int, int], log_path: Path, threads: int) -> subprocess.Popen:
    with log_path.open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "penstock.launch.processes.worker_main", *map(str, descriptors)],
            pass_fds=descriptors,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=_worker_environment(threads),
            start_new_session=True,  # Ctrl-C is the driver's to handle
        )


def _worker_environment(threads: int) -> dict[str, str]:
    count = str(threads)
    return {
        **os.environ,
        "OMP_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }
