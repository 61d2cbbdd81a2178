"""The first process inside one sandbox: forks a child per test, watches it, reports to the host.

Consumes jobs from the host's socket, produces what each child left: output, report, exit status. It is
woken by the child's pipes, the child's end, the host's socket and the wall-time limit. It runs no
untrusted code itself and knows no expected result. When the host hangs up it ends, and the kernel ends
everything else in its process namespace.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import socket
import sys
import time
from typing import Any, NoReturn

from penstock.reward.sandbox.inside import child, kernel, landlock, namespaces, seccomp, wire


class Zygote:
    """One sandbox's first process, and what it needs to make the process of a test."""

    def __init__(
        self, host: socket.socket, plan: namespaces.Plan, scratch: str, ruleset: int | None
    ) -> None:
        self._host, self._plan, self._scratch, self._ruleset = host, plan, scratch, ruleset
        self._used = False

    def serve(self, facts: dict[str, Any]) -> NoReturn:
        """Answer jobs until the host hangs up."""
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        wire.send(self._host, {"ready": facts})
        while True:
            try:
                job, descriptors = wire.receive(self._host)
                outcome, blobs = self._run(job, descriptors)
                wire.send(self._host, outcome, blobs=blobs)
            except wire.Closed:
                os._exit(0)

    def _run(
        self, job: dict[str, Any], descriptors: list[int]
    ) -> tuple[dict[str, Any], list[bytes]]:
        if self._used and self._plan.namespaces:
            namespaces.renew_scratch(self._plan)
            landlock.allow_writing(self._ruleset, self._scratch)
        self._used = True
        limits = job["limits"]
        # a sealed file in memory, which can only be read
        standard_in = os.memfd_create("stdin", os.MFD_ALLOW_SEALING)
        data = memoryview(job.get("stdin", "").encode("utf-8", "surrogatepass"))
        while data:
            data = data[os.write(standard_in, data) :]
        os.lseek(standard_in, 0, os.SEEK_SET)
        seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
        fcntl.fcntl(standard_in, fcntl.F_ADD_SEALS, seals)
        reads, writes = zip(*(os.pipe() for _ in range(3)), strict=True)
        started = time.monotonic()
        own_pid, pid = os.getpid(), os.fork()
        if pid == 0:
            self._become_child(own_pid, job, (standard_in, *writes, *descriptors))
        for descriptor in (standard_in, *writes, *descriptors):
            os.close(descriptor)
        watch = _Watch(pid, reads, limits)
        try:
            watch.until_end(self._host, started)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        watch.drain()
        outcome = {
            "status": status,
            "stopped": watch.stopped,
            "wall_s": time.monotonic() - started,
        }
        return outcome, [watch.taken(index) for index in range(3)]

    def _become_child(
        self, parent: int, job: dict[str, Any], descriptors: tuple[int, ...]
    ) -> NoReturn:
        """Give up the last rights and all but the needed descriptors, and enter the working folder."""
        try:
            kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)
            os.setpgid(0, 0)  # signals to its group do not reach us
            os.chdir(self._scratch)
            kernel.hold_capabilities(0)
            landlock.restrict(self._ruleset)
            out_of_the_way = [
                fcntl.fcntl(descriptor, fcntl.F_DUPFD, 16) for descriptor in descriptors
            ]
            for place, descriptor in enumerate(out_of_the_way):
                os.dup2(descriptor, place)
            os.closerange(len(out_of_the_way), 1 << 20)
            signal.signal(signal.SIGPIPE, signal.SIG_IGN)
            child.run(job, job["limits"])
        except BaseException as error:  # nothing may come back into the zygote's own code
            os.write(2, repr(error).encode())
        os._exit(1)


class _Watch:
    """Reads a child's output, up to the limits, until it ends or must be stopped."""

    def __init__(self, pid: int, pipes: tuple[int, ...], limits: dict[str, Any]) -> None:
        self._pid, self._limit_s = pid, limits["wall_s"]
        self._pipes = list(pipes)
        self._most_bytes = limits["output_bytes"]
        self._read: list[list[bytes]] = [[], [], []]
        self._sizes = [0, 0, 0]
        self.stopped = ""  # why it was stopped: wall | output; empty: it ended by itself
        for pipe in pipes:
            os.set_blocking(pipe, False)

    def until_end(self, host: socket.socket, started: float) -> None:
        """Wait for the child's end, its time limit or output limit; raise Closed if the host is gone."""
        ended = os.pidfd_open(self._pid)
        poller = select.poll()
        for pipe in self._pipes:
            poller.register(pipe, select.POLLIN)
        poller.register(ended, select.POLLIN)
        poller.register(host, select.POLLRDHUP | select.POLLHUP)
        try:
            while not self.stopped:
                remaining_s = started + self._limit_s - time.monotonic()
                if remaining_s <= 0:
                    self.stopped = "wall"
                    return
                for descriptor, _ in poller.poll(remaining_s * 1000 + 1):
                    if descriptor == host.fileno():
                        raise wire.Closed
                    if descriptor == ended:
                        return
                    if not self._take(self._pipes.index(descriptor)):
                        poller.unregister(descriptor)
        finally:
            os.close(ended)

    def _take(self, index: int) -> bool:
        """Read the available data; return False at the end of the pipe."""
        try:
            data = os.read(self._pipes[index], 1 << 18)
        except BlockingIOError:
            return True
        room = self._most_bytes - self._sizes[index]
        self._read[index].append(data[:room])
        self._sizes[index] += len(data)
        if len(data) > room:
            self.stopped = "output"
            return False
        return bool(data)

    def drain(self) -> None:
        """Read the rest of the pipes after the child's end."""
        for index, pipe in enumerate(self._pipes):
            while select.select([pipe], [], [], 0)[0] and self._take(index):
                continue
            os.close(pipe)

    def taken(self, index: int) -> bytes:
        return b"".join(self._read[index])


def warm() -> None:
    """Import the modules that solutions use most and make filters, so that a fork has them already."""
    import bisect, collections, copy, datetime, decimal, fractions, functools, heapq  # noqa: E401, F401, I001
    import itertools, json, math, operator, random, re, statistics, string, typing  # noqa: E401, F401

    if kernel.ARCH is not None:
        for scratch, threads in ((True, True), (False, True), (False, False)):
            seccomp.build_filter(kernel.ARCH, 1, scratch=scratch, threads=threads)
    sys.setrecursionlimit(1000)
