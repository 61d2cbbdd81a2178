"""The one protocol between the driver and its workers: messages, and the server of a part in a worker.

A call is (number, method, arguments), its answer (number, result, error), pickled with its length before it.
While a worker starts it also sends (STAGE, (what it does, since when), None). Async methods of a part run on
the worker's event loop; blocking ones run one after another on a single thread, so that a long `train` does
not keep the loop from answering `request_stop` or `progress`. Worker processes, Ray actors and threads of
the driver serve their parts with it.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import pickle
import struct
import sys
import threading
import traceback
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from penstock.config.plugins import load
from penstock.errors import PartFailed, PenstockError
from penstock.waits import tell_stage

# Thread-safe methods that must not queue behind a running one.
IMMEDIATE = ("request_stop", "progress")
LONGEST_LINE = 400
FRAME = struct.Struct("!Q")
STAGE = -1
BYTES_PER_SECOND = 50e6  # read or written: they count as a second of work
# Fields of /proc/PID/stat after the name: the state; the parent; user and system time, own and of ended children.
_STATE, _PARENT, _TIMES = 0, 1, slice(11, 15)


class RpcServer:
    """Builds one part and calls its methods."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._part: Any = None

    async def build_named(self, search_path: list[str], factory: str, args: tuple) -> None:
        """Build the part with `factory`, a "module:callable" found on the driver's search path."""
        sys.path[:] = [*search_path, *(p for p in sys.path if p not in search_path)]
        tell_stage("importing")
        await self.build(lambda: load(self._name, factory, {})(*args))

    async def build(self, make: Callable[[], Any]) -> None:
        """Build the part on the server's thread, then start it."""
        loop = asyncio.get_running_loop()
        self._part = await loop.run_in_executor(self._thread, make)
        start = getattr(self._part, "start", None)
        if start is not None:
            await start()

    async def close(self) -> None:
        """Ask a running method to give up, close the part, end the thread."""
        request_stop = getattr(self._part, "request_stop", None)
        if request_stop is not None:
            request_stop()
        close = getattr(self._part, "close", None)
        if close is not None:
            await close()
        await asyncio.to_thread(self._thread.shutdown)

    async def call(self, method: str, args: tuple) -> Any:
        function = getattr(self._part, method)
        if inspect.iscoroutinefunction(function):
            return await function(*args)
        if method in IMMEDIATE:
            return function(*args)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, function, *args)


def portable_error(name: str, error: Exception) -> Exception:
    """An error that the driver can unpickle: ours as it is, any other as one PartFailed line.

    The traceback of other errors goes to the log. The driver needs no package of the worker for this.
    """
    if isinstance(error, PenstockError):
        try:
            pickle.loads(pickle.dumps(error))
            return error
        except Exception:  # a PenstockError whose constructor pickle cannot call
            return PartFailed(f"{name}: {one_line(error)}")
    text = "".join(traceback.format_exception(error))
    print(text, file=sys.stderr, end="", flush=True)
    failed = PartFailed(f"{name}: {one_line(error)}")
    failed.add_note(text)
    return failed


def with_log_path(error: Exception, log_path: Path) -> Exception:
    """Add to a PartFailed the log that holds its traceback; return any other error as it is."""
    if isinstance(error, PartFailed):
        error.args = (f"{error} (traceback: {log_path})",)
    return error


def append_to_log(folder: Path, name: str, text: str) -> str:
    """Append to the log of a worker from the driver, whose node holds the run folder.

    Return the log's path, with the reason if nothing could be written: a full disk hides no fault.
    """
    path = folder / f"{name}.log"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8", errors="backslashreplace") as log:
            log.write(f"{text.rstrip()}\n")
    except OSError as error:
        return f"{path}, not written: {error.strerror}"
    return str(path)


def one_line(error: BaseException) -> str:
    """The type and message of an error; a group with one error counts as that error."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    said = " ".join(str(error).split())
    return f"{type(error).__name__}: {said[:LONGEST_LINE]}".removesuffix(": ")


def stacks() -> str:
    """The stack of every thread of this process."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame)).rstrip()}"
        for ident, frame in sys._current_frames().items()
    )


async def read_frame(reader: asyncio.StreamReader) -> Any:
    """The next pickled message; raise IncompleteReadError at the end of the stream."""
    (length,) = FRAME.unpack(await reader.readexactly(FRAME.size))
    return pickle.loads(await reader.readexactly(length))


def frame(message: Any) -> bytes:
    """A pickled message with its length before it."""
    payload = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return FRAME.pack(len(payload)) + payload


# -- how much a process has worked ------------------------------------------------------------


def activity_of(pid: int, proc: Path = Path("/proc")) -> float | None:
    """Seconds of work since the process began; None if there is no such process. Read from /proc: it may be blocked.

    Counts the processor time of a process and of its children (a compiler, an engine's own processes), plus
    one second for every 50 MB that they read or wrote. Tells a busy process from a waiting one, not useful
    work from spinning: a collective may wait by spinning.
    """
    times, children = _read_times(proc)
    if pid not in times:
        return None
    total, left = 0.0, [pid]
    while left:
        process = left.pop()
        total += times[process] + _bytes_moved(proc / str(process)) / BYTES_PER_SECOND
        left += children[process]
    return total


def is_stopped(pid: int, proc: Path = Path("/proc")) -> bool:
    """Whether a signal (SIGSTOP) or a debugger has stopped the process: it answers nothing."""
    try:
        return _fields(proc / str(pid) / "stat")[_STATE] in ("T", "t")
    except OSError:  # no such process, or no /proc
        return False


def _fields(stat: Path) -> list[str]:
    return stat.read_text(errors="replace").rpartition(")")[2].split()


def _read_times(proc: Path) -> tuple[dict[int, float], defaultdict[int, list[int]]]:
    ticks = os.sysconf("SC_CLK_TCK")
    times: dict[int, float] = {}
    children: defaultdict[int, list[int]] = defaultdict(list)
    for path in proc.glob("[0-9]*/stat"):
        try:
            fields = _fields(path)
        except OSError:  # the process has ended meanwhile
            continue
        pid = int(path.parent.name)
        times[pid] = sum(map(int, fields[_TIMES])) / ticks
        children[int(fields[_PARENT])].append(pid)
    return times, children


def _bytes_moved(process: Path) -> int:
    try:
        lines = (process / "io").read_text().splitlines()
    except OSError:  # the process has ended, or belongs to another user
        return 0
    counts = dict(line.split(": ") for line in lines)
    return int(counts["rchar"]) + int(counts["wchar"])
