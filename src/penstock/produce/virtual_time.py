"""An event loop whose time is virtual: it jumps to the next timer instead of waiting.

All waits of the producing side are asyncio waits, so the real strategies run under it unchanged: in
tests, in experiments, in the digital twin. When nothing is left that could ever happen, it raises
instead of hanging. Threads and sockets are not for it.
"""

from __future__ import annotations

import asyncio
import math
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Deadlock(RuntimeError):
    """Somebody waits, and no timer and no task is left to wake them."""


class _JumpingSelector(selectors.SelectSelector):
    """Where a loop would sleep, time moves on instead."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0)
        if ready:
            return ready
        if timeout is None:
            raise Deadlock("virtual time: everybody waits and nothing is due")
        # never quite still: a timer that fires a rounding error early must find time to have passed
        self.now = max(self.now + timeout, math.nextafter(self.now, math.inf))
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)
        self._clock_resolution = 1e-12

    def time(self) -> float:
        return self._jumping.now


class VirtualClock:
    """Owns a virtual loop; `run` works like asyncio.run, again and again on the same loop."""

    def __init__(self) -> None:
        self.loop = VirtualTimeLoop()

    @property
    def now(self) -> float:
        return self.loop.time()

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(main)

    def settle(self) -> None:
        """Run everything that can run at this instant, without moving time."""
        while self.loop._ready:  # type: ignore[attr-defined]
            self.loop.call_soon(self.loop.stop)
            self.loop.run_forever()

    def close(self) -> None:
        """Cancel what is left and close the loop."""
        while left := asyncio.all_tasks(self.loop):
            for task in left:
                task.cancel()
            self.run(_ended(left))
        self.loop.close()


async def _ended(tasks: set[asyncio.Task[Any]]) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)
