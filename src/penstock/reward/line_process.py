"""Programs of others as processes: one JSON line in, one out, a time limit, the end of stderr.

For the workers of rewards, for agents under another Python and for command lines. A process has a session
of its own: Ctrl-C is for the run, which ends its processes itself, and a kill reaches what it started.
After any fault a process is killed, because it may be in the middle of an answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import IO, Any

from penstock.errors import RunError

MOST_LINE_BYTES = 16 << 20
MAX_STRETCH = 10  # a process is stuck after this many times its processor time in wall time


class ProcessGone(RunError):
    """The process ended without an answer."""


class ProcessSlow(RunError):
    """The process gave no answer in time."""


class LineProcess:
    """One process; `name` begins its errors."""

    def __init__(
        self, process: asyncio.subprocess.Process, errors: IO[bytes], name: str = "the process"
    ) -> None:
        self._process, self._errors, self._name = process, errors, name
        self.last_words = ""  # the last line that it wrote to stderr, known after its end

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        name: str = "the process",
        environment: Mapping[str, str] | None = None,
    ) -> LineProcess:
        errors = tempfile.TemporaryFile()  # noqa: SIM115 (open as long as the process)
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            limit=MOST_LINE_BYTES,
            start_new_session=True,
            env=environment,
        )
        return cls(process, errors, name)

    @property
    def is_alive(self) -> bool:
        return not self._errors.closed

    async def ask(
        self, message: Any, timeout_s: float = math.inf, *, processor_time: bool = False
    ) -> Any:
        """Send one line; return the next one that the process writes.

        With `processor_time` the limit is on the process's own processor time, so that a busy machine
        changes no result; the wait is still bounded by `MAX_STRETCH` times the limit.
        """
        assert self._process.stdin is not None
        try:
            with contextlib.suppress(ConnectionError):  # it has ended: reading says so
                self._process.stdin.write(json.dumps(message).encode() + b"\n")
                await self._process.stdin.drain()
        except BaseException:
            await self.kill()
            raise
        return await self.read(timeout_s, processor_time=processor_time)

    async def read(self, timeout_s: float = math.inf, *, processor_time: bool = False) -> Any:
        """The next line that the process writes. Raises ProcessGone or ProcessSlow."""
        try:
            line = await self._read_line(timeout_s, processor_time)
            return json.loads(line)
        except ValueError as error:  # no JSON, or a line without end
            await self.kill()
            raise ProcessGone(f"{self._name} wrote no answer: {error}") from None
        except ProcessGone:
            await self.kill()
            raise ProcessGone(f"{self._name} ended: {self.last_words}") from None
        except BaseException:
            await self.kill()
            raise

    async def _read_line(self, timeout_s: float, processor_time: bool) -> bytes:
        assert self._process.stdout is not None
        deadline, limit = time.monotonic() + timeout_s, math.inf
        if processor_time:
            deadline += timeout_s * (MAX_STRETCH - 1)
            limit = self._processor_s() + timeout_s
        while True:
            remaining_s = min(deadline - time.monotonic(), limit - self._processor_s())
            try:
                async with asyncio.timeout(None if remaining_s == math.inf else remaining_s):
                    line = await self._process.stdout.readline()
            except TimeoutError:
                if remaining_s > 0:
                    continue  # the process waited for a processor: read its clock again
                raise ProcessSlow(f"{self._name}: no answer after {timeout_s:g} s") from None
            if not line.endswith(b"\n"):
                raise ProcessGone
            return line

    def _processor_s(self) -> float:
        """The processor time that the process has used; 0 if it has ended."""
        try:
            return time.clock_gettime(~self._process.pid << 3 | 2)  # the clock of that process
        except OSError:
            return 0.0

    async def finish(self, text: str) -> tuple[int, str]:
        """Give the process its whole input and wait for its end; return its exit code and output."""
        try:
            output, _ = await self._process.communicate(text.encode())
        finally:
            await self.kill()
        return self._process.returncode or 0, output.decode(errors="replace")

    async def kill(self) -> None:
        """Kill the process and those that it started, and close its pipes."""
        if self._errors.closed:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()
        self._process._transport.close()  # type: ignore[attr-defined]
        if not self._errors.closed:  # nobody else killed it meanwhile
            self.last_words = last_line(self._errors)
            self._errors.close()


def last_line(errors: IO[bytes]) -> str:
    """The last line that a process wrote to the file of its stderr."""
    size = errors.seek(0, os.SEEK_END)
    errors.seek(max(0, size - 2000))
    lines = errors.read().decode(errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else "it wrote no message"


def serve_lines(start: Callable[[], Callable[[Any], Any]]) -> None:
    """Be such a process: start, then answer one line after the other until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints must not reach the answers' pipe
    answer = start()
    print('"ready"', file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=answers, flush=True)


class ProcessPool:
    """At most `size` processes of one command, started when they are needed and kept.

    The first line of a process says that it is ready, or `{"refused": why}`.
    """

    def __init__(
        self,
        command: Sequence[str],
        size: int,
        *,
        name: str,
        start_timeout_s: float,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._command, self._name, self._start_timeout_s = command, name, start_timeout_s
        self._environment = environment
        self._slots = asyncio.Semaphore(size)
        self._idle: list[LineProcess] = []
        self._running: set[LineProcess] = set()
        self._closed = False

    @asynccontextmanager
    async def lend(self) -> AsyncIterator[LineProcess]:
        """Lend a process that is ready; a block that leaves it in the middle of an answer kills it."""
        async with self._slots:
            process = self._idle.pop() if self._idle else await self._start()
            try:
                yield process
            finally:
                if process.is_alive:
                    self._idle.append(process)
                else:
                    self._running.discard(process)

    async def _start(self) -> LineProcess:
        if self._closed:
            raise RunError(f"{self._name} was closed")
        process = await LineProcess.start(self._command, self._name, self._environment)
        self._running.add(process)
        try:
            hello = await process.read(self._start_timeout_s)
            if isinstance(hello, dict) and "refused" in hello:
                await process.kill()
                raise RunError(hello["refused"])
        except (ProcessGone, ProcessSlow) as error:
            reason = process.last_words if isinstance(error, ProcessGone) else error
            raise RunError(f"{self._name} does not start: {reason}") from None
        finally:
            if not process.is_alive:
                self._running.discard(process)
        return process

    async def close(self) -> None:
        """End every process; those that are asked for an answer give none."""
        self._closed = True
        self._idle.clear()
        for process in list(self._running):
            await process.kill()
