"""The main program of a worker process: builds one part and serves its methods. Layer 5.

Run as `python -m penstock.launch.worker FD`. Async methods run on the event loop; the others run one
after another on a single thread, so that a long `train` does not stop the loop from hearing
`request_stop` or the end of the driver, at which the worker leaves at once.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import pickle
import signal
import socket
import sys
import traceback
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from penstock.errors import PenstockError, RunError
from penstock.launch.remote import read_frame, write_frame
from penstock.plugins import load

IMMEDIATE = ("request_stop",)  # thread-safe methods that must not queue behind a running one


async def serve(connection: socket.socket) -> None:
    """Consumes calls from the driver, produces replies, until the driver closes the socket."""
    reader, writer = await asyncio.open_connection(sock=connection)
    search_path, name, factory, args, kwargs = await read_frame(reader)
    sys.path[:] = search_path
    worker = _Worker(name, writer)
    calls: set[asyncio.Task[None]] = set()
    try:
        while True:
            call_id, method, call_args, call_kwargs = await read_frame(reader)
            if method == "__start__":
                work = worker.answer(call_id, worker.build(factory, args, kwargs))
            else:
                work = worker.answer(call_id, worker.call(method, call_args, call_kwargs))
            task = asyncio.create_task(work)
            calls.add(task)
            task.add_done_callback(calls.discard)
    except (asyncio.IncompleteReadError, ConnectionError):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # the driver is gone: a thread deep in a model step must not keep us alive


class _Worker:
    """The served object and the thread that its blocking methods run on."""

    def __init__(self, name: str, writer: asyncio.StreamWriter) -> None:
        self._name = name
        self._writer = writer
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._served: Any = None

    async def build(self, factory: str, args: tuple, kwargs: dict) -> None:
        loop = asyncio.get_running_loop()
        make = await loop.run_in_executor(self._thread, lambda: load(self._name, factory, {}))
        self._served = await loop.run_in_executor(self._thread, lambda: make(*args, **kwargs))
        start = getattr(self._served, "start", None)
        if start is not None:
            await start()

    async def call(self, method: str, args: tuple, kwargs: dict) -> Any:
        function = getattr(self._served, method)
        if inspect.iscoroutinefunction(function):
            return await function(*args, **kwargs)
        if method in IMMEDIATE:
            return function(*args, **kwargs)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, lambda: function(*args, **kwargs))

    async def answer(self, call_id: int, work: Any) -> None:
        reply: tuple[int, Any, Exception | None]
        try:
            reply = (call_id, await work, None)
        except Exception as error:
            if not isinstance(error, PenstockError):
                traceback.print_exc()
            reply = (call_id, None, _portable(error))
        write_frame(self._writer, reply)
        await self._writer.drain()


def _portable(error: Exception) -> Exception:
    """The error itself where it survives pickling, else its text."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RunError(f"{type(error).__name__}: {error}")
    return error


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asyncio.run(serve(socket.socket(fileno=int(sys.argv[1]))))


if __name__ == "__main__":
    main()
