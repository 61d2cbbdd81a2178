"""Processes that are forked from one with all imports done, to start quickly: workers and servers of tests.

A `Nursery` forks itself off the process that makes it and serves a socket. What `start` asks it for is not a child
of whoever asks, and has the asker's directory and environment, and only the descriptors that it is given.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import torch

OF_TESTS: Nursery | None = None  # what forks programs for the tests of this process


class Nursery:
    """A process that forks programs when asked, until the process that made it is gone."""

    def __init__(self, path: Path) -> None:
        self.path = path
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        listener.listen()
        end_of_maker, self._held_open = os.pipe()
        if os.fork() == 0:
            os.close(self._held_open)
            _let_go_of_all_but({2, listener.fileno(), end_of_maker})
            _serve(listener, end_of_maker)
            os._exit(0)
        listener.close()
        os.close(end_of_maker)


def open_program(
    program: str,
    arguments: Sequence[str] = (),
    *,
    directory: Path | None = None,
    environment: Mapping[str, str] = os.environ,
) -> ForkedProcess | subprocess.Popen[str]:
    """Start "module:function" with pipes, forked where this test process has a nursery."""
    if OF_TESTS is None:
        module, name = program.split(":")
        code = f"import gc; gc.disable(); from {module} import {name}; {name}()"
        return subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
            cwd=directory, env=environment,
        )  # fmt: skip
    (its_input, requests), (answers, its_output) = os.pipe(), os.pipe()
    try:
        process = start(
            OF_TESTS.path, program, arguments, streams=(its_input, its_output, 2),
            directory=directory, environment=environment,
        )  # fmt: skip
    finally:
        os.close(its_input)
        os.close(its_output)
    process.stdin = os.fdopen(requests, "w", buffering=1)
    process.stdout = os.fdopen(answers)
    return process


def start(
    nursery: Path | str,
    program: str,
    arguments: Sequence[str] = (),
    *,
    streams: tuple[int, int, int],
    passed: Sequence[int] = (),
    directory: Path | None = None,
    environment: Mapping[str, str] = os.environ,
) -> ForkedProcess:
    """Start "module:function" with these three streams; the numbers of what is passed are its first arguments."""
    surroundings = {
        "program": program,
        "arguments": list(arguments),
        "directory": str(directory or os.getcwd()),
        "environment": dict(environment),
    }
    with socket.socket(socket.AF_UNIX) as asking:
        asking.connect(str(nursery))
        socket.send_fds(asking, [json.dumps(surroundings).encode()], [*streams, *passed])
        return ForkedProcess(int(asking.recv(64)))


def _let_go_of_all_but(kept: set[int]) -> None:
    """Put nothing in the place of what the maker has open, so that others see its end."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept | {nothing} and os.path.exists(f"/proc/self/fd/{name}"):
            os.dup2(nothing, int(name), inheritable=int(name) < 3)
    os.close(nothing)


def _serve(listener: socket.socket, end_of_maker: int) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # reap what has ended automatically
    while end_of_maker not in select.select([listener, end_of_maker], [], [])[0]:
        asked, _ = listener.accept()
        with asked:
            message, descriptors, *_ = socket.recv_fds(asked, 1 << 17, 8)
            if not descriptors:  # the asker was killed before it could ask
                continue
            child = os.fork()
            if child == 0:
                asked.close()
                listener.close()
                os.close(end_of_maker)
                _run(json.loads(message), descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
            with contextlib.suppress(OSError):  # it was killed while it asked
                asked.sendall(str(child).encode())


def _run(surroundings: dict, descriptors: list[int]) -> None:
    code = 70
    try:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.chdir(surroundings["directory"])
        os.environ.clear()
        os.environ.update(surroundings["environment"])
        streams, passed = descriptors[:3], descriptors[3:]
        for number, source in enumerate(streams):
            os.dup2(source, number)
            os.close(source)
        _renew_what_pytest_replaced()
        sys.argv = ["program", *map(str, passed), *surroundings["arguments"]]
        renew_thread_pool()
        module, name = surroundings["program"].split(":")
        getattr(importlib.import_module(module), name)()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _renew_what_pytest_replaced() -> None:
    # closefd=False: a program forked from this one replaces them again, and keeps the descriptors
    sys.stdin, sys.stdout, sys.stderr = (
        os.fdopen(number, mode, buffering=1, closefd=False) for number, mode in enumerate("rww")
    )
    sys.unraisablehook, threading.excepthook = sys.__unraisablehook__, threading.__excepthook__


def renew_thread_pool() -> None:
    """Make torch replace the pool that a fork has broken, before threads ask for it.

    The first call of a forked process replaces it; a second thread that asks meanwhile fails with "Invalid thread pool".
    """
    torch.set_num_threads(torch.get_num_threads())


class ForkedProcess:
    """The part of subprocess.Popen that a driver and tests use, for a process that is not their child."""

    stdin: IO[str] | None = None
    stdout: IO[str] | None = None

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
                raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
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
