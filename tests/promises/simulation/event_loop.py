"""An event loop on virtual time that a seed decides: order of callbacks, delays of threads, the end.

Ready callbacks run in a shuffled order; `run_in_executor` calls the function on the loop after a delay; tasks
and futures hash by their number, so that sets of them have one order in every process. `at_tick` is called
before a callback from tick `next_fault` on and returns the next such tick; once `is_killed` is set, no callback
runs any more. No socket, no thread, no system clock.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import random
from asyncio.format_helpers import _format_callback_source
from collections import deque
from collections.abc import Callable
from contextvars import Context, copy_context
from types import CoroutineType
from typing import Any


class DriverKilled(BaseException):
    """The driver's process was killed: nothing of it runs any more."""


class Stuck(BaseException):
    """The driver waits for ever, or far longer than any fault explains."""


class _Numbered:
    """Hashes by its number: sets of these iterate in the same order in every process."""

    _number: int

    def __hash__(self) -> int:
        return self._number

    def __eq__(self, other: object) -> bool:
        return self is other


class SimTask(_Numbered, asyncio.Task):
    def __init__(self, coro: Any, *, loop: SimLoop, name: str | None, context: Any) -> None:
        loop.numbers += 1
        self._number = loop.numbers
        name = name or f"task {loop.numbers}"
        asyncio.Task.__init__(self, coro, loop=loop, name=name, context=context)


class SimFuture(_Numbered, asyncio.Future):
    def __init__(self, *, loop: SimLoop) -> None:
        loop.numbers += 1
        self._number = loop.numbers
        asyncio.Future.__init__(self, loop=loop)


class _Handle(asyncio.Handle):
    """A callback; made faster than asyncio makes it, which asks for its debug mode."""

    __slots__ = ()

    def __init__(self, callback: Any, args: tuple, loop: SimLoop, context: Context | None) -> None:
        self._context = copy_context() if context is None else context
        self._loop, self._callback, self._args = loop, callback, args
        self._cancelled, self._repr, self._source_traceback = False, None, None


class _TimerHandle(asyncio.TimerHandle):
    """A callback at a time; see `_Handle`."""

    __slots__ = ()

    def __init__(
        self, when: float, callback: Any, args: tuple, loop: SimLoop, context: Context | None
    ) -> None:
        self._context = copy_context() if context is None else context
        self._loop, self._callback, self._args = loop, callback, args
        self._cancelled, self._repr, self._source_traceback = False, None, None
        self._when, self._scheduled = when, False


class SimLoop(asyncio.BaseEventLoop):
    """One life of the driver."""

    def __init__(
        self,
        seed: int,
        *,
        now: float = 0.0,
        longest_s: float,
        most_ticks: int,
        shuffled: float,
        at_tick: Callable[[int], float],
    ) -> None:
        super().__init__()
        self.random = random.Random(seed)
        self.now, self.ends_at = now, now + longest_s
        self.ticks, self.most_ticks = 0, most_ticks
        self.shuffled, self.at_tick, self.next_fault = shuffled, at_tick, at_tick(0)
        self.is_killed = False
        self.complaints: list[str] = []  # exceptions that nobody read
        self.trace: list[str] | None = None  # every callback, if somebody wants it
        self.numbers = 0  # of tasks, futures and timers so far
        self._ready: deque[Any] = deque()
        self._timers: list[tuple[float, int, Any]] = []
        self.set_exception_handler(self._complain)

    def time(self) -> float:
        return self.now

    def create_future(self) -> SimFuture:
        return SimFuture(loop=self)

    def create_task(self, coro: Any, *, name: str | None = None, context: Any = None) -> SimTask:  # type: ignore[override]
        return SimTask(coro, loop=self, name=name, context=context)

    def _write_to_self(self) -> None: ...

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:
        handle = _Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_later(
        self, delay: float, callback: Any, *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.now + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Any, *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        handle = _TimerHandle(when, callback, args, self, context)
        self.numbers += 1
        heapq.heappush(self._timers, (when, self.numbers, handle))
        return handle

    def _run_once(self) -> None:
        """Run the callbacks that are ready; where a loop would sleep, move the time to the next timer."""
        ready, timers = self._ready, self._timers
        while timers and timers[0][2]._cancelled:
            heapq.heappop(timers)
        if not ready:
            if not timers:
                raise Stuck(f"every task waits and no timer is set\n{self.stacks()}")
            # a timer that fires a rounding error early must see that time passed
            self.now = max(timers[0][0], math.nextafter(self.now, math.inf))
        while timers and timers[0][0] <= self.now:
            ready.append(heapq.heappop(timers)[2])
        if self.now > self.ends_at or self.ticks > self.most_ticks:
            raise Stuck(f"not done after {self.now:.0f} s, {self.ticks} ticks\n{self.stacks()}")
        for _ in range(len(ready)):
            self.ticks += 1
            if self.ticks >= self.next_fault:
                self.next_fault = self.at_tick(self.ticks)
            if self.is_killed:
                raise DriverKilled
            # mostly first come first served, by the seed also out of order
            if len(ready) > 1 and self.random.random() < self.shuffled:
                place = self.random.randrange(min(len(ready), 6))
                handle = ready[place]
                del ready[place]
            else:
                handle = ready.popleft()
            if self.trace is not None:
                self.trace.append(f"{self.ticks} {self.now:.6f} {_label(handle)}")
            if handle._cancelled:
                continue
            try:
                handle._context.run(handle._callback, *handle._args)
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:  # as `asyncio.Handle._run` does
                where = _format_callback_source(handle._callback, handle._args)
                message = f"Exception in callback {where}"
                self.call_exception_handler({"message": message, "exception": error})

    def run_in_executor(self, executor: Any, function: Callable[..., Any], *args: Any) -> Any:  # type: ignore[override]
        """Call the function on the loop, after the delay of a thread."""
        future = self.create_future()
        self.call_later(self.delay(0.002), _call_into, future, function, args)
        return future

    def delay(self, most_s: float) -> float:
        """Return no delay, a usual one or, rarely, a long one."""
        kind = self.random.random()
        if kind < 0.3:
            return 0.0
        return self.random.random() * most_s * (20 if kind > 0.97 else 1)

    def _complain(self, loop: Any, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self.complaints.append(f"{context['message']}: {type(error).__name__}: {error}")

    def stacks(self) -> str:
        """Return a line per task: where it waits, from its first coroutine to the one that awaits."""
        return "\n".join(map(place_of, sorted(asyncio.all_tasks(self), key=hash)))

    def abandon(self) -> set[asyncio.Task[Any]]:
        """Stop for good, as a killed process does; return the tasks, which must not run on."""
        tasks = asyncio.all_tasks(self)
        for task in tasks:
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        self.close()
        return tasks


def _label(handle: asyncio.Handle) -> str:
    called = handle._callback  # type: ignore[attr-defined]
    owner = getattr(called, "__self__", None)
    name = getattr(called, "__qualname__", type(called).__name__)
    return owner.get_name() if isinstance(owner, asyncio.Task) else name


def place_of(task: asyncio.Task[Any]) -> str:
    places: list[str] = []
    awaited: Any = task.get_coro()
    while isinstance(awaited, CoroutineType) and awaited.cr_frame is not None:
        frame = awaited.cr_frame
        file = frame.f_code.co_filename.rpartition("/")[2].removesuffix(".py")
        places.append(f"{file}:{frame.f_lineno} {frame.f_code.co_name}")
        awaited = awaited.cr_await
    return f"  {task.get_name()}: {' > '.join(places)}"


def _call_into(future: asyncio.Future[Any], function: Callable[..., Any], args: tuple) -> None:
    """Call the function even if its waiter was cancelled: a thread runs on."""
    try:
        result = function(*args)
    except Exception as error:
        if not future.done():
            future.set_exception(error)
    else:
        if not future.done():
            future.set_result(result)
