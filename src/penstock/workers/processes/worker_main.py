"""The main program of a worker process: serves one part over a socket.

Run as `python -m penstock.workers.processes.worker_main SOCKET PIPE [IMPORT...]`. The worker exits as soon as the
driver ends. SIGUSR1 writes the stack of every thread to the worker's log, then a byte to the pipe, even if no
thread can run Python.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Coroutine, Sequence
from typing import Any

from penstock.waits import listen, tell_stage
from penstock.workers.rpc import (
    STAGE,
    RpcServer,
    frame,
    portable_error,
    read_frame,
)

CUDA = "cuda:"  # an import "cuda:N" stands for the context of GPU number N


def prepare(imports: Sequence[str]) -> None:
    """Import modules, and open the context of a GPU on a thread meanwhile.

    Nothing is collected during the imports, nor are their objects later: that takes a sixth of the
    time. A module that cannot be imported is left out: what needs it will say why. Files of the working
    directory, which `python -m` searches first, hide no package.
    """
    sys.path.append(sys.path.pop(0))
    gc.disable()
    for name in imports:
        if name.startswith(CUDA):
            number = int(name.removeprefix(CUDA))
            threading.Thread(target=_open_context, args=(number,), daemon=True).start()
            continue
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()
    gc.enable()


def _open_context(number: int) -> None:
    """Make the context of a GPU that torch will use; ctypes holds no interpreter lock meanwhile.

    Do nothing where there is no GPU or the driver refuses: torch will say why.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    count, device, context = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return
    if not driver.cuDeviceGet(ctypes.byref(device), number % count.value):
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)


async def serve(connection: socket.socket) -> None:
    """Consumes calls from the driver, produces replies, until the driver closes the socket."""
    reader, writer = await asyncio.open_connection(sock=connection)
    search_path, name, log_path, factory, args = await read_frame(reader)
    # of which a process that was started early knew nothing
    log = os.open(log_path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)
    loop = asyncio.get_running_loop()

    def send(text: str) -> None:
        stage = (STAGE, (text, time.time()), None)
        loop.call_soon_threadsafe(writer.write, frame(stage))

    listen(send)
    server = RpcServer(name)
    calls: set[asyncio.Task[None]] = set()
    try:
        while True:
            call_id, method, call_args = await read_frame(reader)
            work: Coroutine[Any, Any, Any]
            if method == "__start__":
                work = server.build_named(search_path, factory, args)
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


async def _answer(writer: asyncio.StreamWriter, name: str, call_id: int, work: Any) -> None:
    try:
        writer.write(frame((call_id, await work, None)))
    except Exception as error:  # raised by the part, or by an answer that cannot be sent
        writer.write(frame((call_id, None, portable_error(name, error))))
    await writer.drain()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    descriptors, imports = sys.argv[1:3], sys.argv[3:]
    pipe, connection = int(descriptors[1]), socket.socket(fileno=int(descriptors[0]))
    # stacks, and then the byte to the pipe, are written in the signal handler itself
    signal.signal(signal.SIGUSR1, lambda *_: None)
    signal.set_wakeup_fd(pipe, warn_on_full_buffer=False)
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=True)
    if imports:
        listen(lambda text: connection.sendall(frame((STAGE, (text, time.time()), None))))
        with contextlib.suppress(ConnectionError):  # the driver is gone: `serve` ends at once
            tell_stage("importing torch and transformers")
        prepare(imports)
    asyncio.run(serve(connection))


if __name__ == "__main__":
    main()
