"""The part inside a worker, whatever the worker is: a process behind a socket or a Ray actor.

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

from penstock.errors import PartFailed, PenstockError
from penstock.plugins import load

# Thread-safe methods that must not queue behind a running one.
IMMEDIATE = ("request_stop", "progress")
LONGEST_LINE = 400


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


def portable(name: str, error: Exception) -> Exception:
    """An error of ours as it is. Others are told in a line, and their traceback goes to the log.

    So it does not matter whether the driver has the package that their class comes from.
    """
    if isinstance(error, PenstockError):
        try:
            pickle.loads(pickle.dumps(error))
            return error
        except Exception:  # whatever its constructor wants, the text is told
            return PartFailed(f"{name}: {one_line(error)}")
    text = "".join(traceback.format_exception(error))
    print(text, file=sys.stderr, end="", flush=True)
    failed = PartFailed(f"{name}: {one_line(error)}")
    failed.add_note(text)
    return failed


def one_line(error: BaseException) -> str:
    """Its own type and message; of a group with one error in it, those of that one."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    said = " ".join(str(error).split())
    return f"{type(error).__name__}: {said[:LONGEST_LINE]}".removesuffix(": ")


def stacks() -> str:
    """What every thread of this process is doing, in words."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame)).rstrip()}"
        for ident, frame in sys._current_frames().items()
    )
