"""The main program of a worker process: serves one part over a socket.

Run as `python -m penstock.launch.processes.worker_main SOCKET PIPE`. At the end of the driver the worker leaves at
once. SIGUSR1 writes the stack of every thread to the worker's log, then a byte to the pipe, even when
no thread of it can run Python.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
import socket
import sys
from collections.abc import Coroutine
from typing import Any

from penstock.launch.processes.process_worker import read_frame, write_frame
from penstock.launch.rpc_server import RpcServer, portable, stacks


async def serve(connection: socket.socket) -> None:
    """Consumes calls from the driver, produces replies, until the driver closes the socket."""
    reader, writer = await asyncio.open_connection(sock=connection)
    search_path, name, factory, args, kwargs = await read_frame(reader)
    server = RpcServer(name)
    calls: set[asyncio.Task[None]] = set()
    try:
        while True:
            call_id, method, call_args, call_kwargs = await read_frame(reader)
            work: Coroutine[Any, Any, Any]
            if method == "__start__":
                work = server.build_named(search_path, factory, args, kwargs)
            elif method == "__stack__":
                work = _stacks()
            else:
                work = server.call(method, call_args, call_kwargs)
            task = asyncio.create_task(_answer(writer, name, call_id, work))
            calls.add(task)
            task.add_done_callback(calls.discard)
    except (asyncio.IncompleteReadError, ConnectionError):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # the driver is gone: a thread deep in a model step must not keep us alive


async def _stacks() -> str:
    return stacks()


async def _answer(writer: asyncio.StreamWriter, name: str, call_id: int, work: Any) -> None:
    reply: tuple[int, Any, Exception | None]
    try:
        reply = (call_id, await work, None)
    except Exception as error:
        reply = (call_id, None, portable(name, error))
    write_frame(writer, reply)
    await writer.drain()


def _tell_of_stacks(pipe: int) -> None:
    """All of it happens within the signal: the dump first, then Python's own note of a signal."""
    signal.signal(signal.SIGUSR1, lambda *_: None)
    signal.set_wakeup_fd(pipe, warn_on_full_buffer=False)
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=True)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection, pipe = map(int, sys.argv[1:])
    _tell_of_stacks(pipe)
    asyncio.run(serve(socket.socket(fileno=connection)))


if __name__ == "__main__":
    main()
