"""An event loop with virtual time: it jumps to the next timer instead of waiting.

All waits of the producing side are asyncio waits, so the real strategies run under this loop unchanged.
When nothing can happen any more it raises Deadlock instead of hanging. What a thread would do is done at once, on
the loop; it supports no sockets. The loop of `tests/promises/simulation` also shuffles callbacks and injects faults.
"""

from __future__ import annotations

import asyncio
import math
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Deadlock(RuntimeError):
    """Some task waits, and no timer and no other task is left to wake it."""


class _JumpingSelector(selectors.SelectSelector):
    """Moves time forward where a loop would sleep."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise Deadlock("virtual time: all tasks wait and no timer is set")
        # time always moves: a timer that fires a rounding error early must see that time has passed
        self.now = max(self.now + timeout, math.nextafter(self.now, math.inf))
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop on the jumping selector's clock."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)
        self._clock_resolution = 1e-12

    def time(self) -> float:
        return self._jumping.now

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, function: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """Call the function now: it takes no virtual time."""
        future = self.create_future()
        try:
            future.set_result(function(*args))
        except Exception as error:  # what a thread raises, its caller gets
            future.set_exception(error)
        return future


class VirtualClock:
    """Owns a virtual loop; `run` works like asyncio.run, but always on the same loop."""

    def __init__(self) -> None:
        self.loop = VirtualTimeLoop()

    @property
    def now(self) -> float:
        return self.loop.time()

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(main)

    def settle(self) -> None:
        """Run everything that can run now, without moving time."""
        while self.loop._ready:  # type: ignore[attr-defined]
            self.loop.call_soon(self.loop.stop)
            self.loop.run_forever()

    def close(self) -> None:
        """Cancel the remaining tasks and close the loop."""
        while left := asyncio.all_tasks(self.loop):
            for task in left:
                task.cancel()
            self.run(_ended(left))
        self.loop.close()


async def _ended(tasks: set[asyncio.Task[Any]]) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)
