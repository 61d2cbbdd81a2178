"""Orders from the event loop to an engine's thread, and replies back.

The thread takes orders between two model steps, and waits on a condition while it has nothing to do. Every
order can be failed as well as run, and a closed inbox hands back the orders it still holds: a thread that
dies leaves no caller waiting.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


class Reply:
    """The answer to one order: set by the engine's thread, awaited on the event loop."""

    __slots__ = ("_future", "_loop")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._future: asyncio.Future[Any] = self._loop.create_future()

    def __await__(self) -> Any:
        return self._future.__await__()

    def set(self, result: Any) -> None:
        self._send(self._resolve, result)

    def fail(self, error: BaseException) -> None:
        self._send(self._reject, error)

    def _send(self, action: Callable[[Any], None], argument: Any) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(action, argument)

    def _resolve(self, result: Any) -> None:
        if not self._future.done():
            self._future.set_result(result)

    def _reject(self, error: BaseException) -> None:
        if not self._future.done():
            self._future.set_exception(error)


class Replies(Reply):
    """The answers to several questions of one caller. The last answer wakes the event loop, once for all.

    A wake-up costs more than the rest of an answer, and hundreds of responses may end in one step.
    """

    __slots__ = ("_answers", "_missing")

    def __init__(self, count: int) -> None:
        super().__init__()
        self._answers: list[Any] = [None] * count
        self._missing = count
        if not count:
            self.set([])

    def setter(self, place: int) -> Callable[[Any], None]:
        """A function that takes the answer to one question. Only one thread at a time may call it."""

        def answer(result: Any) -> None:
            if self._answers[place] is None:  # else an engine that died answers again
                self._answers[place] = result
                self._missing -= 1
                if not self._missing:
                    self.set(self._answers)

        return answer


@dataclass(slots=True, frozen=True)
class Order:
    """Work for the thread; exactly one of the two callbacks is called."""

    run: Callable[[], None]
    fail: Callable[[Exception], None]


class Burst:
    """How long an engine that has nothing running waits for more orders before it begins.

    Groups come in bursts, one order each. A step that began with the first of them would compute its prompt
    alone while the rest wait.
    """

    GAP_S = 0.002  # orders that come closer than this belong to one burst
    LONGEST_S = 0.02

    def __init__(self) -> None:
        self._ends: float | None = None  # None: no order has come yet

    def wait_s(self, now: float) -> float:
        """How long the next order of the burst may take; 0: the burst is over."""
        if self._ends is None:
            self._ends = now + self.LONGEST_S
        return min(self.GAP_S, max(0.0, self._ends - now))

    def over(self) -> None:
        """Note that all orders of the burst are done: the next one begins another."""
        self._ends = None


class Inbox:
    """The thread's queue of orders."""

    def __init__(self) -> None:
        self._orders: deque[Order] = deque()
        self._changed = threading.Condition()
        self._closed = False

    @property
    def closed(self) -> bool:
        return self._closed

    def post(self, order: Order) -> bool:
        """Append an order; return False if the inbox is closed and did not take it."""
        with self._changed:
            if not self._closed:
                self._orders.append(order)
                self._changed.notify()
            return not self._closed

    def take(self, *, wait_s: float | None) -> Order | None:
        """The next order, or None if none comes within `wait_s` seconds (None: wait until one comes)."""
        with self._changed:
            if wait_s != 0:
                self._changed.wait_for(lambda: self._orders, wait_s)
            return self._orders.popleft() if self._orders else None

    def close(self) -> list[Order]:
        """Take no more orders; return those that were not run."""
        with self._changed:
            self._closed = True
            unanswered = list(self._orders)
            self._orders.clear()
            return unanswered
