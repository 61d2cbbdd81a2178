"""Runs a user's blocking calls on a few threads that stay.

A thread for each call would hold the event loop until that thread runs, up to five milliseconds under
load. Outcomes return in batches, because a wake-up of the event loop costs more than a cheap call. A thread
cannot be killed: a call past its time-out fails, its thread is left to end by itself, another takes its place.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_LONGEST_BATCH_S = 0.005  # an outcome waits this long for others at most


class CallTimeout(Exception):
    """The call ran longer than its time-out."""


@dataclass(slots=True, eq=False)
class _Call:
    function: Callable[[], Any]
    outcome: asyncio.Future[Any]
    result: Any = None
    error: BaseException | None = None


@dataclass(slots=True, eq=False)
class _Worker:
    call: _Call | None = None  # the call that runs now
    since: float = 0.0


class CallThreads:
    """Consumes blocking calls of one event loop, produces their outcomes. Threads start when calls wait."""

    def __init__(self, name: str, count: int, timeout_s: float) -> None:
        self._name, self._count, self._timeout_s = name, count, timeout_s
        self.loop = asyncio.get_running_loop()
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._workers: set[_Worker] = set()
        self._idle = 0
        self._lock = threading.Lock()  # of the two above
        self._timer: asyncio.TimerHandle | None = None

    async def run(self, function: Callable[[], Any]) -> Any:
        """Return what `function` returns, raise what it raises, or CallTimeout."""
        call = _Call(function, self.loop.create_future())
        self._calls.put(call)
        self._start_worker()
        if self._timer is None:
            self._timer = self.loop.call_later(self._timeout_s, self._give_up_late_calls)
        return await call.outcome

    def close(self) -> None:
        """End the threads that wait for calls."""
        with self._lock:
            workers, self._workers = self._workers, set()
        for _ in workers:
            self._calls.put(None)
        if self._timer is not None:
            self._timer.cancel()

    def _start_worker(self) -> None:
        with self._lock:
            if self._idle >= self._calls.qsize() or len(self._workers) >= self._count:
                return
            worker = _Worker()
            self._workers.add(worker)
        threading.Thread(target=self._work, args=(worker,), daemon=True, name=self._name).start()

    def _give_up_late_calls(self) -> None:
        """Fail the calls that run too long; look again when the next one may be too late."""
        self._timer, now = None, time.monotonic()
        starts = [now] if self._calls.qsize() else []
        for worker in list(self._workers):
            call, since = worker.call, worker.since
            if call is None:
                continue
            if now - since < self._timeout_s:
                starts.append(since)
                continue
            with self._lock:
                self._workers.discard(worker)
            if not call.outcome.done():
                call.outcome.set_exception(CallTimeout())
            self._start_worker()
        if starts:
            wait_s = min(starts) + self._timeout_s - now
            self._timer = self.loop.call_later(wait_s, self._give_up_late_calls)

    def _work(self, worker: _Worker) -> None:
        """Consumes calls, produces outcomes; waits in the queue, woken by each call. Ends when given up."""
        done: list[_Call] = []
        returned_at = 0.0
        while True:
            with self._lock:
                if worker not in self._workers:
                    break
                self._idle += 1
            call = self._calls.get()
            with self._lock:
                self._idle -= 1
            if call is None:
                break
            worker.since = time.monotonic()
            worker.call = call
            try:
                call.result = call.function()
            except StopIteration as error:  # which no future can hold
                call.error = RuntimeError(f"StopIteration: {error}")
            except BaseException as error:  # raised again where the call is awaited
                call.error = error
            worker.call = None
            done.append(call)
            now = time.monotonic()
            if not self._calls.qsize() or now - returned_at > _LONGEST_BATCH_S:
                done, returned_at = self._return(done), now
        self._return(done)

    def _return(self, done: list[_Call]) -> list[_Call]:
        """Wake the callers of `done` on the event loop, unless it has ended; return an empty batch."""
        if done and not self.loop.is_closed():
            self.loop.call_soon_threadsafe(_wake_callers, done)
        return []


def _wake_callers(done: list[_Call]) -> None:
    for call in done:
        if call.outcome.done():
            continue  # cancelled, or given up
        if call.error is not None:
            call.outcome.set_exception(call.error)
        else:
            call.outcome.set_result(call.result)
