"""Agents outside the driver: a function in a pool of processes, under another Python, or a command line.

A process makes one rollout at a time, asks the endpoint over HTTP, and tells the session of its tool
calls over its pipes. It is killed, with the processes
it started, when its rollout ends late, is cancelled, or when the run ends; the next rollout gets a new one.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from penstock.errors import RewardError, RunError
from penstock.reward.line_process import LineProcess, ProcessPool
from penstock.rollout.agent.function import AgentOptions
from penstock.rollout.agent.session import AgentFault, Function, Model, Task, session_of

INSIDE = Path(__file__).with_name("inside.py")
_START_TIMEOUT_S = 120.0


class FunctionOptions(AgentOptions):
    """The options of a function; those that are not named here are its arguments."""

    python: str = ""
    """The path of another Python, which runs it."""
    processes: int = Field(4, ge=1)
    """Processes that it runs in, one rollout each; an async function without `python` runs in none by default."""

    @field_validator("python")
    @classmethod
    def _can_run(cls, python: str) -> str:
        if python and not os.access(python, os.X_OK):
            raise ValueError(f"got {python!r}, allowed: the path of a Python")
        return python


class CommandOptions(AgentOptions, extra="forbid"):
    """The options of the agent `command`."""

    command: list[str] = Field(min_length=1)
    """Its words, such as ["node", "agent.js"]."""
    processes: int = Field(4, ge=1)
    """Commands that run at once."""


class Pool:
    """Calls a function in one of `size` processes: `async with pool.lend() as call`, `await call(task, model)`."""

    def __init__(self, target: str, size: int, python: str = "") -> None:
        self._processes = ProcessPool(
            guarded(python or sys.executable, "serve", target),
            size,
            name="the agent's process",
            start_timeout_s=_START_TIMEOUT_S,
            environment=_without_python_paths() if python else None,
        )

    @asynccontextmanager
    async def lend(self) -> AsyncIterator[Function]:
        """Lend a process that is ready, as a function. A rollout's time begins when it is lent."""
        async with self._processes.lend() as process:
            yield functools.partial(_call, process)

    async def close(self) -> None:
        await self._processes.close()


async def _call(process: LineProcess, task: Task, model: Model, **options: Any) -> Any:
    """Make one rollout in the process; its tools ask the session in between."""
    answer = await process.ask({**_request(task, model), "options": options})
    while "tool" in answer:
        try:
            permission = await session_of(model).answer_tool(answer)
        except BaseException:  # the process is in the middle of its rollout
            await process.kill()
            raise
        answer = await process.ask(permission)
    if "error" in answer:
        raise AgentFault(answer["error"])
    model.reward(answer["earned"])
    return answer["result"]


class Command:
    """Runs a command line per rollout: the task on stdin, the reward is the last line of its output."""

    def __init__(self, words: Sequence[str], size: int) -> None:
        self._command = guarded(sys.executable, "exec", *words)
        self._slots = asyncio.Semaphore(size)
        self._running: set[LineProcess] = set()

    async def __call__(self, task: Task, model: Model) -> Any:
        environment = {
            **os.environ,
            "OPENAI_BASE_URL": model.base_url,
            "OPENAI_API_KEY": model.api_key,
            "OPENAI_MODEL": model.name,
            "PENSTOCK_SEED": str(model.seed),
        }
        process = await LineProcess.start(self._command, environment=environment)
        self._running.add(process)
        try:
            code, output = await process.finish(json.dumps(asdict(task)))
        finally:
            self._running.discard(process)
        lines = output.strip().splitlines()
        if code:
            raise RunError(f"the command ended with code {code}: {process.last_words}")
        try:
            return float(lines[-1])
        except (IndexError, ValueError):
            last = lines[-1] if lines else "no output"
            raise RewardError(f"the command's last line: got {last!r}, allowed: a number") from None

    @asynccontextmanager
    async def lend(self) -> AsyncIterator[Function]:
        """Lend this function. A rollout's time begins when it is lent, before the command starts."""
        async with self._slots:
            yield self

    async def close(self) -> None:
        for process in list(self._running):
            await process.kill()


def guarded(python: str, *words: str) -> tuple[str, ...]:
    """The command line of a process that ends, with those it starts, when this one has ended."""
    return (python, str(INSIDE), str(os.getpid()), *words)


def _without_python_paths() -> dict[str, str]:
    """The environment without the driver's packages, of which another Python may have other versions."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "PYTHONHOME")
    }


def _request(task: Task, model: Model) -> dict[str, Any]:
    return {
        "task": asdict(task),
        "base_url": model.base_url,
        "api_key": model.api_key,
        "name": model.name,
        "seed": model.seed,
        "tool_timeout_s": session_of(model).limits.tool_timeout_s,
    }
