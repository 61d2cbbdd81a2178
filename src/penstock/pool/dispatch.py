"""Decide which engine takes which requests, and when: pure logic, with the time passed in.

The requests of one prompt are one `Work`. Work is bound to an engine only when that engine has room for
it; until then it waits here, first come first served, so that a slow engine takes no more than it can
finish. Among engines with room, work goes to the one that would finish its outstanding tokens
first; running work is never moved (docs/cluster.md has the measurements). Makes no calls: `pool.py`
acts.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_NEWEST_SHARE = 0.2  # weight of the last answer in a running average
_AHEAD = 1.25  # requests to bind per request that can run, so that a free slot is refilled at once
_LEAST_FILL = 0.125
_UNKNOWN_FILL = 0.5
_REFUSALS = 256  # after so many skips in a row a slow engine gets work, to measure it again
_ALIKE = 1.5  # paces within this factor differ by the rows that engines happen to decode together
_SLOW = 4.0  # tell the user of an engine this many times slower than the fastest
_ANSWERS_TO_JUDGE = 4  # answers to measure before an engine is called slow


@dataclass(slots=True, eq=False, kw_only=True)
class Work:
    """Requests that share a prompt and go to one engine together."""

    size: int  # number of requests
    tokens: int  # the most that the requests can hold, prompts and responses
    least_version: int = 0  # version of the oldest weights that may generate this work
    engine: int | None = None  # the engine that the work is bound to
    waits: bool = False  # whether it is in the queue
    since: float = 0.0  # time at which it was bound
    ahead: int = 0  # outstanding tokens of the engine when this work was bound, its own included


@dataclass(slots=True, eq=False)
class Member:
    """One engine as the dispatcher sees it."""

    serves: bool = True  # whether the engine takes work
    retired: bool = False  # the engine never takes work again
    version: int = 0  # policy version of its weights
    slots: int = 0  # requests that it runs at once; 0: as many as every engine
    requests: int = 0  # requests bound to it
    tokens: int = 0  # tokens of these requests
    speed: float | None = None  # outstanding tokens finished per second
    pace: float | None = None  # tokens per second of one response
    answers: int = 0  # answers measured so far
    refused: int = 0  # skips in a row: work waited for another engine instead


class Dispatcher:
    """Consumes offers and answers, produces bindings. While `held`, nothing is bound."""

    def __init__(self, engines: int, slots: int) -> None:
        self.members = [Member() for _ in range(engines)]
        self.held = False
        self.waiting = 0  # requests in the queue
        self.running = 0  # requests that are bound
        self.slots = slots  # requests that every engine runs at once
        self._queue: deque[Work] = deque()
        self._fill: float | None = None  # share of bound requests that still run

    # ---- engines

    @property
    def serving(self) -> list[int]:
        """Indices of the engines that take work."""
        return [index for index, member in enumerate(self.members) if member.serves]

    def add(self) -> int:
        """Add an engine that does not serve yet; return its index."""
        self.members.append(Member(serves=False))
        return len(self.members) - 1

    def let_serve(self, index: int, serves: bool, *, retired: bool = False) -> None:
        member = self.members[index]
        member.serves, member.retired = serves, member.retired or retired

    def slower_than(self, index: int) -> int | None:
        """Return the fastest engine if this one makes responses several times slower, else None."""
        member = self.members[index]
        judged = [i for i in self.serving if self.members[i].answers >= _ANSWERS_TO_JUDGE]
        if index not in judged or member.pace is None:
            return None
        best = max(judged, key=lambda i: self.members[i].pace or 0.0)
        return best if (self.members[best].pace or 0.0) > _SLOW * member.pace else None

    # ---- binding

    def offer(self, work: Work, now: float, *, first: bool = False) -> int | None:
        """Bind work now and return its engine, or queue it (`first`: at the head) and return None.

        The longer the queue, the more engines are worth using: call `bindings` after None.
        """
        if first or not self.waiting:
            index = self._find(work)
            if index is not None:
                self._bind(work, index, now)
                return index
        work.waits = True
        self.waiting += work.size
        if first:
            self._queue.appendleft(work)
        else:
            self._queue.append(work)
        return None

    def bindings(self, now: float) -> Iterator[Work]:
        """Bind queued work for as long as engines have room; yield what was bound."""
        while self._queue:
            work = self._queue[0]
            if work.waits:
                index = self._find(work)
                if index is None:
                    return
                self.withdraw(work)
                self._bind(work, index, now)
                self._queue.popleft()
                yield work
            else:
                self._queue.popleft()

    def withdraw(self, work: Work) -> None:
        """Take work out of the queue, if it is there."""
        if work.waits:
            work.waits = False
            self.waiting -= work.size

    def waiters(self) -> list[Work]:
        return [work for work in self._queue if work.waits]

    def release(self, work: Work, now: float, lengths: Sequence[int] = ()) -> None:
        """Unbind work that left its engine; measure the engine by the `lengths` of its responses."""
        assert work.engine is not None
        member = self.members[work.engine]
        work.engine = None
        member.requests -= work.size
        member.tokens -= work.tokens
        self.running -= work.size
        if lengths and now > work.since:
            self._measure(member, work, now - work.since, lengths)

    def _bind(self, work: Work, index: int, now: float) -> None:
        member = self.members[index]
        work.engine, work.since = index, now
        member.refused = 0
        member.requests += work.size
        member.tokens += work.tokens
        work.ahead = member.tokens
        self.running += work.size

    def _find(self, work: Work) -> int | None:
        """Return the engine that takes this work now, by the seconds of work that it has; or None."""
        if self.held:
            return None
        able = self._able(work)
        if not able:
            return None
        known = [member.speed for member in self.members if member.speed is not None]
        average = sum(known) / len(known) if known else 1.0
        seconds = {i: self.members[i].tokens / (self.members[i].speed or average) for i in able}
        least = min(able, key=seconds.__getitem__)
        worth = self._worth_using(work, able)
        if least in worth or self.members[least].refused >= _REFUSALS:
            return least
        self.members[least].refused += 1
        return min(worth, key=seconds.__getitem__, default=None)

    def _able(self, work: Work) -> list[int]:
        """List the engines that have room for this work, and the weights that it needs."""
        alone = sum(not member.retired for member in self.members) == 1
        ahead = math.inf if alone else self._bound_per_slot  # one engine alone has its own queue
        return [
            index
            for index, member in enumerate(self.members)
            if member.serves
            and member.requests < (member.slots or self.slots) * ahead
            and member.version >= work.least_version
        ]

    def _worth_using(self, work: Work, able: list[int]) -> list[int]:
        """Skip a slow engine if the others would finish the queue before it finishes one response."""
        paced = [member for member in self.members if member.serves and member.pace]
        if not paced:
            return able
        paces = [member.pace or 0.0 for member in paced]
        together = sum((m.slots or self.slots) * (m.pace or 0.0) for m in paced)
        waiting = self.waiting if work.waits else self.waiting + work.size
        others = 1 / max(paces) + waiting / together
        others = max(others, _ALIKE / max(paces))
        return [i for i in able if 1 / (self.members[i].pace or math.inf) <= others]

    @property
    def _bound_per_slot(self) -> float:
        """How many requests to bind per slot of an engine, by the share of bound ones that still runs.

        Work is answered whole: its first responses that end wait for its longest one.
        """
        fill = _UNKNOWN_FILL if self._fill is None else self._fill
        return _AHEAD / max(_LEAST_FILL, fill)

    def _measure(self, member: Member, work: Work, seconds: float, lengths: Sequence[int]) -> None:
        longest = max(1, *lengths)
        member.speed = _average(member.speed, work.ahead / seconds)
        member.pace = _average(member.pace, longest / seconds)
        member.answers += 1
        self._fill = _average(self._fill, sum(lengths) / (len(lengths) * longest))


def _average(before: float | None, newest: float) -> float:
    if before is None:
        return newest
    return (1 - _NEWEST_SHARE) * before + _NEWEST_SHARE * newest
