"""Whose turn it is: clients share the trainer and the engines, whatever each of them has asked for."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from penstock.store.command_log import Command

MOST_SAMPLES = 1024  # of one request
PART = 64  # samples of a request that get their turn together
_AHEAD = 1.25  # samples that run or wait in the engines, for each that they can make at once


class _Waiting(Protocol):
    @property
    def owner(self) -> str: ...
    @property
    def line(self) -> str: ...


T = TypeVar("T", bound=_Waiting)


class Turns(Generic[T]):
    """What may run: owners take turns, and then the lines of an owner."""

    def __init__(self) -> None:
        self._owners: OrderedDict[str, OrderedDict[str, deque[T]]] = OrderedDict()

    def add(self, waiting: T) -> None:
        lines = self._owners.setdefault(waiting.owner, OrderedDict())
        lines.setdefault(waiting.line, deque()).append(waiting)

    def holds(self, line: str) -> bool:
        """Whether something of this line waits for its turn."""
        return any(line in lines for lines in self._owners.values())

    def next(self) -> T | None:
        """What has its turn; its owner and its line are the last ones then."""
        if not self._owners:
            return None
        owner, lines = self._owners.popitem(last=False)
        line, waiting = lines.popitem(last=False)
        first = waiting.popleft()
        if waiting:
            lines[line] = waiting
        if lines:
            self._owners[owner] = lines
        return first


@dataclass(slots=True, eq=False)
class _Part:
    """Further samples of a request, which has begun."""

    owner: str
    line: str
    request_id: str
    count: int
    admitted: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class Seats:
    """The engines' places for samples: requests get them in turns, large ones part by part."""

    def __init__(self, begin: Callable[[Command], None]) -> None:
        """begin: what a request for samples does, once it has places for its first part."""
        self.slots = 0  # samples that the engines make at once
        self.fill = 0.5  # the share of the samples of a request that run, on average until its end
        self._begin = begin
        self._turns: Turns[Command | _Part] = Turns()
        self._taken: Counter[str] = Counter()  # by request

    def add(self, command: Command) -> None:
        self._turns.add(command)
        asyncio.get_running_loop().call_soon(self._hand_out)

    async def take(self, command: Command, count: int) -> None:
        """Wait for places for a further part of a request."""
        part = _Part(command.owner, command.line, command.request_id, count)
        self._turns.add(part)
        self._hand_out()
        await part.admitted

    def give(self, request_id: str, count: int = MOST_SAMPLES) -> None:
        """Give places back; without a count all that the request still has."""
        self._taken[request_id] -= count
        if self._taken[request_id] <= 0:
            del self._taken[request_id]
        self._hand_out()

    def _hand_out(self) -> None:
        """Let the engines have as many samples as keep them busy: the others wait here, where owners take turns."""
        while self._taken.total() * self.fill < _AHEAD * self.slots:
            if (waiting := self._turns.next()) is None:
                return
            if isinstance(waiting, Command):
                self._taken[waiting.request_id] = min(PART, count_samples(waiting.fields))
                self._begin(waiting)
            elif not waiting.admitted.done():  # else it was given up
                self._taken[waiting.request_id] += waiting.count
                waiting.admitted.set_result(None)


def count_samples(fields: Mapping[str, Any]) -> int:
    """How many samples a request asks for; 0 if that is no number that is served."""
    count = fields.get("num_samples", 1)
    return count if isinstance(count, int) and 1 <= count <= MOST_SAMPLES else 0
