"""A wake-up that cannot be lost: a waiter names the count it has seen and waits for a newer one."""

from __future__ import annotations

import asyncio
import contextlib


class Signal:
    """Read `count`, look at the state, then `wait_after(count)`: a change in between returns at once."""

    def __init__(self) -> None:
        self.count = 0
        self._waiters: list[asyncio.Future[None]] = []
        self._followers: list[Signal] = []

    def forward_to(self, follower: Signal) -> None:
        """Notify `follower` too whenever this signal is notified."""
        self._followers.append(follower)

    def notify(self) -> None:
        self.count += 1
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
        for follower in self._followers:
            follower.notify()

    async def wait_after(self, seen: int, timeout_s: float | None = None) -> None:
        """Wait until `count` differs from `seen`, at most `timeout_s`."""
        if self.count == seen:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await waiter
