"""An event loop on virtual time that a seed decides: order of callbacks, delays of threads, the end.

Ready callbacks run in a shuffled order; `run_in_executor` calls the function on the loop after a delay; tasks
and futures hash by their number, so that sets of them have one order in every process. `at_tick` is
called before every callback; once `is_killed` is set, no callback runs any more. No socket, no thread, no system clock.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import deque
from collections.abc import Callable
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
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._number = kwargs["loop"].next_number()
        kwargs["name"] = kwargs.get("name") or f"task {self._number}"
        super().__init__(*args, **kwargs)


class SimFuture(_Numbered, asyncio.Future):
    def __init__(self, *, loop: SimLoop) -> None:
        self._number = loop.next_number()
        super().__init__(loop=loop)


class _Ready(deque):
    """The callbacks that are ready: mostly first come first served, by the seed also out of order."""

    def __init__(self, loop: SimLoop) -> None:
        super().__init__()
        self._loop = loop

    def popleft(self) -> Any:
        loop = self._loop
        loop.ticks += 1
        loop.at_tick(loop.ticks)
        if loop.is_killed:
            raise DriverKilled
        if len(self) > 1 and loop.random.random() < loop.shuffled:
            place = loop.random.randrange(min(len(self), 6))
            handle = self[place]
            del self[place]
        else:
            handle = super().popleft()
        if loop.trace is not None:
            loop.trace.append(f"{loop.ticks} {loop.now:.6f} {_label(handle)}")
        return handle


class _Clock:
    """Takes the place of a selector: moves time forward where a loop would sleep."""

    def __init__(self, loop: SimLoop) -> None:
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        loop = self._loop
        if timeout is None:
            raise Stuck(f"every task waits and no timer is set\n{loop.stacks()}")
        if not loop._ready:  # a timer that fires a rounding error early must see that time passed
            loop.now = max(loop.now + timeout, math.nextafter(loop.now, math.inf))
        if loop.now > loop.ends_at or loop.ticks > loop.most_ticks:
            raise Stuck(f"not done after {loop.now:.0f} s, {loop.ticks} ticks\n{loop.stacks()}")
        return []

    def close(self) -> None: ...


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
        at_tick: Callable[[int], None],
    ) -> None:
        super().__init__()
        self.random = random.Random(seed)
        self.now, self.ends_at = now, now + longest_s
        self.ticks, self.most_ticks = 0, most_ticks
        self.shuffled, self.at_tick = shuffled, at_tick
        self.is_killed = False
        self.complaints: list[str] = []  # exceptions that nobody read
        self.trace: list[str] | None = None  # every callback, if somebody wants it
        self._numbers = 0
        self._clock_resolution = 1e-12
        self._selector = _Clock(self)
        self._ready = _Ready(self)
        self.set_task_factory(lambda loop, coro, **kw: SimTask(coro, loop=loop, **kw))
        self.set_exception_handler(self._complain)

    def next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    def time(self) -> float:
        return self.now

    def create_future(self) -> SimFuture:
        return SimFuture(loop=self)

    def _process_events(self, events: Any) -> None: ...

    def _write_to_self(self) -> None: ...

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
