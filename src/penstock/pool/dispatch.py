"""Which engine takes which requests, and when; pure, on whatever clock its owner has.

Requests of one prompt are one `Work`. Work is bound to an engine only when that engine has room for it; until
then it waits here, first come first served, so that a slow engine takes no more than it can chew. When
nothing waits any more, work that a slow engine would still need long for is planned to go on elsewhere.
Binding and answering cost O(log engines). Makes no call: `pool.py` does what is decided here.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

_NEWEST_SHARE = 0.2  # of the last answer in what is measured
_AHEAD = 1.25  # bound for each request that can run, so that a slot is filled as it becomes free
_LEAST_FILL = 0.125
_UNKNOWN_FILL = 0.5
_GAIN = 2.0  # so many times sooner it must be elsewhere
_PREFILL_GAIN = 8.0  # tokens are read so many times faster than written
_TIMES_MOVED = 2
_REFUSALS = 16  # of work by a slow engine; then it gets some, to see whether it still is
_SHORTEST_LOOK_S, _LONGEST_LOOK_S = 0.5, 5.0  # short enough to help, too long to cost anything
_FRUITLESS_LOOKS = 12  # in a row; from the third on, each after twice the time of the one before


@dataclass(slots=True, eq=False, kw_only=True)
class Work:
    """Requests that share a prompt and go to one engine together."""

    size: int  # requests
    tokens: int  # the most that they can hold at their end
    longest: int  # the most of one response
    least_version: int = 0  # of the weights that may make it
    wanted: int | None = None  # the engine that knows it, or that it moves to
    engine: int | None = None  # that it is bound to
    waits: bool = False  # in the queue
    since: float = 0.0  # it was bound
    ahead: int = 0  # tokens that were outstanding there, its own included
    moves: int = 0
    moves_to: int | None = None  # it is being taken from its engine, to go on there
    been_at: tuple[int, ...] = ()  # engines that it was taken from


@dataclass(slots=True, eq=False)
class Member:
    """One engine as it is seen from here."""

    serves: bool = True  # takes work
    retired: bool = False  # for good
    version: int = 0  # of its weights
    bound: dict[Work, None] = field(default_factory=dict)  # in their order
    requests: int = 0
    tokens: int = 0
    speed: float | None = None  # outstanding tokens a second
    pace: float | None = None  # tokens a second of one response
    seconds: float | None = None  # that work takes there
    stamp: int = 0  # entries of the heap with another one are out of date
    clear: bool = False  # it has clear room, as seen from its slots
    refused: int = 0  # times that others were waited for instead


class Dispatcher:
    """Consumes offers and answers, produces bindings and moves. `held`: nothing is bound."""

    def __init__(self, engines: int, slots: int) -> None:
        self.members = [Member() for _ in range(engines)]
        self.held = False
        self.waiting = 0  # requests
        self.running = 0  # requests that are bound
        self._slots = slots
        self._queue: deque[Work] = deque()
        self._heap: list[tuple[float, int, int]] = []  # (seconds of work, engine, stamp)
        self._fill: float | None = None  # share of bound requests that still run
        self._capacity = self._capacity_at(_UNKNOWN_FILL)
        self._length: float | None = None  # of the longest response of a work
        self._average = 1.0  # speed, for engines that were never measured
        self._best_pace, self._all_paces = 0.0, 0.0  # of those that serve
        self._until_paced = 0  # answers until these two are found anew
        self._clear = 0  # engines with clear room
        self._looks = 0  # in a row that changed nothing
        self._weigh_all()

    # ---- who serves

    @property
    def serving(self) -> list[int]:
        return [index for index, member in enumerate(self.members) if member.serves]

    def add(self) -> int:
        """A further engine, which does not serve yet."""
        self.members.append(Member(serves=False))
        self._weigh_all()
        return len(self.members) - 1

    def let_serve(self, index: int, serves: bool, *, retired: bool = False) -> None:
        member = self.members[index]
        member.serves, member.retired = serves, member.retired or retired
        self._weigh_all()

    # ---- binding

    def offer(self, work: Work, now: float, *, first: bool = False) -> int | None:
        """The engine that takes it now; None: it waits (`first`: before all others).

        The more there is that waits, the more engines are worth it: ask for `bindings` then.
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
        """Work that waited and has found room, as long as there is any."""
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
        """It waits no longer; where it does not wait, nothing happens."""
        if work.waits:
            work.waits = False
            self.waiting -= work.size

    def waiters(self) -> list[Work]:
        return [work for work in self._queue if work.waits]

    def release(self, work: Work, now: float, lengths: Sequence[int] = ()) -> None:
        """It left its engine; `lengths` of what it made there, if that is to be measured."""
        assert work.engine is not None
        index, member = work.engine, self.members[work.engine]
        work.engine = None
        del member.bound[work]
        member.requests -= work.size
        member.tokens -= work.tokens
        self.running -= work.size
        self._looks = 0
        if lengths and now > work.since:
            self._measure(member, work, now - work.since, lengths)
        self._weigh(index)

    def _bind(self, work: Work, index: int, now: float) -> None:
        member = self.members[index]
        work.engine, work.wanted, work.since = index, None, now
        member.bound[work] = None
        member.refused = 0
        member.requests += work.size
        member.tokens += work.tokens
        work.ahead = member.tokens
        self.running += work.size
        self._weigh(index)

    def _find(self, work: Work) -> int | None:
        """By how long its outstanding tokens would take, among those with room."""
        if self.held:
            return None
        if work.wanted is not None and self._may_take(work, work.wanted):
            return work.wanted
        heap = self._heap
        while heap and heap[0][2] != self.members[heap[0][1]].stamp:
            heapq.heappop(heap)
        if not heap:
            return None
        index = heap[0][1]
        if self._may_take(work, index):
            member = self.members[index]
            if self._is_worth_it(work, index) or member.refused >= _REFUSALS:
                return index
            member.refused += 1
        return self._search(work)

    def _search(self, work: Work) -> int | None:
        """Among all: for work that not every engine may take."""
        able = [
            index
            for index in range(len(self.members))
            if self._may_take(work, index) and self._is_worth_it(work, index)
        ]
        return min(able, key=lambda i: self._load(self.members[i]), default=None)

    def _is_worth_it(self, work: Work, index: int) -> bool:
        """Not where the others would be through with all that waits in half the time."""
        pace = self.members[index].pace
        if pace is None or not self._best_pace or work.been_at:
            return True
        waiting = self.waiting if work.waits else self.waiting + work.size
        others = 1 / self._best_pace + waiting / (self._slots * self._all_paces)
        return 1 / pace <= _GAIN * others

    def _may_take(self, work: Work, index: int) -> bool:
        member = self.members[index]
        if not self._has_room(member) or member.version < work.least_version:
            return False
        return index not in work.been_at or all(i in work.been_at for i in self.serving)

    def _has_room(self, member: Member) -> bool:
        return member.serves and (self._alone or member.requests < self._capacity)

    def _weigh(self, index: int) -> None:
        """What changed at this engine; one without room is not in the heap."""
        member = self.members[index]
        member.stamp += 1
        self._note_clear(member)
        if self._has_room(member):
            heapq.heappush(self._heap, (self._load(member), index, member.stamp))
        if len(self._heap) > 8 * len(self.members) + 64:
            self._weigh_all()

    def _weigh_all(self) -> None:
        self._alone = sum(not member.retired for member in self.members) == 1
        self.is_served = any(member.serves for member in self.members)
        for member in self.members:
            self._note_clear(member)
        self._find_paces()
        self._heap = [
            (self._load(member), index, member.stamp)
            for index, member in enumerate(self.members)
            if self._has_room(member)
        ]
        heapq.heapify(self._heap)

    def _note_clear(self, member: Member) -> None:
        clear = member.serves and 2 * member.requests <= self._slots
        self._clear += clear - member.clear
        member.clear = clear

    def _load(self, member: Member) -> float:
        return member.tokens / (member.speed or self._average)

    def _capacity_at(self, fill: float) -> float:
        """Requests that an engine may have: of bound ones only a share still runs, since the first
        responses of a work that end wait for its longest."""
        return self._slots * _AHEAD / max(_LEAST_FILL, fill)

    # ---- measuring

    def _measure(self, member: Member, work: Work, seconds: float, lengths: Sequence[int]) -> None:
        longest = max(1, *lengths)
        first = member.speed is None
        member.speed = _blend(member.speed, work.ahead / seconds)
        member.pace = _blend(member.pace, longest / seconds)
        member.seconds = _blend(member.seconds, seconds)
        self._length = _blend(self._length, longest)
        self._fill = _blend(self._fill, sum(lengths) / (len(lengths) * longest))
        self._capacity = self._capacity_at(self._fill)
        self._until_paced -= 1
        if self._until_paced <= 0:
            self._find_paces()
        if first:
            known = [one.speed for one in self.members if one.speed is not None]
            self._average = sum(known) / len(known)
            self._weigh_all()

    def _find_paces(self) -> None:
        """Once in as many answers as there are engines: a constant share of each."""
        paces = [member.pace for member in self.members if member.serves and member.pace]
        self._best_pace, self._all_paces = max(paces, default=0.0), sum(paces)
        self._until_paced = len(self.members)

    # ---- moving what runs

    def look_again_s(self) -> float | None:
        """When it is worth a look whether an engine is slow; None: not before something ends."""
        if self.waiting or self.held or not self._clear or self._looks >= _FRUITLESS_LOOKS:
            return None
        target = next(iter(self._targets()), None)
        if target is None or self.running == self.members[target].requests:
            return None
        usual = (self.members[target].seconds or 0.0) / 4
        return min(max(usual, _SHORTEST_LOOK_S), _LONGEST_LOOK_S) * 2.0 ** max(0, self._looks - 1)

    def suspects(self, now: float) -> list[int]:
        """Engines with work that an idle one would have been through with by now."""
        self._looks += 1
        targets = self._targets()
        if self.waiting or self.held or not targets:
            return []
        usual = max(self.members[targets[0]].seconds or 0.0, _SHORTEST_LOOK_S)
        return [
            index
            for index, member in enumerate(self.members)
            if member.serves
            and any(target != index for target in targets)
            and any(now - work.since > usual for work in list(member.bound)[:1])
        ]

    def plan_moves(self, index: int, pace: float, now: float) -> list[tuple[Work, int]]:
        """Work of this engine and where it goes on, if `pace` is what a response gets here now."""
        if self.waiting or self.held:
            return []
        source, planned = self.members[index], []
        room = {
            target: self._slots - self.members[target].requests
            for target in self._targets()
            if target != index and self.members[target].version >= source.version
        }
        for work in reversed(source.bound):
            if work.moves >= _TIMES_MOVED or work.moves_to is not None:
                continue
            for target, free in room.items():
                if free < work.size or target in work.been_at:
                    continue
                if self._gains(work, pace, self.members[target], now):
                    room[target] -= work.size
                    planned.append((work, target))
                    break
        if planned:
            self._note_slow(source, pace, self.members[planned[0][1]])
        return planned

    def _note_slow(self, source: Member, pace: float, target: Member) -> None:
        """Its responses never end there, so this is what is known of it."""
        assert target.pace is not None
        source.pace = _blend(source.pace, max(pace, target.pace / 100))
        if source.speed is None:
            source.speed = self._average * source.pace / target.pace
        self._weigh_all()

    def _targets(self) -> list[int]:
        """Engines with clear room, the fastest first."""
        found = [
            (-member.pace, index)
            for index, member in enumerate(self.members)
            if member.clear and member.pace is not None
        ]
        return [index for _, index in sorted(found)]

    def _gains(self, work: Work, pace: float, target: Member, now: float) -> bool:
        """What is left is guessed: as long as usual, or half of what there is, if that is more."""
        assert target.pace is not None
        if pace <= 0:
            return True
        made = min(pace * (now - work.since), work.longest)
        usual = self._length or 1.0
        left = max(1.0, min(max(usual - made, made / 2), work.longest - made))
        prompt = work.tokens / work.size - work.longest
        there = left + (prompt + made) / _PREFILL_GAIN
        return left / pace >= _GAIN * there / target.pace


def _blend(before: float | None, newest: float) -> float:
    if before is None:
        return newest
    return (1 - _NEWEST_SHARE) * before + _NEWEST_SHARE * newest
