"""The scheduler on a made-up clock, with engines that join, leave and are slow."""

from __future__ import annotations

import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.workers.pool.requests import EngineLoad, PromptBatch, Scheduler

SLOTS = 4


def work(size: int = 1, *, longest: int = 100, prompt: int = 10) -> PromptBatch:
    return PromptBatch(size=size, tokens=size * (longest + prompt))


def scheduler_of(engines: int, *, slots: int = SLOTS) -> Scheduler:
    return Scheduler([EngineLoad() for _ in range(engines)], slots)


def measured(scheduler: Scheduler, index: int, *, seconds: float, length: int) -> None:
    """Let an engine answer once, so that the scheduler knows its speed."""
    known, serving = work(), [engine for engine in scheduler.engines if engine.serves]
    for other in serving:
        other.serves = other is scheduler.engines[index]
    assert scheduler.offer(known, 0.0) == index
    scheduler.release(known, seconds, [length])
    for other in serving:
        other.serves = True


# ---- binding, by hand


def test_work_beyond_the_slots_waits_and_goes_to_whoever_has_room_first() -> None:
    scheduler = scheduler_of(2)
    for index in (0, 1):
        measured(scheduler, index, seconds=1.0, length=10)
    works = [work() for _ in range(14)]
    taken = [scheduler.offer(one, 0.0) for one in works]
    assert taken.count(0) == taken.count(1) == 5  # four slots, and one ahead
    assert taken[10:] == [None] * 4
    assert scheduler.waiting == 4
    scheduler.release(works[1], 1.0, [10])
    assert [one.engine for one in scheduler.bindings(1.0)] == [1]
    assert works[10].engine == 1
    assert works[11].is_queued


def test_a_session_returns_to_its_engine_unless_its_slots_are_taken() -> None:
    scheduler = scheduler_of(2)
    busy = [work(longest=10_000) for _ in range(SLOTS)]
    assert {scheduler.offer(busy[0], 0.0), scheduler.offer(busy[1], 0.0)} == {0, 1}
    for more in busy[2:]:
        more.holder = 1
        assert scheduler.offer(more, 0.0) == 1
    turn = work()
    turn.holder = 1
    assert scheduler.offer(turn, 0.0) == 1  # its last free slot, though the other engine has three
    late = work()
    late.holder = 1
    assert scheduler.offer(late, 0.0) == 0
    scheduler.release(turn, 1.0)
    scheduler.engines[1].serves = False
    gone = work()
    gone.holder = 1
    assert scheduler.offer(gone, 1.0) == 0


def test_one_engine_alone_takes_all_at_once() -> None:
    scheduler = scheduler_of(1)
    assert [scheduler.offer(work(8), 0.0) for _ in range(9)] == [0] * 9


def test_responses_that_end_before_the_longest_of_their_work_make_room_for_more() -> None:
    """On average half of the bound requests run, so twice as many are bound."""
    scheduler = scheduler_of(2)
    for _ in range(50):
        first = work(2)
        scheduler.offer(first, 0.0)
        scheduler.release(first, 1.0, [10, 0])
    taken = [scheduler.offer(work(2), 0.0) for _ in range(20)]
    assert taken.count(0) == taken.count(1) == 5


def test_a_slow_engine_does_not_begin_what_the_others_will_soon_be_through_with() -> None:
    scheduler = scheduler_of(2)
    measured(scheduler, 0, seconds=1.0, length=100)
    measured(scheduler, 1, seconds=10.0, length=100)
    fast = [work() for _ in range(5)]
    assert [scheduler.offer(one, 0.0) for one in fast] == [0] * 5
    assert scheduler.offer(work(), 0.0) is None  # the fast engine has a slot soon and ends at 2 s
    for _ in range(80):
        scheduler.offer(work(), 0.0)
    assert len(list(scheduler.bindings(0.0))) == 5  # with a queue this long the slow engine helps


def test_engines_that_differ_by_their_last_answers_share_the_work() -> None:
    """The one that decoded more rows, or had a request in its queue, was measured as a little slower."""
    scheduler = scheduler_of(2)
    measured(scheduler, 0, seconds=1.0, length=100)
    measured(scheduler, 1, seconds=1.3, length=100)
    taken = [scheduler.offer(work(), 0.0) for _ in range(4)]
    assert {0, 1} <= set(taken[:2])
    assert taken.count(1) == 2


def test_an_engine_that_was_slow_is_tried_again_now_and_then() -> None:
    scheduler = scheduler_of(2, slots=1024)
    measured(scheduler, 0, seconds=1.0, length=100)
    measured(scheduler, 1, seconds=10.0, length=100)
    taken = [scheduler.offer(work(), 0.0) for _ in range(600)]
    assert taken.count(1) == 2
    assert taken[:256].count(1) == 0


def test_work_that_comes_back_is_before_all_that_waits() -> None:
    scheduler = scheduler_of(2)
    scheduler.hold(True)
    late, back = work(), work()
    assert scheduler.offer(late, 0.0) is None
    assert scheduler.offer(back, 0.0, first=True) is None
    scheduler.hold(False)
    assert list(scheduler.bindings(0.0)) == [back, late]


def test_an_engine_several_times_slower_than_the_fastest_is_named() -> None:
    scheduler = scheduler_of(3)
    for _ in range(4):
        assert scheduler.slower_than(2) is None  # too few answers are measured
        measured(scheduler, 0, seconds=1.0, length=100)
        measured(scheduler, 1, seconds=2.0, length=100)
        measured(scheduler, 2, seconds=5.0, length=100)
    assert [scheduler.slower_than(index) for index in range(3)] == [None, None, 0]


def chosen_by_a_look_at_all(scheduler: Scheduler, one: PromptBatch) -> int | None:
    """Return the engine that the rules of docs/workers.md choose, found the long way."""
    members, common = scheduler.engines, scheduler.slots
    bound = math.inf if len(members) == 1 else 1.25 / max(0.125, scheduler._fill or 0.5)
    able = [
        index
        for index, member in enumerate(members)
        if member.serves and member.requests < (member.slots or common) * bound
    ]
    if scheduler.held or not able:
        return None
    average = scheduler._speed or 1.0
    seconds = {i: members[i].tokens / (members[i].speed or average) for i in able}
    least = min(able, key=seconds.__getitem__)
    paced = [one for one in members if one.serves and one.pace]
    worth = able
    if paced:
        fastest = max(member.pace for member in paced)
        together = sum((member.slots or common) * member.pace for member in paced)
        waiting = scheduler.waiting + (0 if one.is_queued else one.size)
        others = max(1 / fastest + waiting / together, 1.5 / fastest)
        worth = [i for i in able if (members[i].pace or math.inf) >= 1 / others]
    if least in worth or members[least].refused >= 256:
        return least
    return min(worth, key=seconds.__getitem__, default=None)


# ---- the scheduler under random events


class SchedulerMachine(RuleBasedStateMachine):
    """Offers, answers and withdrawals of work; engines that join and leave."""

    @initialize(engines=st.integers(1, 4))
    def begin(self, engines: int) -> None:
        self.engines, self.now = [EngineLoad() for _ in range(engines)], 0.0
        self.scheduler = Scheduler(self.engines, SLOTS)
        self.waiting: list[PromptBatch] = []
        self.bound: list[PromptBatch] = []

    def _bind(self) -> None:
        bindings = self.scheduler.bindings(self.now)
        while True:
            first = self.waiting[0] if self.waiting else None
            engine = None if first is None else chosen_by_a_look_at_all(self.scheduler, first)
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
    )
    def offer(self, size: int, longest: int, first: bool) -> None:
        one = work(size, longest=longest)
        may_bind = first or not self.waiting
        engine = chosen_by_a_look_at_all(self.scheduler, one) if may_bind else None
        assert self.scheduler.offer(one, self.now, first=first) == engine
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
        self.scheduler.release(one, self.now, lengths if finished else ())
        self._bind()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        one = self.waiting.pop(data.draw(st.integers(0, len(self.waiting) - 1)))
        self.scheduler.withdraw(one)
        self._bind()

    @rule(data=st.data(), serves=st.booleans())
    def come_or_go(self, data: st.DataObject, serves: bool) -> None:
        count = len(self.scheduler.engines)
        self.scheduler.engines[data.draw(st.integers(0, count - 1))].serves = serves
        self._bind()

    @rule(data=st.data(), slots=st.integers(1, 8))
    def tell_slots(self, data: st.DataObject, slots: int) -> None:
        index = data.draw(st.integers(0, len(self.scheduler.engines) - 1))
        self.scheduler.set_slots(index, slots)
        self._bind()

    @precondition(lambda self: len(self.scheduler.engines) < 6)
    @rule()
    def add(self) -> None:
        self.engines.append(EngineLoad())
        self._bind()

    @rule(held=st.booleans())
    def hold(self, held: bool) -> None:
        self.scheduler.hold(held)
        self._bind()

    @invariant()
    def counts_are_right(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        scheduler = self.scheduler
        assert scheduler.waiting == sum(one.size for one in self.waiting)
        assert scheduler.running == sum(one.size for one in self.bound)
        assert scheduler.queued() == self.waiting
        for index, member in enumerate(scheduler.engines):
            here = [one for one in self.bound if one.engine == index]
            assert member.requests == sum(one.size for one in here)
            assert member.tokens == sum(one.tokens for one in here)

    @invariant()
    def what_waits_has_something_to_wait_for(self) -> None:
        """Queued work waits for an engine that may take it and runs something, or for one that joins."""
        if hasattr(self, "scheduler") and self.waiting and not self.scheduler.held:
            serving = [engine for engine in self.engines if engine.serves]
            assert not serving or any(member.requests for member in serving)


class TestScheduler(SchedulerMachine.TestCase):
    settings = settings(max_examples=30, stateful_step_count=40, deadline=None)


@pytest.mark.slow
class TestSchedulerForLong(SchedulerMachine.TestCase):
    settings = settings(max_examples=1500, stateful_step_count=40, deadline=None)
