"""Decide which engine takes which requests, and when: pure logic, with the time passed in.

The requests of one prompt are one `Work`. Work is bound to an engine only when that engine has a slot for
it; until then it waits here, first come first served, so that a slow engine takes no more than it can
finish. Among engines with free slots, work goes to the one that would finish its outstanding tokens
first; running work is never moved (docs/workers.md has the measurements). A choice looks at every engine:
it is made once for a prompt. Makes no calls: `requests.py` acts.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

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
    holder: int | None = None  # the engine that made the session's last response
    engine: int | None = None  # the engine that the work is bound to
    is_queued: bool = False
    since: float = 0.0  # time at which it was bound
    ahead: int = 0  # outstanding tokens of the engine when this work was bound, its own included


@dataclass(slots=True, eq=False)
class EngineLoad:
    """One engine as the scheduler sees it."""

    serves: bool = True  # whether the engine takes work
    version: int = 0  # policy version of its weights
    slots: int = 0  # requests that it runs at once; 0: as many as every engine
    requests: int = 0  # requests bound to it
    tokens: int = 0  # tokens of these requests
    speed: float = 0.0  # outstanding tokens finished per second; 0: not measured yet
    pace: float = 0.0  # tokens per second of one response; known if the speed is
    answers: int = 0  # answers measured so far
    refused: int = 0  # skips in a row: work waited for another engine instead


class Scheduler:
    """Consumes offers and answers, produces bindings. While it is held, nothing is bound."""

    def __init__(self, engines: Sequence[EngineLoad], slots: int) -> None:
        """engines: by their index; more may be added, and each may cease to serve."""
        self.engines = engines
        self.slots = slots  # requests that an engine runs at once if it does not say
        self._num_retired = 0  # engines that never take work again
        self.held = False
        self.waiting = 0  # requests in the queue
        self.running = 0  # requests that are bound
        self._queue: deque[Work] = deque()
        self._speed = 0.0  # average of all engines
        self._fill = 0.0  # share of bound requests that still run; 0: unknown

    # ---- engines

    def set_slots(self, index: int, slots: int) -> None:
        """Note how many requests an engine runs at once; for engines that do not say, the fewest count."""
        self.engines[index].slots = slots
        self.slots = min(engine.slots for engine in self.engines if engine.slots)

    def count_retired(self) -> None:
        """Note that one engine more never takes work again."""
        self._num_retired += 1

    def hold(self, held: bool) -> None:
        """Bind nothing while `held`."""
        self.held = held

    def slower_than(self, index: int) -> int | None:
        """The fastest engine if this one makes responses several times slower, else None."""
        enough = _ANSWERS_TO_JUDGE
        measured = [each for each in self.engines if each.serves and each.answers >= enough]
        engine = self.engines[index]
        if engine not in measured:
            return None
        fastest = max(measured, key=attrgetter("pace"))
        return self.engines.index(fastest) if fastest.pace > _SLOW * engine.pace else None

    # ---- binding

    def offer(self, work: Work, now: float, *, first: bool = False) -> int | None:
        """Bind work now and return its engine, or queue it (`first`: at the head) and return None.

        The longer the queue, the more engines are worth using: call `bindings` after None.
        """
        if first or not self.waiting:
            index = self._choose(work)
            if index is not None:
                self._bind(work, index, now)
                return index
        work.is_queued = True
        self.waiting += work.size
        if first:
            self._queue.appendleft(work)
        else:
            self._queue.append(work)
        return None

    def bindings(self, now: float) -> Iterator[Work]:
        """Bind queued work for as long as engines have free slots; yield what was bound."""
        while self._queue:
            work = self._queue[0]
            if work.is_queued:
                index = self._choose(work)
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
        if work.is_queued:
            work.is_queued = False
            self.waiting -= work.size

    def queued(self) -> list[Work]:
        return [work for work in self._queue if work.is_queued]

    def release(self, work: Work, now: float, lengths: Sequence[int] = ()) -> None:
        """Unbind work that left its engine; measure the engine by the `lengths` of its responses."""
        assert work.engine is not None
        engine, work.engine = self.engines[work.engine], None
        engine.requests -= work.size
        engine.tokens -= work.tokens
        self.running -= work.size
        if not lengths or now <= work.since:
            return
        seconds, longest = max(now - work.since, _LEAST_S), max(1, *lengths)
        speed = work.ahead / seconds
        engine.speed, self._speed = _average(engine.speed, speed), _average(self._speed, speed)
        engine.pace = _average(engine.pace, longest / seconds)
        engine.answers += 1
        self._fill = _average(self._fill, sum(lengths) / (len(lengths) * longest))

    def _bind(self, work: Work, index: int, now: float) -> None:
        engine = self.engines[index]
        engine.requests += work.size
        engine.tokens += work.tokens
        engine.refused = 0
        work.engine, work.since, work.ahead = index, now, engine.tokens
        self.running += work.size

    def _choose(self, work: Work) -> int | None:
        """The engine that takes this work now, by the seconds of work that it has; or None.

        The next turn of a session goes to the engine that holds the turns before, if it has a free slot.
        """
        if work.holder is not None and not self.held:
            holder = self.engines[work.holder]
            is_free = holder.requests < (holder.slots or self.slots)
            if holder.serves and holder.version >= work.least_version and is_free:
                return work.holder
        chosen = None if self.held else self._least_busy(work.least_version)
        if chosen is not None and chosen.pace and chosen.refused < _REFUSALS:
            least_pace = self._least_pace(work)
            if chosen.pace < least_pace:
                chosen.refused += 1
                chosen = self._least_busy(work.least_version, least_pace)
        return None if chosen is None else self.engines.index(chosen)

    def _least_busy(self, least_version: int, least_pace: float = 0.0) -> EngineLoad | None:
        """The engine with a free slot that would finish its tokens first.

        One that is not measured yet counts as fast as the average. More is bound than can run, by the share
        of bound requests that still runs: work is answered whole, and its first responses that end wait for
        its longest one. One engine alone has a queue of its own, so everything is bound to it.
        """
        chosen, least_s = None, math.inf
        slots, average = self.slots, self._speed or 1.0
        per_slot = _AHEAD / max(_LEAST_FILL, self._fill or _UNKNOWN_FILL)
        if len(self.engines) - self._num_retired == 1:
            per_slot = math.inf
        for engine in self.engines:
            if not engine.serves or engine.version < least_version:
                continue
            if (
                engine.requests >= (engine.slots or slots) * per_slot
                or 0 < engine.pace < least_pace
            ):
                continue
            seconds = engine.tokens / (engine.speed or average)
            if seconds < least_s:
                chosen, least_s = engine, seconds
        return chosen

    def _least_pace(self, work: Work) -> float:
        """The pace below which the other engines would finish the queue before one response is made.

        Engines with weights that are too old for this work finish nothing of it.
        """
        slots, fastest, together = self.slots, 0.0, 0.0
        for engine in self.engines:
            pace = engine.pace
            if pace and engine.serves and engine.version >= work.least_version:
                together += pace * (engine.slots or slots)
                if pace > fastest:
                    fastest = pace
        waiting = self.waiting if work.is_queued else self.waiting + work.size
        return 1 / max(1 / fastest + waiting / together, _ALIKE / fastest)


def _average(before: float, newest: float) -> float:
    return (1 - _NEWEST_SHARE) * before + _NEWEST_SHARE * newest if before else newest
