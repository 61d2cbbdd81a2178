"""Sandboxes of a pool: when they are set up, and how their programs are stopped."""

from __future__ import annotations

import os
import select

from penstock.reward.sandbox.settings import job_limits
from stages.sandbox_pools import factories, left_over, make_pool


def test_each_submission_has_a_new_sandbox_and_all_end_with_the_pool() -> None:
    before = set(factories().values())
    sandboxes, uses, used = make_pool("namespaces", workers=1), 20, list[int]()
    for _ in range(uses):
        with sandboxes.sandbox() as sandbox:
            used.append(sandbox.pid)
    sandboxes.close()
    assert len(set(used)) == uses
    assert left_over(before) == []


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
