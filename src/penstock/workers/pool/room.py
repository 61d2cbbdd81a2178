"""Find the engine with room that would finish its work first, without looking at every engine.

Engines are in heaps: those with room by outstanding work, apart for each version of the weights and for slow
engines; those without room by requests per slot, until more requests per slot may be bound. Every change of an
engine files it again and makes its older entries void; void entries are dropped when they come to the
top, or when there are too many of them. So a choice and a change cost O(log engines). `dispatch.py` decides
what is slow and whom to choose.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heappop, heappush

_VOID_ENTRIES = 8  # file all engines again when the heaps hold so many entries per engine

Entry = tuple[float, int, int]  # what the heap is ordered by, index of the engine, its `filed`


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
    pace: float | None = None  # tokens per second of one response; known if the speed is
    answers: int = 0  # answers measured so far
    refused: int = 0  # skips in a row: work waited for another engine instead
    filed: int = 0  # number of the newest entry in a heap; others are void


@dataclass(slots=True, eq=False)
class _Shelf:
    """The engines with room that have one version of the weights."""

    new: list[Entry] = field(default_factory=list)  # not measured yet, by tokens
    fast: list[Entry] = field(default_factory=list)  # by seconds of work
    slow: list[Entry] = field(default_factory=list)  # the same
    slow_by_pace: list[Entry] = field(default_factory=list)  # the fastest first


class Room:
    """Owns the members. Change a member only through the methods here."""

    def __init__(self, engines: int, slots: int) -> None:
        self.members: list[Member] = []
        self.num_serving = self.num_active = 0  # that take work; that are not retired
        self._slots = slots  # requests that an engine runs at once if its member does not say
        self._bound_per_slot = 1.0  # see `limit`
        self._least_pace = 0.0  # slower engines are filed as slow
        self._shelves: dict[int, _Shelf] = {}  # by version
        self._full: list[Entry] = []
        self._entries = 0  # in all heaps
        self._known = (0, 0.0)  # members with a speed, the sum of their speeds
        self._together: dict[int, float] | None = None  # tokens/s by version; None: count again
        self._by_pace: dict[int, list[Entry]] = {}  # by version, the fastest first
        self._pace_entries = 0  # in these heaps
        for _ in range(engines):
            self.add(serves=True)

    # ---- changes

    def add(self, *, serves: bool) -> int:
        self.members.append(Member(serves=False))
        self.num_active += 1
        index = len(self.members) - 1
        self.let_serve(index, serves)
        return index

    def let_serve(self, index: int, serves: bool, *, retired: bool = False) -> None:
        member = self.members[index]
        self.num_serving += serves - member.serves
        self.num_active -= retired and not member.retired
        member.serves, member.retired = serves, member.retired or retired
        self._together = None
        self._file_pace(index)
        self._file(index)

    def loaded(self, index: int, version: int) -> None:
        """Note the version of an engine's weights."""
        self.members[index].version = version
        self._together = None
        self._file_pace(index)
        self._file(index)

    def set_slots(self, index: int, slots: int) -> None:
        self.members[index].slots = slots
        self._together = None
        self._file(index)
        self.slots = min(member.slots for member in self.members if member.slots)

    @property
    def slots(self) -> int:
        return self._slots

    @slots.setter
    def slots(self, slots: int) -> None:
        if slots != self._slots:
            self._slots, self._together = slots, None
            self._file_all()

    def limit(self, bound_per_slot: float) -> None:
        """Set how many requests may be bound for each slot of an engine."""
        self._bound_per_slot = bound_per_slot

    def load(self, index: int, requests: int, tokens: int) -> Member:
        """Bind or (with negative counts) unbind requests; return the member."""
        member = self.members[index]
        member.requests += requests
        member.tokens += tokens
        self._file(index)
        return member

    def measured(self, index: int, speed: float, pace: float) -> None:
        """Note the new averages of an engine."""
        member = self.members[index]
        count, total = self._known
        self._known = (count + (member.speed is None), total + speed - (member.speed or 0.0))
        if member.serves and self._together is not None:
            before = self._together.get(member.version, 0.0)
            change = (pace - (member.pace or 0.0)) * self._slots_of(member)
            self._together[member.version] = before + change
        member.speed, member.pace = speed, pace
        member.answers += 1
        self._file_pace(index)
        self._file(index)

    # ---- questions

    def fastest(self, version: int = 0) -> int | None:
        """Return the fastest of the engines that serve with these weights or newer ones.

        None before one of them has answered.
        """
        tops = []
        for weights, heap in list(self._by_pace.items()):
            if weights >= version and (top := self._top_pace(heap, weights)) is not None:
                tops.append(top)
        return min(tops)[1] if tops else None

    def together(self, version: int = 0) -> float:
        """Return the tokens/s of all slots of the measured engines that serve with these weights or newer ones."""
        if self._together is None:
            self._together = {}
            for one in self.members:
                if one.serves and one.pace is not None:
                    before = self._together.get(one.version, 0.0)
                    self._together[one.version] = before + one.pace * self._slots_of(one)
        return sum(rate for weights, rate in self._together.items() if weights >= version)

    def least_busy(self, version: int, least_pace: float) -> tuple[int | None, int | None]:
        """Return the engine with the fewest seconds of work: of all, and of those with at least this pace.

        Only engines with room, and these weights or newer ones. One that is not measured yet counts as fast.
        """
        self._least_pace = least_pace
        self._return_from_full()
        count, total = self._known
        average = total / count if count else 1.0
        fast: list[tuple[float, int]] = []
        slow: list[tuple[float, int]] = []
        for weights, shelf in list(self._shelves.items()):
            if not (shelf.new or shelf.fast or shelf.slow or shelf.slow_by_pace):
                del self._shelves[weights]
            elif weights >= version:
                self._return_from_slow(shelf)
                fast += [(tokens / average, index) for tokens, index in self._top(shelf.new)]
                fast += self._top(shelf.fast)
                slow += self._top(shelf.slow, is_slow=True)
        of_fast = min(fast, default=None)
        of_all = min(fast + slow, default=None)
        return (of_all[1] if of_all else None), (of_fast[1] if of_fast else None)

    # ---- the heaps

    def _slots_of(self, member: Member) -> int:
        return member.slots or self._slots

    def _has_room(self, member: Member) -> bool:
        return member.requests < (member.slots or self._slots) * self._bound_per_slot

    def _is_slow(self, member: Member) -> bool:
        return member.pace is not None and member.pace < self._least_pace

    def _file(self, index: int) -> None:
        """Put an engine where it belongs now; its other entries are void from here on."""
        member = self.members[index]
        member.filed += 1
        if not member.serves:
            return
        if self._entries > _VOID_ENTRIES * (len(self.members) + 8):
            self._file_all()
        else:
            self._put(index, member)

    def _file_pace(self, index: int) -> None:
        if self._pace_entries > _VOID_ENTRIES * (len(self.members) + 8):
            self._by_pace, self._pace_entries = {}, 0
            for place in range(len(self.members)):
                self._file_pace(place)
        member = self.members[index]
        if member.serves and member.pace is not None:
            heap = self._by_pace.setdefault(member.version, [])
            heappush(heap, (-member.pace, index, member.answers))
            self._pace_entries += 1

    def _top_pace(self, heap: list[Entry], version: int) -> Entry | None:
        """Return the fastest entry that is not void; drop those before it, and a heap that is empty then."""
        while heap:
            _, index, answers = heap[0]
            member = self.members[index]
            if (member.serves, member.answers, member.version) == (True, answers, version):
                return heap[0]
            heappop(heap)
            self._pace_entries -= 1
        del self._by_pace[version]
        return None

    def _file_all(self) -> None:
        self._shelves, self._full, self._entries = {}, [], 0
        for index, member in enumerate(self.members):
            if member.serves:
                self._put(index, member)

    def _put(self, index: int, member: Member) -> None:
        self._entries += 1
        if not self._has_room(member):
            per_slot = member.requests / self._slots_of(member)
            heappush(self._full, (per_slot, index, member.filed))
            return
        shelf = self._shelves.get(member.version)
        if shelf is None:
            shelf = self._shelves[member.version] = _Shelf()
        entry = (member.tokens / (member.speed or 1.0), index, member.filed)
        if member.pace is None:
            heappush(shelf.new, entry)
        elif self._is_slow(member):
            heappush(shelf.slow, entry)
            heappush(shelf.slow_by_pace, (-member.pace, index, member.filed))
            self._entries += 1
        else:
            heappush(shelf.fast, entry)

    def _pop(self, heap: list[Entry]) -> None:
        heappop(heap)
        self._entries -= 1

    def _return_from_full(self) -> None:
        while self._full:
            _, index, filed = self._full[0]
            member = self.members[index]
            if member.filed == filed:
                if not self._has_room(member):
                    return
                self._put(index, member)
            self._pop(self._full)

    def _return_from_slow(self, shelf: _Shelf) -> None:
        while shelf.slow_by_pace:
            _, index, filed = shelf.slow_by_pace[0]
            member = self.members[index]
            if member.filed == filed:
                if self._is_slow(member):
                    return
                member.filed += 1  # its entry among the slow ones is void
                self._put(index, member)
            self._pop(shelf.slow_by_pace)

    def _top(self, heap: list[Entry], *, is_slow: bool = False) -> list[tuple[float, int]]:
        """Return the first engine that belongs into this heap, if any; file the others before it again."""
        while heap:
            work, index, filed = heap[0]
            member = self.members[index]
            if member.filed == filed:
                if self._has_room(member) and self._is_slow(member) is is_slow:
                    return [(work, index)]
                self._pop(heap)
                member.filed += 1
                self._put(index, member)
            else:
                self._pop(heap)
        return []
