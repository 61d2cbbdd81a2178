"""Runs a user's blocking calls on a few threads that stay.

A thread for each call would hold the event loop until that thread runs, up to five milliseconds under
load. One wake-up of the event loop returns all outcomes that came until it runs, because a wake-up costs more
than a cheap call. A thread cannot be killed: a call past its time-out fails, its thread is left to end by
itself, another takes its place.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.errors import RewardError


class CallTimeout(RewardError):
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
        self._balance = 0  # idle threads less waiting calls; a call counts from its submission on
        self._done: list[_Call] = []  # whose callers are not woken yet
        self._waking = False  # the loop is about to wake them
        self._lock = threading.Lock()  # of the four above
        self._timer: asyncio.TimerHandle | None = None

    async def run(self, function: Callable[[], Any]) -> Any:
        """What `function` returns, raise what it raises, or CallTimeout."""
        return await self.submit(function)

    def submit(self, function: Callable[[], Any]) -> asyncio.Future[Any]:
        """A future of what `function` returns, of what it raises, or of CallTimeout."""
        call = _Call(function, self.loop.create_future())
        self._calls.put(call)
        with self._lock:
            self._balance -= 1
        self._start_worker()
        if self._timer is None:
            self._timer = self.loop.call_later(self._timeout_s, self._give_up_late_calls)
        return call.outcome

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
            if self._balance >= 0 or len(self._workers) >= self._count:
                return
            self._balance += 1
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
                call.outcome.set_exception(self._late())
            self._start_worker()
        if starts:
            wait_s = min(starts) + self._timeout_s - now
            self._timer = self.loop.call_later(wait_s, self._give_up_late_calls)

    def _late(self) -> CallTimeout:
        return CallTimeout(f"no result after {self._timeout_s:g} s (timeout_s)")

    def _work(self, worker: _Worker) -> None:
        """Consumes calls, produces outcomes; waits in the queue, woken by each call. Ends when given up."""
        while (call := self._calls.get()) is not None:
            worker.since = time.monotonic()
            worker.call = call
            try:
                call.result = call.function()
            except StopIteration as error:  # which no future can hold
                call.error = RuntimeError(f"StopIteration: {error}")
            except BaseException as error:  # raised again where the call is awaited
                call.error = error
            worker.call = None
            self._return(call)
            with self._lock:
                if worker not in self._workers:
                    return
                self._balance += 1

    def _return(self, call: _Call) -> None:
        """Hand the outcome to the event loop, and wake the loop unless it is woken already."""
        with self._lock:
            self._done.append(call)
            if self._waking:
                return
            self._waking = True
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self.loop.call_soon_threadsafe(self._wake_callers)

    def _wake_callers(self) -> None:
        with self._lock:
            done, self._done, self._waking = self._done, [], False
        for call in done:
            if call.outcome.done():
                continue  # cancelled, or given up
            if call.error is not None:
                call.outcome.set_exception(call.error)
            else:
                call.outcome.set_result(call.result)
