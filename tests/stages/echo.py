"""A part for worker processes and Ray actors: it answers, fails, waits, blocks or dies when asked."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import threading
from pathlib import Path

from penstock.errors import UserError

ECHO = f"{__file__}:Echo"  # the name that a worker builds the part by


class Unreadable:
    """Can be pickled and not unpickled."""

    def __reduce__(self) -> tuple:
        return int, ("no number",)


class Echo:
    """The part that a worker serves in these tests."""

    def __init__(self, greeting: str) -> None:
        if greeting == "refuse":
            raise UserError("greeting: got 'refuse', allowed: anything else")
        self._greeting = greeting
        self._stopped = threading.Event()
        self._waiting = threading.Event()

    def greet(self, name: str) -> str:
        return f"{self._greeting} {name}"

    async def greet_async(self, name: str) -> str:
        return f"{self._greeting} {name}"

    def start_process(self) -> int:
        """Return the pid of a process that would not end by itself."""
        return subprocess.Popen(["sleep", "infinity"]).pid

    def fail(self) -> None:
        raise KeyError("missing")

    def fail_strangely(self) -> None:
        class Local(Exception):
            pass

        raise Local("cannot be pickled")

    def unsendable(self) -> object:
        return lambda: None

    def unreadable(self) -> object:
        return Unreadable()

    def wait_for_stop(self) -> str:
        self._waiting.set()
        self._stopped.wait()
        return "stopped"

    async def until_waiting(self) -> None:
        await asyncio.to_thread(self._waiting.wait)

    async def block_the_loop(self, tell: Path | None = None) -> None:
        if tell is not None:
            tell.write_text("blocked")
        self._stopped.wait()

    async def block_every_thread(self) -> None:
        ctypes.PyDLL(None).pause()  # blocks in C and keeps the interpreter lock

    def load(self, folder: str) -> None:
        self.wait_for_stop()

    def progress(self) -> int:
        return 7

    def request_stop(self) -> None:
        self._stopped.set()

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def pid(self) -> int:
        return os.getpid()
