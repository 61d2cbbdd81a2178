"""The dispatcher on a made-up clock, with engines that join, leave and are slow."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.pool.dispatch import Dispatcher, Work

SLOTS = 4


def work(size: int = 1, *, longest: int = 100, prompt: int = 10, least_version: int = 0) -> Work:
    return Work(size=size, tokens=size * (longest + prompt), least_version=least_version)


def measured(dispatcher: Dispatcher, index: int, *, seconds: float, length: int) -> None:
    """Let an engine answer once, so that the dispatcher knows its speed."""
    known, serving = work(), dispatcher.serving
    for other in serving:
        dispatcher.let_serve(other, other == index)
    assert dispatcher.offer(known, 0.0) == index
    dispatcher.release(known, seconds, [length])
    for other in serving:
        dispatcher.let_serve(other, True)


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
    dispatcher.members[1].version = 1
    assert dispatcher.offer(work(least_version=1), 0.0) == 1
    assert dispatcher.offer(work(least_version=1), 0.0) == 1
    assert dispatcher.offer(work(least_version=2), 0.0) is None
    dispatcher.members[0].version = 2
    (bound,) = dispatcher.bindings(0.0)
    assert bound.engine == 0


def test_a_slow_engine_does_not_begin_what_the_others_will_soon_be_through_with() -> None:
    dispatcher = Dispatcher(2, SLOTS)
    measured(dispatcher, 0, seconds=1.0, length=100)
    measured(dispatcher, 1, seconds=10.0, length=100)
    dispatcher.let_serve(0, True)
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
    dispatcher.let_serve(0, True)
    taken = [dispatcher.offer(work(), 0.0) for _ in range(4)]
    assert {0, 1} <= set(taken[:2])
    assert taken.count(1) == 2


def test_an_engine_that_was_slow_is_tried_again_now_and_then() -> None:
    dispatcher = Dispatcher(2, 1024)
    measured(dispatcher, 0, seconds=1.0, length=100)
    measured(dispatcher, 1, seconds=10.0, length=100)
    dispatcher.let_serve(0, True)
    taken = [dispatcher.offer(work(), 0.0) for _ in range(600)]
    assert taken.count(1) == 2
    assert taken[:256].count(1) == 0


def test_work_that_comes_back_is_before_all_that_waits() -> None:
    dispatcher = Dispatcher(2, SLOTS)
    dispatcher.held = True
    late, back = work(), work()
    assert dispatcher.offer(late, 0.0) is None
    assert dispatcher.offer(back, 0.0, first=True) is None
    dispatcher.held = False
    assert list(dispatcher.bindings(0.0)) == [back, late]


def test_an_engine_several_times_slower_than_the_fastest_is_named() -> None:
    dispatcher = Dispatcher(3, SLOTS)
    for _ in range(4):
        assert dispatcher.slower_than(2) is None  # too few answers are measured
        measured(dispatcher, 0, seconds=1.0, length=100)
        measured(dispatcher, 1, seconds=2.0, length=100)
        measured(dispatcher, 2, seconds=5.0, length=100)
    assert [dispatcher.slower_than(index) for index in range(3)] == [None, None, 0]


# ---- the dispatcher under random events


class DispatcherMachine(RuleBasedStateMachine):
    """Offers, answers and withdrawals of work; engines that join and leave."""

    @initialize(engines=st.integers(1, 4))
    def begin(self, engines: int) -> None:
        self.dispatcher, self.now = Dispatcher(engines, SLOTS), 0.0
        self.waiting: list[Work] = []
        self.bound: list[Work] = []

    def _bind(self) -> None:
        for one in self.dispatcher.bindings(self.now):
            assert one is self.waiting[0], "first come, first served"
            self.bound.append(self.waiting.pop(0))

    @rule(size=st.integers(1, 6), longest=st.integers(1, 50), first=st.booleans())
    def offer(self, size: int, longest: int, first: bool) -> None:
        one = work(size, longest=longest)
        if self.dispatcher.offer(one, self.now, first=first) is not None:
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
        self.dispatcher.let_serve(data.draw(st.integers(0, count - 1)), serves)
        self._bind()

    @precondition(lambda self: len(self.dispatcher.members) < 6)
    @rule()
    def add(self) -> None:
        self.dispatcher.let_serve(self.dispatcher.add(), True)
        self._bind()

    @rule(held=st.booleans())
    def hold(self, held: bool) -> None:
        self.dispatcher.held = held
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
    def nothing_waits_beside_an_engine_with_room(self) -> None:
        if hasattr(self, "dispatcher") and self.waiting and not self.dispatcher.held:
            able = self.dispatcher._able(self.waiting[0])
            assert not self.dispatcher._worth_using(self.waiting[0], able)

    @invariant()
    def what_waits_has_something_to_wait_for(self) -> None:
        """Queued work waits for an engine that runs something, or for one that joins."""
        if hasattr(self, "dispatcher") and self.waiting and not self.dispatcher.held:
            serving = self.dispatcher.serving
            assert not serving or any(self.dispatcher.members[i].requests for i in serving)


TestDispatcher = DispatcherMachine.TestCase
TestDispatcher.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
