"""Runs a solution against test cases in sandboxes and returns a code per test.

    1 pass    0 wrong answer    -1 runtime error or time-out    -2 does not compile

Expected results never enter the sandbox that runs the solution: outputs and values are compared here,
assert-style tests run in a second sandbox that talks to the first. Blocking, for worker threads.
"""

from __future__ import annotations

import json
import signal
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.errors import SandboxError
from penstock.sandbox.host import Outcome, Sandbox, SandboxLost
from penstock.sandbox.inside import codec
from penstock.sandbox.pool import SandboxPool
from penstock.sandbox.settings import job_limits
from penstock.sandbox.testcases import (
    AssertTests,
    CallTests,
    StdioTests,
    read_tests,
    same_output,
    same_value,
)

PASS, WRONG, ERROR, COMPILE_ERROR = 1, 0, -1, -2
LAST_WORDS_S = 0.5  # for the report of a process that has ended already


@dataclass(slots=True)
class Verdict:
    """A code and its reason for every test."""

    result: list[int] = field(default_factory=list)
    metadata: list[dict[str, Any]] = field(default_factory=list)

    def add(self, code: int, note: str = "", **more: Any) -> None:
        self.result.append(code)
        self.metadata.append({"note": note, **more})

    @property
    def passed(self) -> bool:
        return bool(self.result) and all(code == PASS for code in self.result)


class _Clock:
    """The remaining time of a submission."""

    def __init__(self, total_s: float, test_s: float) -> None:
        self._end, self._test_s = time.monotonic() + total_s, test_s

    def next_limit(self) -> float:
        """Return the time limit of the next test; 0 if no time is left."""
        return max(0.0, min(self._test_s, self._end - time.monotonic()))


def verify(
    pool: SandboxPool,
    test_cases: Mapping[str, Any] | None,
    source: str,
    timeout_s: float | None = None,
    stop_at_failure: bool = False,
) -> Verdict:
    """Run every test and return the verdict. Raises RewardError for broken test cases or sandboxes."""
    tests = read_tests(test_cases)
    settings = pool.settings
    clock = _Clock(settings.submission_timeout_s, timeout_s or settings.timeout_s)
    if isinstance(tests, AssertTests):
        return _verify_asserts(pool, tests, source, clock)
    return _verify_pairs(pool, tests, source, clock, stop_at_failure)


def _verify_pairs(
    pool: SandboxPool, tests: StdioTests | CallTests, source: str, clock: _Clock, stop: bool
) -> Verdict:
    verdict, index, total = Verdict(), 0, len(tests.inputs)
    lost = 0
    while index < total:
        with pool.sandbox() as sandbox:
            try:
                while index < total:
                    limit_s = clock.next_limit()
                    if limit_s <= 0:
                        _fill(
                            verdict, total, ERROR, "not run: the submission's time limit has passed"
                        )
                        return verdict
                    outcome = sandbox.run(
                        _job(tests, index, source), job_limits(pool.settings, limit_s)
                    )
                    code, note = _judge(tests, index, outcome, limit_s)
                    index, lost = index + 1, 0
                    if code == COMPILE_ERROR:
                        _fill(verdict, total, COMPILE_ERROR, note)
                        return verdict
                    verdict.add(code, note, wall_s=round(outcome.wall_s, 4))
                    if stop and code != PASS:
                        _fill(verdict, total, ERROR, "not run: an earlier test failed")
                        return verdict
                    if not outcome.clean:
                        break  # the test left files behind: the next one gets a fresh sandbox
            except SandboxLost:
                lost += 1
                if lost > 1:
                    verdict.add(ERROR, "the sandbox ended twice during this test")
                    index, lost = index + 1, 0
    return verdict


def _fill(verdict: Verdict, total: int, code: int, note: str) -> None:
    while len(verdict.result) < total:
        verdict.add(code, note)


def _job(tests: StdioTests | CallTests, index: int, source: str) -> dict[str, Any]:
    if isinstance(tests, StdioTests):
        return {"job": "program", "source": source, "stdin": tests.inputs[index]}
    arguments = codec.encode(tests.inputs[index])
    return {"job": "call", "source": source, "function": tests.function, "args": arguments}


def _judge(
    tests: StdioTests | CallTests, index: int, outcome: Outcome, limit_s: float
) -> tuple[int, str]:
    reports = _reports(outcome)
    fault = _fault(outcome, reports, limit_s)
    if fault is not None:
        return fault
    expected = tests.outputs[index]
    if isinstance(tests, StdioTests):
        right = same_output(expected, outcome.stdout)
        return (PASS, "") if right else (WRONG, f"printed {_short(outcome.stdout)}")
    if reports and "not_plain" in reports[-1]:
        return WRONG, _said(reports[-1]["not_plain"])
    if not reports or "value" not in reports[-1]:
        return ERROR, "the program ended before the function returned"
    try:
        value = codec.decode(reports[-1]["value"])
        right = same_value(expected, value)
        return (PASS, "") if right else (WRONG, f"returned {_short(repr(value))}")
    except Exception:  # the edge to data that untrusted code made up
        return WRONG, "returned something that cannot be compared"


def _said(text: object) -> str:
    """Return a text field that untrusted code reported; empty if it is not text."""
    return text[:500] if isinstance(text, str) else ""


def _short(text: str) -> str:
    text = text.strip()
    return repr(text if len(text) <= 80 else f"{text[:77]}...")


def _reports(outcome: Outcome) -> list[dict[str, Any]]:
    """Return the JSON lines that a child reported, without anything else that it wrote there."""
    found = []
    for line in outcome.report.splitlines():
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(message, dict):
            found.append(message)
    return found


def _fault(
    outcome: Outcome, reports: list[dict[str, Any]], limit_s: float
) -> tuple[int, str] | None:
    """Return why a child did not do its job; None if it did."""
    if outcome.stopped == "wall":
        return ERROR, f"time-out after {limit_s:g} s"
    if outcome.stopped == "output":
        return ERROR, "printed more than the output limit"
    error = next((report for report in reports if "error" in report), None)
    if error is not None and outcome.status != 0:
        code = COMPILE_ERROR if error["error"] == "compile" else ERROR
        return code, _said(error.get("text"))
    if outcome.status == -signal.SIGXCPU or outcome.status == -signal.SIGKILL:
        return ERROR, "killed: out of processor time"
    if outcome.status < 0:
        return ERROR, f"killed by signal {-outcome.status}"
    if outcome.status > 0:
        return ERROR, f"exit status {outcome.status}: {_short(outcome.stderr[-200:])}"
    return None


def _verify_asserts(pool: SandboxPool, tests: AssertTests, source: str, clock: _Clock) -> Verdict:
    test_s = clock.next_limit()
    limits = job_limits(pool.settings, pool.settings.submission_timeout_s)
    for _ in range(2):
        with pool.sandbox() as solution, pool.sandbox() as judge:
            try:
                return _ask_both(solution, judge, tests, source, limits, test_s)
            except SandboxLost:
                continue
    raise SandboxError("the sandbox of assert-style tests ended twice under the same submission")


def _ask_both(
    solution: Sandbox,
    judge: Sandbox,
    tests: AssertTests,
    source: str,
    limits: dict[str, Any],
    test_s: float,
) -> Verdict:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        solution.start({"job": "solution", "source": source}, limits, [ours.fileno()])
        job = {"job": "tests", "source": tests.source, "timeout_s": test_s}
        if tests.entry_point:
            job["entry_point"] = tests.entry_point
        judge.start(job, limits, [theirs.fileno()])
    outcome = judge.result(limits["wall_s"])
    reports = _reports(outcome)
    total = next((int(r["count"]) for r in reports if "count" in r), 1)
    verdict, gone = Verdict(), False
    for report in reports:
        if "test" in report:
            verdict.add(int(report["code"]), str(report["note"]))
            gone = gone or bool(report["gone"])
    if len(verdict.result) == total and not gone:
        return verdict
    fault = _last_words(solution) or _fault(outcome, reports, limits["wall_s"])
    code, note = fault or (ERROR, "the tests ended early")
    if code == COMPILE_ERROR:
        return Verdict([COMPILE_ERROR] * total, [{"note": note} for _ in range(total)])
    if gone:
        verdict.metadata[-1]["note"] += f": {note}"
    _fill(verdict, total, ERROR, f"not run: {note}")
    return verdict


def _last_words(solution: Sandbox) -> tuple[int, str] | None:
    """Return why the solution's process ended; None if it still runs."""
    try:
        outcome = solution.result(wall_s=0, grace_s=LAST_WORDS_S)
    except SandboxLost:
        return None
    return _fault(outcome, _reports(outcome), outcome.wall_s) or (ERROR, "it exited early")
