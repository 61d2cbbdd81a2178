"""Symbolic comparisons in worker processes, each with a time-out from outside. Layer 1.

Algebra on what a model writes may take for ever or eat all memory, and math-verify's own time-out
works in a main thread only. So each worker is a process of its own: past the time-out it is killed and
replaced, and only that one answer is wrong. Workers start at the first comparison. Results are
remembered, because the members of a group often give the same answer.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from penstock.errors import RewardError

START_TIMEOUT_S = 120.0
CACHE_SIZE = 8192
MEMORY_BYTES = 4 << 30  # address space of one worker


@dataclass(slots=True, frozen=True)
class Comparison:
    """Whether two answers are equal; `note` says why nothing was found out."""

    equal: bool
    note: str = ""


class _WorkerGone(Exception):
    """The process ended without an answer."""


class _WorkerSlow(Exception):
    """The process gave no answer in time."""


class _Worker:
    """One process that compares pairs, one at a time."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "penstock.reward.math_worker", str(MEMORY_BYTES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the run, which closes its workers itself
        )
        try:
            self._read_line(START_TIMEOUT_S)
        except (_WorkerGone, _WorkerSlow):
            self.kill()
            raise RewardError(
                "the symbolic comparison does not start: "
                "`python -m penstock.reward.math_worker` ended or hung (is math-verify installed?)"
            ) from None

    def ask(self, gold: str, answer: str, timeout_s: float) -> bool:
        """Raises _WorkerGone or _WorkerSlow; the worker is of no use after either."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps([gold, answer]).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise _WorkerGone from None
        return self._read_line(timeout_s) == b"1"

    def _read_line(self, timeout_s: float) -> bytes:
        assert self._process.stdout is not None
        descriptor, line = self._process.stdout.fileno(), b""
        deadline = time.monotonic() + timeout_s
        while not line.endswith(b"\n"):
            if not select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise _WorkerSlow
            chunk = os.read(descriptor, 64)
            if not chunk:
                raise _WorkerGone
            line += chunk
        return line.strip()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:
                continue  # it was killed with a request still in the buffer


class MathPool:
    """Consumes pairs of answers, produces Comparisons; at most `workers` at a time."""

    def __init__(self, workers: int, timeout_s: float) -> None:
        self._size, self._timeout_s = workers, timeout_s
        self._lock = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None
        self._alive: set[_Worker] = set()
        self._idle: list[_Worker] = []
        self._known: OrderedDict[tuple[str, str], Comparison] = OrderedDict()
        self._closed = False

    @property
    def num_workers(self) -> int:
        """Processes that run now."""
        return len(self._alive)

    async def compare(self, gold: str, answer: str) -> Comparison:
        """Whether algebra finds the two equal; an answer that cannot be handled is not equal."""
        with self._lock:
            known = self._known.get((gold, answer))
            if known is not None:
                self._known.move_to_end((gold, answer))
                return known
            self._closed = False
            if self._threads is None:
                self._threads = ThreadPoolExecutor(self._size, thread_name_prefix="math")
            threads = self._threads
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(threads, self._compare, gold, answer)

    def _compare(self, gold: str, answer: str) -> Comparison:
        comparison = self._ask(gold, answer)
        with self._lock:
            self._known[gold, answer] = comparison
            if len(self._known) > CACHE_SIZE:
                self._known.popitem(last=False)
        return comparison

    def _ask(self, gold: str, answer: str) -> Comparison:
        for _ in range(2):  # a first death may have been meant for another, a second is this pair's
            worker = self._take()
            try:
                equal = worker.ask(gold, answer, self._timeout_s)
            except _WorkerSlow:
                self._end(worker)
                return Comparison(False, f"comparison took more than {self._timeout_s:g} s")
            except _WorkerGone:
                self._end(worker)
                continue
            with self._lock:
                self._idle.append(worker)
            return Comparison(equal)
        return Comparison(False, "comparison crashed its worker")

    def _take(self) -> _Worker:
        with self._lock:
            if self._closed:
                raise RewardError("the symbolic comparison was closed while it ran")
            if self._idle:
                return self._idle.pop()
        worker = _Worker()
        with self._lock:
            self._alive.add(worker)
        return worker

    def _end(self, worker: _Worker) -> None:
        worker.kill()
        with self._lock:
            self._alive.discard(worker)

    async def close(self) -> None:
        """End every process. The pool may be used again; it starts new ones."""
        with self._lock:
            threads, self._threads, self._closed = self._threads, None, True
        if threads is not None:
            await asyncio.to_thread(threads.shutdown, wait=True, cancel_futures=True)
        with self._lock:
            workers, self._alive, self._idle = list(self._alive), set(), []
        for worker in workers:
            worker.kill()
