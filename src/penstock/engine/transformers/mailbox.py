"""How the event loop and an engine's thread talk: orders go in, replies come back.

The thread takes orders between two model steps and sleeps on a condition when it has nothing to do.
Every order can be failed as well as run, and an inbox that closes hands back what it still holds: a
thread that dies leaves nobody waiting.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


class Reply:
    """The answer to one order, set from the engine's thread, awaited on the event loop."""

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


@dataclass(slots=True, frozen=True)
class Order:
    """Work for the thread; exactly one of the two is called."""

    run: Callable[[], None]
    fail: Callable[[Exception], None]


class Inbox:
    """Orders for the thread, in their sequence."""

    def __init__(self) -> None:
        self._orders: deque[Order] = deque()
        self._changed = threading.Condition()
        self._closed = False

    @property
    def closed(self) -> bool:
        return self._closed

    def post(self, order: Order) -> bool:
        """False: the inbox is closed and the order was not taken."""
        with self._changed:
            if not self._closed:
                self._orders.append(order)
                self._changed.notify()
            return not self._closed

    def take(self, *, wait: bool) -> Order | None:
        """The next order; None: there is none. With `wait`, sleep until there is one."""
        with self._changed:
            while wait and not self._orders:
                self._changed.wait()
            return self._orders.popleft() if self._orders else None

    def close(self) -> list[Order]:
        """Take no more orders; returns those that nobody ran."""
        with self._changed:
            self._closed = True
            left = list(self._orders)
            self._orders.clear()
            return left
