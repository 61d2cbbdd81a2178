"""Sandboxes that are shared: when they are set up, what their programs are charged, how they are stopped."""

from __future__ import annotations

import os
import select
import threading

import pytest

from penstock.reward.sandbox import pool
from penstock.reward.sandbox.host import Mode
from penstock.reward.sandbox.layers import Isolation
from penstock.reward.sandbox.pool import SandboxPool
from penstock.reward.sandbox.settings import SandboxSettings, job_limits
from penstock.reward.sandbox.verify import verify
from stages.sandbox_pools import make_pool


class FakeSandbox:
    facts, is_ready = True, True

    def stop(self) -> None:
        pass

    def end(self) -> None:
        pass


class FakeNursery:
    """Makes sandboxes of nothing and counts them."""

    alive = True

    def __init__(self) -> None:
        self.number, self._lock = 0, threading.Lock()

    def spawn(self) -> FakeSandbox:
        with self._lock:
            self.number += 1
        return FakeSandbox()

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("pause_s", "ready"), [(0.0, pool.WARM + pool.SPARE), (3600.0, pool.FEW + 1)]
)
def test_sandboxes_are_set_up_between_submissions_while_enough_are_ready(
    pause_s: float, ready: int
) -> None:
    uses, nursery = 16, FakeNursery()
    isolation = Isolation(Mode(False, False, False), "filtered", ())
    one = SandboxPool(SandboxSettings(workers=1), isolation, pause_s)
    one._nursery = nursery  # type: ignore[assignment]
    for _ in range(uses):
        with one.sandbox():
            pass
        if pause_s == 0:
            one._gardener.submit(int).result()  # all that was to do is done
    if pause_s == 0:
        assert nursery.number == uses + ready
    one.close()
    assert nursery.number <= uses + ready


def test_a_solution_of_assert_style_tests_is_charged_for_its_time() -> None:
    one = make_pool("namespaces", submission_timeout_s=60)
    try:
        tests = {"asserts": "assert f() == 1"}
        source = "def f():\n    import time\n    until = time.monotonic() + 0.2\n"
        source += "    while time.monotonic() < until: pass\n    return 1"
        verdict = verify(one, tests, source, 20)
    finally:
        one.close()
    assert verdict.result == [1]
    assert verdict.cpu_s >= 0.2


def test_a_program_that_runs_on_is_stopped_with_its_submission() -> None:
    one = make_pool("namespaces")
    limits = job_limits(one.settings, 600.0)
    try:
        with one.sandbox() as sandbox:
            sandbox.run({"job": "program", "source": ""}, limits)
            sandbox.stop()  # nothing runs: it can be used on
            assert sandbox.run({"job": "program", "source": "print(1)"}, limits).stdout == b"1\n"
            sandbox.start({"job": "program", "source": "while True: pass"}, limits)
            ended = os.pidfd_open(sandbox.pid)
            sandbox.stop()
            assert select.select([ended], [], [], 60)[0]
            os.close(ended)
    finally:
        one.close()
