"""Blocking calls on threads: results, errors, time-outs, and calls that hang beside others."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any

import pytest

from penstock.reward.call_threads import CallThreads, CallTimeout


def run_all(
    functions: list[Callable[[], Any]], *, count: int = 2, timeout_s: float = 60.0
) -> list[Any]:
    async def run() -> list[Any]:
        threads = CallThreads("test", count, timeout_s)
        try:
            calls = (threads.run(function) for function in functions)
            return await asyncio.gather(*calls, return_exceptions=True)
        finally:
            threads.close()

    return asyncio.run(run())


def test_many_calls_share_few_threads() -> None:
    assert len(set(run_all([threading.get_ident] * 500, count=3))) <= 3


def test_every_call_gets_its_own_result() -> None:
    functions = [lambda value=value: value for value in range(1000)]  # type: ignore[misc]
    assert run_all(functions) == list(range(1000))


def test_calls_run_beside_each_other() -> None:
    meeting = threading.Barrier(4)
    run_all([meeting.wait] * 4, count=4)


class SlowQueue(queue.SimpleQueue):
    """A thread that took an entry is interrupted before it does anything else."""

    def __init__(self) -> None:
        self.asked, self.taken, self.resumed = (threading.Event() for _ in range(3))

    def get(self) -> Any:
        self.asked.set()
        entry = super().get()
        self.taken.set()
        assert self.resumed.wait(20)
        return entry


def test_a_call_gets_a_thread_of_its_own_while_another_is_being_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow, meeting = SlowQueue(), threading.Barrier(2)
    monkeypatch.setattr(queue, "SimpleQueue", lambda: slow)

    async def run() -> None:
        threads = CallThreads("test", 2, timeout_s=60.0)
        slow.resumed.set()
        await threads.run(slow.asked.clear)
        assert slow.asked.wait(20)  # the thread is idle again
        slow.taken.clear()
        slow.resumed.clear()
        first = threads.submit(lambda: meeting.wait(20))
        assert slow.taken.wait(20)
        second = threads.submit(lambda: meeting.wait(20))
        slow.resumed.set()
        assert {await first, await second} == {0, 1}
        threads.close()

    asyncio.run(run())


def raises(error: BaseException) -> Callable[[], None]:
    def function() -> None:
        raise error

    return function


@pytest.mark.parametrize("error", [ValueError("no"), StopIteration("end"), KeyError("k")])
def test_an_error_reaches_its_caller_only(error: Exception) -> None:
    first, second, third = run_all([lambda: 1, raises(error), lambda: 3], count=1)
    assert (first, third) == (1, 3)
    assert isinstance(second, Exception)
    assert str(error.args[0]) in str(second)


def test_hanging_calls_time_out_and_the_calls_behind_them_run() -> None:
    released = threading.Event()
    try:
        outcomes = run_all([released.wait] * 2 + [lambda: "ran"] * 5, timeout_s=0.05)
    finally:
        released.set()
    assert [type(one) for one in outcomes[:2]] == [CallTimeout] * 2
    assert outcomes[2:] == ["ran"] * 5


def test_a_thread_that_was_given_up_ends_after_its_call() -> None:
    released, threads = threading.Event(), []

    def hang() -> None:
        threads.append(threading.current_thread())
        released.wait()

    run_all([hang], timeout_s=0.05)
    released.set()
    threads[0].join(10)
    assert not threads[0].is_alive()


def test_an_outcome_does_not_wait_for_the_next_call_of_its_thread() -> None:
    async def run() -> list[Any]:
        threads = CallThreads("test", 1, timeout_s=20.0)
        all_wait, second_is_back = threading.Event(), threading.Event()

        async def second() -> int:
            value = int(await threads.run(lambda: 2))
            second_is_back.set()
            return value

        calls = [threads.run(all_wait.wait), second(), threads.run(second_is_back.wait)]
        tasks = [asyncio.ensure_future(call) for call in calls]
        try:
            await asyncio.sleep(0)  # each has put its call into the queue
            all_wait.set()
            return await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            second_is_back.set()
            threads.close()

    assert asyncio.run(run()) == [True, 2, True]
