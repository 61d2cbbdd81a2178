"""Decide which engine takes which requests, and when: pure logic, with the time passed in.

The requests of one prompt are one `Work`. Work is bound to an engine only when that engine has room for
it; until then it waits here, first come first served, so that a slow engine takes no more than it can
finish. Among engines with room, work goes to the one that would finish its outstanding tokens
first; running work is never moved (docs/workers.md has the measurements). Makes no calls: `pool.py`
acts.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from penstock.workers.pool.room import Room

_NEWEST_SHARE = 0.2  # weight of the last answer in a running average
_AHEAD = 1.25  # requests to bind per request that can run, so that a free slot is refilled at once
_LEAST_FILL = 0.125
_UNKNOWN_FILL = 0.5
_REFUSALS = 256  # after so many skips in a row a slow engine gets work, to measure it again
_ALIKE = 1.5  # paces within this factor differ by the rows that engines happen to decode together
_SLOW = 4.0  # tell the user of an engine this many times slower than the fastest
_ANSWERS_TO_JUDGE = 4  # answers to measure before an engine is called slow
_LEAST_S = 1e-9  # an answer took at least so long: speeds stay finite


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


class Dispatcher:
    """Consumes offers and answers, produces bindings. While it is held, nothing is bound."""

    def __init__(self, engines: int, slots: int) -> None:
        self.room = Room(engines, slots)
        self.members = self.room.members
        self.held = False
        self.waiting = 0  # requests in the queue
        self.running = 0  # requests that are bound
        self._queue: deque[Work] = deque()
        self._fill: float | None = None  # share of bound requests that still run

    # ---- engines

    @property
    def serving(self) -> list[int]:
        """Indices of the engines that take work."""
        return [index for index, member in enumerate(self.members) if member.serves]

    def slower_than(self, index: int) -> int | None:
        """Return the fastest engine if this one makes responses several times slower, else None."""
        member, fastest = self.members[index], self.room.fastest()
        if member.pace is None or fastest is None:
            return None
        least = _SLOW * member.pace
        if (self.members[fastest].pace or 0.0) <= least:
            return None
        judged = [i for i in self.serving if self.members[i].answers >= _ANSWERS_TO_JUDGE]
        if index not in judged:
            return None
        best = max(judged, key=lambda i: self.members[i].pace or 0.0)
        return best if (self.members[best].pace or 0.0) > least else None

    def hold(self, held: bool) -> None:
        """Bind nothing while `held`."""
        self.held = held

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
        index, work.engine = work.engine, None
        self.room.load(index, -work.size, -work.tokens)
        self.running -= work.size
        if lengths and now > work.since:
            self._measure(index, work, max(now - work.since, _LEAST_S), lengths)

    def _bind(self, work: Work, index: int, now: float) -> None:
        work.engine, work.since = index, now
        member = self.room.load(index, work.size, work.tokens)
        member.refused = 0
        work.ahead = member.tokens
        self.running += work.size

    def _find(self, work: Work) -> int | None:
        """Return the engine that takes this work now, by the seconds of work that it has; or None."""
        if self.held:
            return None
        self.room.limit(self._bound_per_slot)
        least, fast = self.room.least_busy(work.least_version, self._least_pace(work))
        if least is None or least == fast:
            return least
        member = self.members[least]
        if member.refused >= _REFUSALS:
            return least
        member.refused += 1
        return fast

    def _least_pace(self, work: Work) -> float:
        """Return the pace below which the other engines would finish the queue before one response is made.

        Only engines that may take the work count: those with older weights finish nothing of it.
        """
        version = work.least_version
        fastest = self.room.fastest(version)
        if fastest is None:
            return 0.0
        pace = self.members[fastest].pace or math.inf
        waiting = self.waiting if work.waits else self.waiting + work.size
        return 1 / max(1 / pace + waiting / self.room.together(version), _ALIKE / pace)

    @property
    def _bound_per_slot(self) -> float:
        """How many requests to bind per slot of an engine, by the share of bound ones that still runs.

        Work is answered whole: its first responses that end wait for its longest one. One engine alone has a
        queue of its own.
        """
        if self.room.num_active == 1:
            return math.inf
        fill = _UNKNOWN_FILL if self._fill is None else self._fill
        return _AHEAD / max(_LEAST_FILL, fill)

    def _measure(self, index: int, work: Work, seconds: float, lengths: Sequence[int]) -> None:
        longest, member = max(1, *lengths), self.members[index]
        self.room.measured(
            index,
            speed=_average(member.speed, work.ahead / seconds),
            pace=_average(member.pace, longest / seconds),
        )
        self._fill = _average(self._fill, sum(lengths) / (len(lengths) * longest))


def _average(before: float | None, newest: float) -> float:
    if before is None:
        return newest
    return (1 - _NEWEST_SHARE) * before + _NEWEST_SHARE * newest
