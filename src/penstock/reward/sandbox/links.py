"""Connections of untrusted clients in one event loop: of each client, a few are woken per round.

asyncio serves every ready socket in each round, so a client with hundreds of busy connections delays every
step of the others. Here a client has an epoll of its own, and the event loop watches that one. A read that
need not wait takes no round at all, so a request of a quiet client passes in two. Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import select
import socket
from collections import deque
from collections.abc import Callable

_WOKEN_AT_ONCE = 2  # connections of one client
_AT_ONCE_BYTES = 1 << 18
_FREE_WASTE_S = 0.5  # so much of it is free
_MOST_WAIT_S = 5.0  # a good client behind the same address waits no longer, whatever was wasted
_MOST_REMEMBERED = 1024  # clients with waste
_SINK = bytearray(1 << 20)  # for what nobody reads: the kernel drops it and writes nothing here


class Waste:
    """What addresses cost the event loop for nothing: connections without a request, and refused requests.

    They are cheaper to make than to serve. After many, the next connection of the address waits `each_s` for
    each of them.
    """

    def __init__(self, each_s: float, clock: Callable[[], float]) -> None:
        self._each_s, self._clock = each_s, clock
        self._until: dict[str, float] = {}  # when each address will have waited for its waste

    def add(self, address: str) -> None:
        """Note a connection or request of this address that brought nothing."""
        now = self._clock()
        if len(self._until) >= _MOST_REMEMBERED:
            self._until = {one: until for one, until in self._until.items() if until > now}
        if address in self._until or len(self._until) < _MOST_REMEMBERED:
            until = max(now, self._until.get(address, now)) + self._each_s
            self._until[address] = min(until, now + _FREE_WASTE_S + _MOST_WAIT_S)

    def wait_s(self, address: str) -> float:
        """Return how long the next request of this address has to wait."""
        return max(0.0, self._until.get(address, 0.0) - _FREE_WASTE_S - self._clock())


class Client:
    """The connections of one address."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.number = 0  # of connections: served, and not served yet
        self.not_served: deque[socket.socket] = deque()
        self.waits = False  # for its waste
        self._asleep: dict[int, asyncio.Future[None]] = {}
        self._loop = asyncio.get_running_loop()
        self._poll = select.epoll()
        self._loop.add_reader(self._poll, self._wake)

    async def ready(self, link: socket.socket, events: int) -> None:
        """Wait until the socket can be read from or written to, and for this client's turn."""
        descriptor, once = link.fileno(), events | select.EPOLLONESHOT
        try:
            self._poll.modify(descriptor, once)
        except FileNotFoundError:
            self._poll.register(descriptor, once)
        woken = self._asleep[descriptor] = self._loop.create_future()
        try:
            await woken
        finally:
            del self._asleep[descriptor]

    def _wake(self) -> None:
        for descriptor, _ in self._poll.poll(0, _WOKEN_AT_ONCE):
            woken = self._asleep.get(descriptor)  # none if it ran out of time
            if woken is not None and not woken.done():
                woken.set_result(None)

    def close(self) -> None:
        self._loop.remove_reader(self._poll)
        self._poll.close()


class Link:
    """One connection that does not block. Raises OSError or EOFError if the client is gone."""

    def __init__(self, link: socket.socket, client: Client) -> None:
        self.socket, self.client = link, client
        self._unread = b""  # what came with earlier data

    async def read_until(self, end: bytes, most: int) -> bytes:
        """Return the data up to and with `end`; raise ValueError if that is more than `most` bytes."""
        got, place = self._unread, -1
        while place < 0:
            place = got.find(end, 0, most)
            if place < 0 and len(got) >= most:
                raise ValueError
            if place < 0:
                got += await self._receive(most, wait=bool(got))
        place += len(end)
        self._unread = got[place:]
        return got[:place]

    async def read_some(self, most: int, *, wait: bool) -> bytes:
        """Return what there is, up to `most` bytes; `wait`: for this client's turn in any case."""
        if self._unread:
            got, self._unread = self._unread[:most], self._unread[most:]
            return got
        return await self._receive(min(most, _AT_ONCE_BYTES), wait=wait)

    async def _receive(self, most: int, *, wait: bool) -> bytes:
        while True:
            if wait:
                await self.client.ready(self.socket, select.EPOLLIN)
            try:
                got = self.socket.recv(most)
            except (BlockingIOError, InterruptedError):
                wait = True
                continue
            if not got:
                raise EOFError
            return got

    async def discard(self) -> int:
        """Drop what has come and return its size; 0 at the end."""
        while True:
            try:
                return self.socket.recv_into(_SINK, 0, socket.MSG_TRUNC)
            except (BlockingIOError, InterruptedError):
                await self.client.ready(self.socket, select.EPOLLIN)

    async def send(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            try:
                left = left[self.socket.send(left) :]
            except (BlockingIOError, InterruptedError):
                await self.client.ready(self.socket, select.EPOLLOUT)

    async def turn(self) -> None:
        """Wait until the client has taken what was sent, and for this client's turn."""
        await self.client.ready(self.socket, select.EPOLLOUT)

    def has_left(self) -> bool:
        """Return whether nobody waits for a reply; thread-safe. One that only ended its sending waits."""
        if self.socket.fileno() < 0:
            return True
        watch = select.poll()
        watch.register(self.socket, 0)  # tells of errors and hang-ups only
        return bool(watch.poll(0))
