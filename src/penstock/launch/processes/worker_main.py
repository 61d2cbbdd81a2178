"""The main program of a worker process: serves one part over a socket.

Run as `python -m penstock.launch.processes.worker_main SOCKET PIPE`. The worker exits as soon as the driver
ends. SIGUSR1 writes the stack of every thread to the worker's log, then a byte to the pipe, even if no
thread can run Python.
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
from penstock.launch.rpc_server import RpcServer, portable_error, stacks


async def serve(connection: socket.socket) -> None:
    """Consumes calls from the driver, produces replies, until the driver closes the socket."""
    reader, writer = await asyncio.open_connection(sock=connection)
    search_path, name, factory, args = await read_frame(reader)
    server = RpcServer(name)
    calls: set[asyncio.Task[None]] = set()
    try:
        while True:
            call_id, method, call_args = await read_frame(reader)
            work: Coroutine[Any, Any, Any]
            if method == "__start__":
                work = server.build_named(search_path, factory, args)
            elif method == "__stack__":
                work = _stacks()
            else:
                work = server.call(method, call_args)
            task = asyncio.create_task(_answer(writer, name, call_id, work))
            calls.add(task)
            task.add_done_callback(calls.discard)
    except (asyncio.IncompleteReadError, ConnectionError):
        sys.stdout.flush()
        sys.stderr.flush()
        _end()  # the driver is gone: a thread in a model step must not keep the process alive


def _end() -> None:
    """End this process and those it started: one of vLLM's would keep its part of the GPU's memory."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


async def _stacks() -> str:
    return stacks()


async def _answer(writer: asyncio.StreamWriter, name: str, call_id: int, work: Any) -> None:
    try:
        write_frame(writer, (call_id, await work, None))
    except Exception as error:  # raised by the part, or by an answer that cannot be sent
        write_frame(writer, (call_id, None, portable_error(name, error)))
    await writer.drain()


def _dump_stacks_on_signal(pipe: int) -> None:
    """Write all stacks to the log on SIGUSR1, then a byte to `pipe`, both in the signal handler itself."""
    signal.signal(signal.SIGUSR1, lambda *_: None)
    signal.set_wakeup_fd(pipe, warn_on_full_buffer=False)
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=True)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection, pipe = map(int, sys.argv[1:])
    _dump_stacks_on_signal(pipe)
    asyncio.run(serve(socket.socket(fileno=connection)))


if __name__ == "__main__":
    main()
