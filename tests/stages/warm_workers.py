"""Worker processes that are forked from a process with all imports done, to start quickly.

`Nursery` forks itself off the crash server and serves a socket. `install` makes the drivers of this
process ask there instead of starting processes. A worker is not a child of the driver, has its working
directory and environment, shares only the descriptors that the driver gave it, and runs the real worker
program.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from penstock.workers.processes import process_worker, worker_main


class Nursery:
    """A process that forks workers when asked, until the crash server is gone."""

    def __init__(self, path: Path) -> None:
        self.path = path
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        listener.listen()
        end_of_server, self._held_open = os.pipe()
        if os.fork() == 0:
            os.close(self._held_open)
            _serve(listener, end_of_server)
            os._exit(0)
        listener.close()
        os.close(end_of_server)


def install(nursery: Path) -> None:
    """Make this process get its workers from the nursery that serves that socket."""

    def spawn(descriptors: tuple[int, ...], log_path: Path, *_: Any) -> ForkedWorker:
        surroundings = {
            "log": str(log_path.absolute()),
            "directory": os.getcwd(),
            "environment": dict(os.environ),
        }
        with socket.socket(socket.AF_UNIX) as asking:
            asking.connect(str(nursery))
            socket.send_fds(asking, [json.dumps(surroundings).encode()], [*descriptors])
            return ForkedWorker(int(asking.recv(64)))

    process_worker._spawn = spawn  # type: ignore[assignment]


def _serve(listener: socket.socket, end_of_server: int) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # reap ended workers automatically
    while end_of_server not in select.select([listener, end_of_server], [], [])[0]:
        asked, _ = listener.accept()
        with asked:
            message, descriptors, *_ = socket.recv_fds(asked, 1 << 17, 4)
            if not descriptors:  # the driver was killed before it could ask
                continue
            child = os.fork()
            if child == 0:
                asked.close()
                listener.close()
                os.close(end_of_server)
                _be_a_worker(json.loads(message), descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
            with contextlib.suppress(OSError):  # it was killed while it asked
                asked.sendall(str(child).encode())


def _be_a_worker(surroundings: dict[str, Any], descriptors: list[int]) -> None:
    code = 70
    try:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.chdir(surroundings["directory"])
        os.environ.clear()
        os.environ.update(surroundings["environment"])
        out = os.open(surroundings["log"], os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
        for number, source in ((0, os.open(os.devnull, os.O_RDONLY)), (1, out), (2, out)):
            os.dup2(source, number)
        sys.argv = ["worker", *map(str, descriptors)]
        renew_thread_pool()
        worker_main.main()
        code = 0
    finally:
        sys.stderr.flush()
        os._exit(code)


def renew_thread_pool() -> None:
    """Make torch replace the pool that a fork has broken, before threads ask for it.

    The first call of a forked process replaces it; a second thread that asks meanwhile fails with "Invalid thread pool".
    """
    torch.set_num_threads(torch.get_num_threads())


class ForkedWorker:
    """The part of subprocess.Popen that a driver uses, for a process that is not its child."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        try:
            self._handle = os.pidfd_open(pid)
        except ProcessLookupError:  # it has ended already
            self._handle = -1

    def wait(self, timeout: float | None = None) -> int:
        if self._handle >= 0:
            ended = select.select([self._handle], [], [], timeout)[0]
            if not ended:
                raise subprocess.TimeoutExpired("worker", timeout or 0.0)
        return 0

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def send_signal(self, number: int) -> None:
        if self._handle >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
