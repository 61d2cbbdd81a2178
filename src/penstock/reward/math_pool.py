"""Symbolic comparisons in worker processes, each with a time-out.

Algebra on a model's text may never end or use all memory, and math-verify's own time-out works only in
a main thread. So each worker is a process: past the time-out it is killed and replaced, and only that
answer counts as wrong. Workers start at the first comparison. Results are cached, because the rollouts
of a group often give the same answer.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from penstock.errors import RewardError
from penstock.reward.line_process import LineProcess, ProcessGone, ProcessSlow

START_TIMEOUT_S = 120.0
CACHE_SIZE = 8192
MEMORY_BYTES = 4 << 30  # address space of one worker


@dataclass(slots=True, frozen=True)
class Comparison:
    """Whether two answers are equal; `note` says why the comparison failed."""

    equal: bool
    note: str = ""


class MathPool:
    """Consumes pairs of answers, produces Comparisons; at most `workers` at a time."""

    def __init__(self, workers: int, timeout_s: float) -> None:
        self._size, self._timeout_s = workers, timeout_s
        self._lock = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None
        self._alive: set[LineProcess] = set()
        self._idle: list[LineProcess] = []
        self._known: OrderedDict[tuple[str, str], Comparison] = OrderedDict()
        self._closed = False

    async def compare(self, gold: str, answer: str) -> Comparison:
        """Return whether algebra finds the answers equal; an answer it cannot handle is not equal."""
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
        for _ in range(2):  # another pair may have caused the first death
            worker = self._take()
            try:
                pair = json.dumps([gold, answer])
                equal = worker.ask(pair, self._timeout_s, processor_time=True) == "1"
            except ProcessSlow:
                self._end(worker)
                return Comparison(False, f"comparison took more than {self._timeout_s:g} s")
            except ProcessGone:
                self._end(worker)
                continue
            with self._lock:
                self._idle.append(worker)
            return Comparison(equal)
        return Comparison(False, "comparison crashed its worker")

    def _take(self) -> LineProcess:
        with self._lock:
            if self._closed:
                raise RewardError("the symbolic comparison was closed while it ran")
            if self._idle:
                return self._idle.pop()
        worker = LineProcess(
            [sys.executable, "-m", "penstock.reward.math_worker", str(MEMORY_BYTES)],
            START_TIMEOUT_S,
        )
        with self._lock:
            self._alive.add(worker)
        return worker

    def _end(self, worker: LineProcess) -> None:
        worker.kill()
        with self._lock:
            self._alive.discard(worker)

    async def close(self) -> None:
        """End every process. The pool may be used again; it then starts new ones."""
        with self._lock:
            threads, self._threads, self._closed = self._threads, None, True
        if threads is not None:
            await asyncio.to_thread(threads.shutdown, wait=True, cancel_futures=True)
        with self._lock:
            workers, self._alive, self._idle = list(self._alive), set(), []
        for worker in workers:
            worker.kill()
