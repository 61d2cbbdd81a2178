"""Whose submission runs next: fair among clients, by the processor time that their submissions have used.

A client has at most `workers` submissions running. All clients together may have more than that (`SHARES`), so
that a client whose submissions last does not hold up the next one: the processor goes to those that have used
little (`zygote.py`). A free worker takes the submission of the client that has used least. Of the places a
client gets at most half then.
Used from one event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from penstock.errors import SandboxError

REMEMBERED_S = 60.0  # a client takes part until so long after its last submission
SHARES = 3  # clients that can have all their submissions running at once
START_S = 0.02  # processor time of the start and end of a sandbox


class Turns:
    """Gives out turns to run a submission, one client after the other."""

    def __init__(self, workers: int, places: int) -> None:
        self._workers, self._places = workers, places
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._running: Counter[str] = Counter()
        self._admitted: Counter[str] = Counter()
        self._used_s: dict[str, float] = {}
        self._seen: dict[str, float] = {}
        self._closed = False

    @property
    def admitted(self) -> int:
        """How many submissions run or wait."""
        return self._admitted.total()

    def room(self, client: str) -> int:
        """How many more submissions this client may hand in now."""
        self._see(client)
        free = self._places - self._admitted[client]
        if len(self._seen) > 1:
            free -= self._places // 2
        return max(0, min(free, self._places - self.admitted))

    def admit(self, client: str, count: int) -> None:
        self._admitted[client] += count

    def dismiss(self, client: str, count: int) -> None:
        self._admitted[client] -= count

    @asynccontextmanager
    async def turn(self, client: str) -> AsyncIterator[None]:
        """Wait for this client's turn, and hold it; SandboxError if the server closes meanwhile."""
        self._see(client)
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(turn)
        self._wake()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._free(client, 0.0)
            raise
        try:
            if self._closed:
                raise SandboxError("sandbox: the server is closing")
            yield
        finally:
            self._free(client, START_S)

    def charge(self, client: str, used_s: float) -> None:
        """Add processor time that a submission of this client has used."""
        self._used_s[client] = self._used_s.get(client, 0.0) + used_s

    def _free(self, client: str, used_s: float) -> None:
        self._running[client] -= 1
        self.charge(client, used_s)
        self._wake()

    def _see(self, client: str) -> None:
        """Note that a client takes part; forget those that no longer do."""
        now = time.monotonic()
        if client not in self._seen and self._used_s:
            self._used_s[client] = min(self._used_s.values())  # no credit for time away
        self._seen[client] = now
        for other, last in list(self._seen.items()):
            if now - last > REMEMBERED_S and not self._admitted[other]:
                del self._seen[other]
                self._used_s.pop(other, None)

    def _wake(self) -> None:
        """Give free workers to the clients that have used least."""
        while self._running.total() < self._workers * min(SHARES, len(self._seen)):
            ready = [c for c in self._waiting if self._running[c] < self._workers]
            if not ready:
                return
            client = min(ready, key=lambda c: (self._running[c], self._used_s.get(c, 0.0)))
            turn = self._waiting[client].popleft()
            if not self._waiting[client]:
                del self._waiting[client]
            if not turn.done():
                self._running[client] += 1
                turn.set_result(None)

    def close(self) -> None:
        """Let every later turn raise SandboxError."""
        self._closed = True
