"""The dispatcher on a made-up clock, with engines that join, leave and are slow."""

from __future__ import annotations

import math
from collections import deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.workers.pool.dispatch import Dispatcher, Work
from penstock.workers.pool.room import Member

SLOTS = 4


def work(size: int = 1, *, longest: int = 100, prompt: int = 10, least_version: int = 0) -> Work:
    return Work(size=size, tokens=size * (longest + prompt), least_version=least_version)


def measured(dispatcher: Dispatcher, index: int, *, seconds: float, length: int) -> None:
    """Let an engine answer once, so that the dispatcher knows its speed."""
    known, serving = work(), dispatcher.serving
    for other in serving:
        dispatcher.room.let_serve(other, other == index)
    assert dispatcher.offer(known, 0.0) == index
    dispatcher.release(known, seconds, [length])
    for other in serving:
        dispatcher.room.let_serve(other, True)


# ---- binding, by hand


def test_work_beyond_the_slots_waits_and_goes_to_whoever_has_room_first() -> None:
    dispatcher = Dispatcher(2, SLOTS)
    for index in (0, 1):
        measured(dispatcher, index, seconds=1.0, length=10)
    works = [work() for _ in range(14)]
    taken = [dispatcher.offer(one, 0.0) for one in works]
    assert taken.count(0) == taken.count(1) == 5  # four slots, and one ahead
    assert taken[10:] == [None] * 4
    assert dispatcher.waiting == 4
    dispatcher.release(works[1], 1.0, [10])
    assert [one.engine for one in dispatcher.bindings(1.0)] == [1]
    assert works[10].engine == 1
    assert works[11].waits


def test_one_engine_alone_takes_all_at_once() -> None:
    dispatcher = Dispatcher(1, SLOTS)
    assert [dispatcher.offer(work(8), 0.0) for _ in range(9)] == [0] * 9


def test_responses_that_end_before_the_longest_of_their_work_make_room_for_more() -> None:
    """On average half of the bound requests run, so twice as many are bound."""
    dispatcher = Dispatcher(2, SLOTS)
    for _ in range(50):
        first = work(2)
        dispatcher.offer(first, 0.0)
        dispatcher.release(first, 1.0, [10, 0])
    taken = [dispatcher.offer(work(2), 0.0) for _ in range(20)]
    assert taken.count(0) == taken.count(1) == 5


def test_an_engine_without_the_weights_that_are_asked_for_is_passed_over() -> None:
    dispatcher = Dispatcher(2, SLOTS)
    dispatcher.room.loaded(1, 1)
    assert dispatcher.offer(work(least_version=1), 0.0) == 1
    assert dispatcher.offer(work(least_version=1), 0.0) == 1
    assert dispatcher.offer(work(least_version=2), 0.0) is None
    dispatcher.room.loaded(0, 2)
    (bound,) = dispatcher.bindings(0.0)
    assert bound.engine == 0


def test_a_slow_engine_does_not_begin_what_the_others_will_soon_be_through_with() -> None:
    dispatcher = Dispatcher(2, SLOTS)
    measured(dispatcher, 0, seconds=1.0, length=100)
    measured(dispatcher, 1, seconds=10.0, length=100)
    dispatcher.room.let_serve(0, True)
    fast = [work() for _ in range(5)]
    assert [dispatcher.offer(one, 0.0) for one in fast] == [0] * 5
    assert dispatcher.offer(work(), 0.0) is None  # the fast engine has a slot soon and ends at 2 s
    for _ in range(80):
        dispatcher.offer(work(), 0.0)
    assert len(list(dispatcher.bindings(0.0))) == 5  # with a queue this long the slow engine helps


def test_engines_that_differ_by_their_last_answers_share_the_work() -> None:
    """The one that decoded more rows, or had a request in its queue, was measured as a little slower."""
    dispatcher = Dispatcher(2, SLOTS)
    measured(dispatcher, 0, seconds=1.0, length=100)
    measured(dispatcher, 1, seconds=1.3, length=100)
    dispatcher.room.let_serve(0, True)
    taken = [dispatcher.offer(work(), 0.0) for _ in range(4)]
    assert {0, 1} <= set(taken[:2])
    assert taken.count(1) == 2


def test_an_engine_that_was_slow_is_tried_again_now_and_then() -> None:
    dispatcher = Dispatcher(2, 1024)
    measured(dispatcher, 0, seconds=1.0, length=100)
    measured(dispatcher, 1, seconds=10.0, length=100)
    dispatcher.room.let_serve(0, True)
    taken = [dispatcher.offer(work(), 0.0) for _ in range(600)]
    assert taken.count(1) == 2
    assert taken[:256].count(1) == 0


def test_work_does_not_wait_for_a_faster_engine_whose_weights_are_too_old() -> None:
    dispatcher = Dispatcher(2, SLOTS)
    measured(dispatcher, 0, seconds=10.0, length=100)
    measured(dispatcher, 1, seconds=1.0, length=100)
    assert dispatcher.offer(work(), 0.0) == 1
    dispatcher.room.loaded(0, version=1)
    assert dispatcher.offer(work(least_version=1), 0.0) == 0
    dispatcher.room.loaded(1, version=1)
    assert dispatcher.offer(work(least_version=1), 0.0) == 1


def test_work_that_comes_back_is_before_all_that_waits() -> None:
    dispatcher = Dispatcher(2, SLOTS)
    dispatcher.hold(True)
    late, back = work(), work()
    assert dispatcher.offer(late, 0.0) is None
    assert dispatcher.offer(back, 0.0, first=True) is None
    dispatcher.hold(False)
    assert list(dispatcher.bindings(0.0)) == [back, late]


def test_an_engine_several_times_slower_than_the_fastest_is_named() -> None:
    dispatcher = Dispatcher(3, SLOTS)
    for _ in range(4):
        assert dispatcher.slower_than(2) is None  # too few answers are measured
        measured(dispatcher, 0, seconds=1.0, length=100)
        measured(dispatcher, 1, seconds=2.0, length=100)
        measured(dispatcher, 2, seconds=5.0, length=100)
    assert [dispatcher.slower_than(index) for index in range(3)] == [None, None, 0]


def chosen_by_a_look_at_all(dispatcher: Dispatcher, one: Work) -> int | None:
    """Return the engine that the rules of docs/workers.md choose, found the long way."""
    members, common = dispatcher.members, dispatcher.room.slots
    alone = sum(not member.retired for member in members) == 1
    fill = 0.5 if dispatcher._fill is None else dispatcher._fill
    bound = math.inf if alone else 1.25 / max(0.125, fill)
    version = one.least_version
    able = [
        index
        for index, member in enumerate(members)
        if member.serves
        and member.requests < (member.slots or common) * bound
        and member.version >= version
    ]
    if dispatcher.held or not able:
        return None
    known = [member.speed for member in members if member.speed is not None]
    average = sum(known) / len(known) if known else 1.0
    seconds = {i: members[i].tokens / (members[i].speed or average) for i in able}
    least = min(able, key=seconds.__getitem__)
    paced = [one for one in members if one.serves and one.pace and one.version >= version]
    worth = able
    if paced:
        fastest = max(member.pace for member in paced)
        together = sum((member.slots or common) * member.pace for member in paced)
        waiting = dispatcher.waiting + (0 if one.waits else one.size)
        others = max(1 / fastest + waiting / together, 1.5 / fastest)
        worth = [i for i in able if (members[i].pace or math.inf) >= 1 / others]
    if least in worth or members[least].refused >= 256:
        return least
    return min(worth, key=seconds.__getitem__, default=None)


class CountedList(list[Member]):
    """Counts how often a member is looked at."""

    looks = 0

    def __getitem__(self, index):  # type: ignore[no-untyped-def, override]
        self.looks += 1
        return super().__getitem__(index)

    def __iter__(self):  # type: ignore[no-untyped-def, override]
        self.looks += len(self)
        return super().__iter__()


def looks_per_request(engines: int) -> float:
    """Offer and answer requests so that all engines are full and some requests wait."""
    dispatcher = Dispatcher(engines, SLOTS)
    members = dispatcher.members = dispatcher.room.members = CountedList(dispatcher.members)
    bound: deque[Work] = deque()
    for number in range(20 * engines):
        if dispatcher.offer(one := work(), number / engines) is not None:
            bound.append(one)
        if number > 12 * engines:
            dispatcher.release(bound.popleft(), number / engines, [90 + number % 7])
            bound += dispatcher.bindings(number / engines)
    assert dispatcher.waiting
    return members.looks / (20 * engines)


def test_a_choice_among_many_engines_looks_at_few_of_them() -> None:
    assert looks_per_request(500) < 2 * looks_per_request(20) < 50


# ---- the dispatcher under random events


class DispatcherMachine(RuleBasedStateMachine):
    """Offers, answers and withdrawals of work; engines that join and leave."""

    @initialize(engines=st.integers(1, 4))
    def begin(self, engines: int) -> None:
        self.dispatcher, self.now = Dispatcher(engines, SLOTS), 0.0
        self.waiting: list[Work] = []
        self.bound: list[Work] = []

    def _bind(self) -> None:
        bindings = self.dispatcher.bindings(self.now)
        while True:
            first = self.waiting[0] if self.waiting else None
            engine = None if first is None else chosen_by_a_look_at_all(self.dispatcher, first)
            one = next(bindings, None)
            if engine is None:
                assert one is None
                return
            assert one is first, "first come, first served"
            assert first.engine == engine
            self.bound.append(self.waiting.pop(0))

    @rule(
        size=st.integers(1, 6),
        longest=st.integers(1, 50),
        first=st.booleans(),
        version=st.integers(0, 1),
    )
    def offer(self, size: int, longest: int, first: bool, version: int) -> None:
        one = work(size, longest=longest, least_version=version)
        may_bind = first or not self.waiting
        engine = chosen_by_a_look_at_all(self.dispatcher, one) if may_bind else None
        assert self.dispatcher.offer(one, self.now, first=first) == engine
        if engine is not None:
            self.bound.append(one)
        else:
            self.waiting.insert(0 if first else len(self.waiting), one)
            self._bind()

    @precondition(lambda self: self.bound)
    @rule(data=st.data(), seconds=st.floats(0, 10), finished=st.booleans())
    def answer(self, data: st.DataObject, seconds: float, finished: bool) -> None:
        one = self.bound.pop(data.draw(st.integers(0, len(self.bound) - 1)))
        self.now += seconds
        lengths = data.draw(st.lists(st.integers(0, 50), min_size=one.size, max_size=one.size))
        self.dispatcher.release(one, self.now, lengths if finished else ())
        self._bind()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        one = self.waiting.pop(data.draw(st.integers(0, len(self.waiting) - 1)))
        self.dispatcher.withdraw(one)
        self._bind()

    @rule(data=st.data(), serves=st.booleans())
    def come_or_go(self, data: st.DataObject, serves: bool) -> None:
        count = len(self.dispatcher.members)
        self.dispatcher.room.let_serve(data.draw(st.integers(0, count - 1)), serves)
        self._bind()

    @rule(data=st.data(), version=st.integers(0, 2), slots=st.integers(1, 8))
    def load_weights_and_tell_slots(self, data: st.DataObject, version: int, slots: int) -> None:
        index = data.draw(st.integers(0, len(self.dispatcher.members) - 1))
        self.dispatcher.room.loaded(index, version)
        self.dispatcher.room.set_slots(index, slots)
        self._bind()

    @precondition(lambda self: len(self.dispatcher.members) < 6)
    @rule()
    def add(self) -> None:
        self.dispatcher.room.add(serves=True)
        self._bind()

    @rule(held=st.booleans())
    def hold(self, held: bool) -> None:
        self.dispatcher.hold(held)
        self._bind()

    @invariant()
    def counts_are_right(self) -> None:
        if not hasattr(self, "dispatcher"):
            return
        dispatcher = self.dispatcher
        assert dispatcher.waiting == sum(one.size for one in self.waiting)
        assert dispatcher.running == sum(one.size for one in self.bound)
        assert dispatcher.waiters() == self.waiting
        for index, member in enumerate(dispatcher.members):
            here = [one for one in self.bound if one.engine == index]
            assert member.requests == sum(one.size for one in here)
            assert member.tokens == sum(one.tokens for one in here)

    @invariant()
    def what_waits_has_something_to_wait_for(self) -> None:
        """Queued work waits for an engine that may take it and runs something, or for one that joins."""
        if hasattr(self, "dispatcher") and self.waiting and not self.dispatcher.held:
            serving = [self.dispatcher.members[i] for i in self.dispatcher.serving]
            able = [one for one in serving if one.version >= self.waiting[0].least_version]
            assert not able or any(member.requests for member in able)


class TestDispatcher(DispatcherMachine.TestCase):
    settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.slow
class TestDispatcherForLong(DispatcherMachine.TestCase):
    settings = settings(max_examples=1500, stateful_step_count=40, deadline=None)
