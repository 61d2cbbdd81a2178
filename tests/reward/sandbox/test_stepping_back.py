"""Who gets the processor: a test that has used much of it steps back, and is not failed for that."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import SandboxError
from penstock.reward.sandbox.host import Outcome
from penstock.reward.sandbox.inside.zygote import STRETCH, TimeLimit
from penstock.reward.sandbox.settings import STEPS_BACK_S, SandboxSettings, job_limits
from penstock.reward.sandbox.verify import verify
from stages.sandbox_pools import make_pool

LIMIT_S = 2.0


class FakeLimit(TimeLimit):
    """A limit of a process whose processor time the test sets."""

    used_s = 0.0

    def __init__(self, *, steps_back: bool = True) -> None:
        super().__init__(1, job_limits(SandboxSettings(), LIMIT_S, steps_back=steps_back))

    def _used_s(self) -> float:
        return self.used_s

    def _step_back(self) -> None:
        self.stepped_back = True


def test_a_test_that_uses_little_keeps_its_place_and_its_wall_time() -> None:
    limit = FakeLimit()
    limit.used_s = STEPS_BACK_S / 2
    for wall_s in (0.0, 0.1, 1.0, 1.99):
        left_s = limit.left(wall_s)
        assert 0 < left_s <= LIMIT_S - wall_s
    assert limit.left(LIMIT_S) == 0
    assert not limit.stepped_back


def test_a_test_that_uses_much_steps_back_and_is_limited_by_its_processor_time() -> None:
    limit = FakeLimit()
    assert limit.left(0.0) == pytest.approx(STEPS_BACK_S)  # no later than it can have used so much
    limit.used_s = STEPS_BACK_S
    assert limit.left(0.05) == pytest.approx(LIMIT_S - STEPS_BACK_S)
    assert limit.stepped_back
    limit.used_s = 0.5
    assert limit.left(2 * LIMIT_S) == 1.5  # others had the processor
    limit.used_s = 0.6
    assert limit.left(STRETCH * LIMIT_S) == 0  # nothing lasts for ever
    assert not limit.slept
    limit.used_s = LIMIT_S
    assert limit.left(2 * LIMIT_S) == 0


def test_a_test_that_computed_and_now_sleeps_is_stopped_without_a_stretch() -> None:
    limit = FakeLimit()
    limit.used_s = 0.5
    assert limit.left(0.6) == 1.5
    assert limit.left(1.0) == 1.5
    assert limit.left(2.0) == pytest.approx(0.6)  # unless it runs by then
    assert (limit.left(2.6), limit.slept) == (0, True)


def test_a_test_that_may_not_step_back_has_its_wall_time() -> None:
    limit = FakeLimit(steps_back=False)
    limit.used_s = LIMIT_S
    assert (limit.left(0.5), limit.left(LIMIT_S), limit.stepped_back) == (1.5, 0, False)


class BusyPool:
    """A pool on a machine that is busy `delays` times, and then is not."""

    settings = SandboxSettings()
    renews = True

    def __init__(self, delays: int) -> None:
        self.delays, self.asked = delays, []

    @contextmanager
    def sandbox(self) -> Iterator[BusyPool]:
        yield self

    @contextmanager
    def referee(self) -> Iterator[BusyPool]:
        yield self

    def run(self, job: dict[str, Any], limits: dict[str, Any]) -> Outcome:
        back = limits["steps_back_s"] is not None
        self.asked.append(back)
        self.delays -= 1
        stopped = "wall" if self.delays >= 0 else ""
        return Outcome(0, stopped, b"", b"", b"", 24.0, 0.1, stepped_back=back)

    def ask(self, request: dict[str, Any], blobs: list[bytes]) -> dict[str, Any]:
        return {"code": -1 if request["outcome"]["stopped"] else 1, "note": ""}


TESTS = {"inputs": ["", ""], "outputs": ["", ""]}


def test_a_test_that_others_kept_from_the_processor_is_run_again_in_its_place() -> None:
    pool = BusyPool(delays=1)
    verdict = verify(pool, TESTS, "", 6.0)  # type: ignore[arg-type]
    assert verdict.result == [1, 1]
    assert pool.asked == [True, False, True]  # the second time it need not step back


def test_a_test_that_sleeps_in_its_own_place_fails_by_its_wall_time() -> None:
    pool = BusyPool(delays=2)
    assert verify(pool, TESTS, "", 6.0).result == [-1, 1]  # type: ignore[arg-type]
    assert pool.asked == [True, False, True]


def test_where_a_sandbox_cannot_be_used_again_a_delay_is_a_fault() -> None:
    pool = BusyPool(delays=9)
    pool.renews = False
    with pytest.raises(SandboxError, match="lost 2 times"):
        verify(pool, TESTS, "", 6.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["namespaces", "filtered"])
def test_a_program_that_computes_steps_back_and_a_short_one_does_not(mode: str) -> None:
    pool = make_pool(mode)
    try:
        with pool.sandbox() as sandbox:
            limits = job_limits(pool.settings, 60.0, steps_back=True)
            source = "import time\nwhile time.process_time() < 1: pass"
            long = sandbox.run({"job": "program", "source": source}, limits)
        with pool.sandbox() as sandbox:
            limits = job_limits(pool.settings, 20.0, steps_back=True)
            short = sandbox.run({"job": "program", "source": "print(1)"}, limits)
    finally:
        pool.close()
    assert (long.status, long.stepped_back) == (0, True)
    assert (short.status, short.stdout) == (0, b"1\n")


def test_a_program_that_computes_is_in_the_idle_class_and_its_threads_are_last() -> None:
    """As the host sees it; the program tells by a byte each time it has computed for a while."""
    pool = make_pool("namespaces")
    source = (
        "import os, threading, time\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "while True:\n"
        "    until = time.process_time() + 0.005\n"
        "    while time.process_time() < until: pass\n"
        "    os.write(4, b'x')\n"
    )
    ours, theirs = socket.socketpair()
    ours.settimeout(60)
    try:
        with ours, theirs, pool.sandbox() as sandbox:
            limits = job_limits(pool.settings, 60.0, steps_back=True)
            sandbox.start({"job": "program", "source": source}, limits, [theirs.fileno()])
            assert ours.recv(1)
            (program,) = map(int, children_of(sandbox.pid).split())
            assert os.sched_getscheduler(sandbox.pid) == os.SCHED_OTHER
            while os.sched_getscheduler(program) != os.SCHED_IDLE:
                assert ours.recv(1)  # it computes on
            threads = [int(one) for one in os.listdir(f"/proc/{program}/task")]
            assert len(threads) == 2
            assert {os.getpriority(os.PRIO_PROCESS, one) for one in threads} == {19}
            assert os.sched_getscheduler(sandbox.pid) == os.SCHED_OTHER  # it still watches
    finally:
        pool.close()


def children_of(pid: int) -> str:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text()
