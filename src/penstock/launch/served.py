"""The part inside a worker, whatever the worker is: a process behind a socket or a Ray actor. Layer 5.

Async methods run on the worker's event loop; the others run one after another on a single thread,
so that a long `train` does not keep the loop from hearing `request_stop` or telling its progress.
"""

from __future__ import annotations

import asyncio
import inspect
import pickle
import sys
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from penstock.errors import PenstockError, RunError
from penstock.plugins import load

# Thread-safe methods that must not queue behind a running one.
IMMEDIATE = ("request_stop", "progress")


class Served:
    """Builds one part from "module:callable" and calls its methods."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._part: Any = None

    async def build(self, search_path: list[str], factory: str, args: tuple, kwargs: dict) -> None:
        sys.path[:] = [*search_path, *(p for p in sys.path if p not in search_path)]
        loop = asyncio.get_running_loop()
        make = await loop.run_in_executor(self._thread, lambda: load(self._name, factory, {}))
        self._part = await loop.run_in_executor(self._thread, lambda: make(*args, **kwargs))
        start = getattr(self._part, "start", None)
        if start is not None:
            await start()

    async def call(self, method: str, args: tuple, kwargs: dict) -> Any:
        function = getattr(self._part, method)
        if inspect.iscoroutinefunction(function):
            return await function(*args, **kwargs)
        if method in IMMEDIATE:
            return function(*args, **kwargs)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, lambda: function(*args, **kwargs))


def portable(error: Exception) -> Exception:
    """The error itself where it survives pickling, else its text; strange ones go to the log."""
    if not isinstance(error, PenstockError):
        traceback.print_exception(error)
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RunError(f"{type(error).__name__}: {error}")
    return error


def stacks() -> str:
    """What every thread of this process is doing, in words."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame)).rstrip()}"
        for ident, frame in sys._current_frames().items()
    )
