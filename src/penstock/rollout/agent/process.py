"""Agents outside the driver: a function in a pool of processes, under another Python, or a command line.

A process makes one rollout at a time, asks the endpoint over HTTP, and tells the session of its tool
calls over its pipes. It is killed, with the processes
it started, when its rollout ends late, is cancelled, or when the run ends; the next rollout gets a new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from penstock.errors import RewardError, RunError, UserError
from penstock.rollout.agent.session import Function, Model, session_of
from penstock.rollout.agent.task import Task

INSIDE = Path(__file__).with_name("inside.py")
DEFAULT_PROCESSES = 4
_MOST_LINE_BYTES = 16 << 20
_START_TIMEOUT_S = 120.0


class Pool:
    """Calls a function in one of `size` processes: `async with pool.place() as call`, `await call(task, model)`."""

    def __init__(self, target: str, size: int, python: str = "") -> None:
        self._command = (python or sys.executable, ("serve", target))
        self._places = asyncio.Semaphore(size)
        self._idle: list[Process] = []
        self._all: set[Process] = set()

    @asynccontextmanager
    async def place(self) -> AsyncIterator[Function]:
        """Lend a process that is ready, as a function; waiting for it is not part of a rollout's time."""
        async with self._places:
            process = self._idle.pop() if self._idle else await self._start()
            yield functools.partial(self._call, process)

    async def _call(self, process: Process, task: Task, model: Model, **options: Any) -> Any:
        try:
            answer = await process.ask({**_given(task, model), "options": options})
            while "tool" in answer:
                answer = await process.ask(await session_of(model).answer_tool(answer))
        except BaseException:  # cancelled or dead: the process may be in the middle of a rollout
            await self._end(process)
            raise
        self._idle.append(process)
        if "error" in answer:
            raise RunError(answer["error"])
        model.reward(answer["earned"])
        return answer["result"]

    async def _start(self) -> Process:
        process = await Process.start(*self._command)
        self._all.add(process)
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                hello = await process.read()
        except TimeoutError:
            await self._end(process)
            raise RunError(
                f"the agent's process was not ready after {_START_TIMEOUT_S:g} s"
            ) from None
        except BaseException:
            await self._end(process)
            raise
        if "refused" in hello:
            await self._end(process)
            raise RunError(hello["refused"])
        return process

    async def _end(self, process: Process) -> None:
        self._all.discard(process)
        await process.kill()

    async def close(self) -> None:
        for process in list(self._all):
            await self._end(process)


class Command:
    """Runs a command line per rollout: the task on stdin, the reward is the last line of its output."""

    def __init__(self, words: Sequence[str], size: int) -> None:
        self._command = (sys.executable, ("exec", *words))
        self._places = asyncio.Semaphore(size)
        self._all: set[Process] = set()

    async def __call__(self, task: Task, model: Model) -> Any:
        environment = {
            **os.environ,
            "OPENAI_BASE_URL": model.base_url,
            "OPENAI_API_KEY": model.api_key,
            "OPENAI_MODEL": model.name,
            "PENSTOCK_SEED": str(model.seed),
        }
        process = await Process.start(*self._command, environment)
        self._all.add(process)
        try:
            code, output = await process.finish(json.dumps(asdict(task)))
            last_words = process.last_words()
        finally:
            self._all.discard(process)
            await process.kill()
        lines = output.strip().splitlines()
        if code:
            raise RunError(f"the command ended with code {code}: {last_words}")
        try:
            return float(lines[-1])
        except (IndexError, ValueError):
            last = lines[-1] if lines else "no output"
            raise RewardError(f"the command's last line: got {last!r}, allowed: a number") from None

    @asynccontextmanager
    async def place(self) -> AsyncIterator[Function]:
        """Lend this function; waiting for it is not part of a rollout's time, its start is."""
        async with self._places:
            yield self

    async def close(self) -> None:
        for process in list(self._all):
            await process.kill()


def guarded(python: str, *words: str) -> tuple[str, ...]:
    """Return the command line of a process that ends, with those it starts, when this one has ended."""
    return (python, str(INSIDE), str(os.getpid()), *words)


def last_line(errors: IO[bytes]) -> str:
    """Return the last line that a process wrote to the file of its stderr."""
    size = errors.seek(0, os.SEEK_END)
    errors.seek(max(0, size - 2000))
    lines = errors.read().decode(errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else "it wrote no message"


class Process:
    """One process in a session of its own, with its errors in a file."""

    def __init__(self, process: asyncio.subprocess.Process, errors: IO[bytes]) -> None:
        self._process, self._errors = process, errors

    @classmethod
    async def start(
        cls, python: str, words: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> Process:
        errors = tempfile.TemporaryFile()  # noqa: SIM115 (open as long as the process)
        made = await asyncio.create_subprocess_exec(
            *guarded(python, *words),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            limit=_MOST_LINE_BYTES,
            start_new_session=True,  # Ctrl-C is for the run, which ends its processes itself
            env=environment,
        )
        return cls(made, errors)

    async def ask(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Send one line; return the answer's."""
        await self.write_line(json.dumps(given))
        return await self.read()

    async def read(self) -> dict[str, Any]:
        line = await self.read_line()
        if line is None:
            raise RunError(f"the agent's process died: {self.last_words()}")
        return dict(json.loads(line))

    async def write_line(self, text: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(ConnectionError):  # it died: reading says so
            self._process.stdin.write(text.encode() + b"\n")
            await self._process.stdin.drain()

    async def read_line(self) -> bytes | None:
        """Return the next line that the process writes; None: it has ended."""
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        return line if line.endswith(b"\n") else None

    async def finish(self, text: str) -> tuple[int, str]:
        """Give the process its input and wait for its end; return its exit code and output."""
        output, _ = await self._process.communicate(text.encode())
        return self._process.returncode or 0, output.decode(errors="replace")

    def last_words(self) -> str:
        """Return the last line that the process wrote to stderr."""
        return last_line(self._errors)

    async def kill(self) -> None:
        """Kill the process and those that it started, and close its pipes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()
        self._process._transport.close()  # type: ignore[attr-defined]
        self._errors.close()


def _given(task: Task, model: Model) -> dict[str, Any]:
    return {
        "task": asdict(task),
        "base_url": model.base_url,
        "api_key": model.api_key,
        "name": model.name,
        "seed": model.seed,
        "tool_timeout_s": session_of(model).limits.tool_timeout_s,
    }


def read_size(where: str, options: Mapping[str, Any]) -> int:
    """Return the number of processes that the options ask for."""
    size = options.get("processes", DEFAULT_PROCESSES)
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise UserError(f"{where}.processes: got {size!r}, allowed: a whole number from 1")
    return size


def read_command(where: str, options: Mapping[str, Any]) -> list[str]:
    """Return the words of the command that the options name."""
    words = options.get("command")
    if not isinstance(words, list) or not words or not all(isinstance(w, str) for w in words):
        raise UserError(
            f'{where}.command: got {words!r}, allowed: a list of words, such as ["node", "agent.js"]'
        )
    return words


def read_python(where: str, options: Mapping[str, Any]) -> str:
    """Return the Python that the options name; empty: this one."""
    python = options.get("python", "")
    if not isinstance(python, str) or (python and not os.access(python, os.X_OK)):
        raise UserError(f"{where}.python: got {python!r}, allowed: the path of a Python")
    return python
