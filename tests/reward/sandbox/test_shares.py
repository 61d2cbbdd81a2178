"""Sandboxes of a pool: when they are set up, and how their programs are stopped."""

from __future__ import annotations

import os
import select
import threading
from typing import Any

from penstock.reward.sandbox import pool
from penstock.reward.sandbox.host import Isolation, Mode
from penstock.reward.sandbox.pool import SandboxPool
from penstock.reward.sandbox.settings import SandboxSettings, job_limits
from stages.sandbox_pools import make_pool


class FakeFactory:
    """Makes sandboxes of nothing, and counts those made and ended."""

    alive = True

    def __init__(self, mode: Mode, settings: SandboxSettings) -> None:
        self.made, self.ended = 0, 0
        self._lock = threading.Lock()

    def spawn(self) -> FakeSandbox:
        with self._lock:
            self.made += 1
        return FakeSandbox(self)

    def end(self) -> None:
        with self._lock:
            self.ended += 1

    def close(self) -> None:
        pass


class FakeSandbox:
    facts = True

    def __init__(self, factory: FakeFactory) -> None:
        self._factory = factory

    def stop(self) -> None:
        pass

    def end(self) -> None:
        self._factory.end()


def test_each_submission_has_a_new_sandbox_and_all_end_with_the_pool() -> None:
    factories: list[FakeFactory] = []

    def start(mode: Mode, settings: SandboxSettings) -> Any:
        factories.append(FakeFactory(mode, settings))
        return factories[-1]

    uses, used = 50, list[Any]()
    isolation = Isolation(Mode(False, False, False), "filtered", ())
    sandboxes = SandboxPool(SandboxSettings(workers=1), isolation, start)
    for _ in range(uses):
        with sandboxes.sandbox() as sandbox:
            used.append(sandbox)
    sandboxes.close()
    (factory,) = factories
    assert len(set(map(id, used))) == uses
    assert uses <= factory.made == factory.ended <= uses + pool.WARM + pool.SPARE


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
