"""Runs a solution against test cases in sandboxes and returns a code per test.

    1 pass    0 wrong answer    -1 runtime error or time-out    -2 does not compile

Expected results never enter the sandbox that runs the solution: outputs and values are compared by a
referee in another sandbox, assert-style tests run in a second sandbox that talks to the first. This
side decodes nothing that a solution made. Broken test cases are a fault of the data and raise `RewardError`; they are
never a pass or a fail. Blocking, for worker threads.
"""

from __future__ import annotations

import ast
import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.errors import RewardError, SandboxError
from penstock.reward.sandbox.host import Outcome, Sandbox, SandboxLost
from penstock.reward.sandbox.inside import wire
from penstock.reward.sandbox.inside.judging import COMPILE_ERROR, ERROR
from penstock.reward.sandbox.inside.judging import PASS as PASS
from penstock.reward.sandbox.pool import SandboxPool
from penstock.reward.sandbox.settings import job_limits

MAX_TESTS = 10_000  # of one submission
LAST_WORDS_S = 0.5  # for the report of a process that has ended already
LARGE_BYTES = 256 << 10  # what a solution left is judged behind all that is smaller
ATTEMPTS = 2


@dataclass(slots=True)
class Verdict:
    """A code and its reason for every test."""

    result: list[int] = field(default_factory=list)
    metadata: list[dict[str, Any]] = field(default_factory=list)
    cpu_s: float = 0.0  # of the solution; of assert-style tests the time until their end

    def add(self, code: int, note: str = "", **more: Any) -> None:
        self.result.append(code)
        self.metadata.append({"note": note, **more})

    @property
    def passed(self) -> bool:
        return bool(self.result) and all(code == PASS for code in self.result)


class TooManyTests(RewardError):
    """A submission with more tests than are run."""


class _Budget:
    """The remaining time of a submission: only time in a sandbox counts, never the host's own delay."""

    def __init__(self, total_s: float, test_s: float) -> None:
        self._left_s, self.test_s = total_s, test_s

    def next_limit(self) -> float:
        """Return the time limit of the next test; 0 if no time is left."""
        return max(0.0, min(self.test_s, self._left_s))

    def spend(self, wall_s: float) -> None:
        self._left_s -= wall_s


def verify(
    pool: SandboxPool,
    test_cases: Mapping[str, Any] | None,
    source: str,
    timeout_s: float | None = None,
    stop_at_failure: bool = False,
    max_tests: int = MAX_TESTS,
    nice: int = 0,
) -> Verdict:
    """Run every test and return the verdict. Raises RewardError for broken test cases or sandboxes.

    `nice`: how far its processes stand back behind others where the processor is short.
    """
    tests = read_tests(test_cases, parse=False)
    settings = pool.settings
    budget = _Budget(settings.submission_timeout_s, timeout_s or settings.timeout_s)
    if isinstance(tests, AssertTests):
        return _verify_asserts(pool, tests, source, budget.next_limit(), max_tests, nice)
    check_number(len(tests.inputs), max_tests)
    return _verify_pairs(pool, tests, source, budget, stop_at_failure, nice)


def _verify_pairs(
    pool: SandboxPool,
    tests: StdioTests | CallTests,
    source: str,
    budget: _Budget,
    stop: bool,
    nice: int,
) -> Verdict:
    verdict, total, lost = Verdict(), len(tests.inputs), 0
    while len(verdict.result) < total:
        with pool.sandbox() as sandbox:
            try:
                if _run_in(sandbox, pool, tests, source, budget, stop, nice, verdict):
                    break
                lost = 0
            except SandboxLost:
                lost += 1
                if lost == ATTEMPTS:
                    raise SandboxError(f"a sandbox was lost {lost} times under one test") from None
    return verdict


def _run_in(
    sandbox: Sandbox,
    pool: SandboxPool,
    tests: StdioTests | CallTests,
    source: str,
    budget: _Budget,
    stop: bool,
    nice: int,
    verdict: Verdict,
) -> bool:
    """Run the remaining tests; return False if the rest needs another sandbox."""
    total, again = len(tests.inputs), False
    while (index := len(verdict.result)) < total:
        limit_s = budget.next_limit()
        if limit_s <= 0:
            _fill(verdict, total, ERROR, "not run: the submission's time limit has passed")
            return True
        limits = job_limits(pool.settings, limit_s, nice, steps_back=not again)
        outcome = sandbox.run(_job(tests, index, source), limits)
        verdict.cpu_s += outcome.cpu_s
        if was_starved(outcome, limit_s):
            again = True  # a delay of the host: this run says nothing of the solution
            if not sandbox.renews:
                raise SandboxLost
            continue
        again = False
        budget.spend(outcome.cpu_s if outcome.stepped_back else outcome.wall_s)
        code, note = _judge(pool, tests, index, outcome, limit_s)
        if code == COMPILE_ERROR:
            _fill(verdict, total, COMPILE_ERROR, note)
            return True
        verdict.add(code, note, wall_s=round(outcome.wall_s, 4))
        if stop and code != PASS:
            _fill(verdict, total, ERROR, "not run: an earlier test failed")
            return True
        if not sandbox.renews:
            return False
    return True


def was_starved(outcome: Outcome, limit_s: float) -> bool:
    """Return whether a test that had stepped back was stopped before it had its processor time."""
    waited = outcome.stepped_back and not outcome.slept
    return outcome.stopped == "wall" and waited and outcome.cpu_s < 0.95 * limit_s


def _fill(verdict: Verdict, total: int, code: int, note: str) -> None:
    while len(verdict.result) < total:
        verdict.add(code, note)


def _job(tests: StdioTests | CallTests, index: int, source: str) -> dict[str, Any]:
    if isinstance(tests, StdioTests):
        return {"job": "program", "source": source, "stdin": tests.inputs[index]}
    arguments = wire.encode(tests.inputs[index])
    return {"job": "call", "source": source, "function": tests.function, "args": arguments}


def _judge(
    pool: SandboxPool,
    tests: StdioTests | CallTests,
    index: int,
    outcome: Outcome,
    limit_s: float,
) -> tuple[int, str]:
    stdio, expected = isinstance(tests, StdioTests), tests.outputs[index]
    request = {
        "form": "stdio" if stdio else "call",
        "expected": expected if stdio else wire.encode(expected),
        "outcome": _ending(outcome, limit_s),
    }
    reply = _ask(pool, request, [outcome.stdout, outcome.stderr[-1000:], outcome.report])
    return int(reply["code"]), str(reply["note"])


def _ending(outcome: Outcome, limit_s: float) -> dict[str, Any]:
    return {"status": outcome.status, "stopped": outcome.stopped, "limit_s": limit_s}


def _ask(pool: SandboxPool, request: dict[str, Any], blobs: list[bytes]) -> dict[str, Any]:
    """Return the referee's answer; a referee that ends or does not answer is a fault, never a zero."""
    for _ in range(ATTEMPTS):
        try:
            with pool.referee(nice=sum(map(len, blobs)) > LARGE_BYTES) as referee:
                return referee.ask(request, blobs)
        except SandboxLost:
            continue
    raise SandboxError("the referee of the sandboxes did not answer")


def check_number(total: int, allowed: int) -> None:
    """Raise TooManyTests, a fault of the data, past the allowed number of tests."""
    if total > allowed:
        raise TooManyTests(f"test_cases: got {total} tests, allowed: up to {allowed}")


def _verify_asserts(
    pool: SandboxPool, tests: AssertTests, source: str, test_s: float, max_tests: int, nice: int
) -> Verdict:
    limits = job_limits(pool.settings, pool.settings.submission_timeout_s, nice)
    for _ in range(ATTEMPTS):
        with pool.sandbox() as solution, pool.sandbox() as judge:
            try:
                outcome = _run_both(solution, judge, tests, source, limits, test_s, max_tests)
                request, blobs = _what_happened(solution, outcome, limits["wall_s"])
            except SandboxLost:
                continue
        reply = _ask(pool, request | {"max_tests": max_tests}, blobs)
        if "broken" in reply:
            raise RewardError(f"test_cases: the tests are {reply['broken']}")
        check_number(reply.get("too_many", 0), max_tests)
        notes = [{"note": note} for note in reply["notes"]]
        return Verdict(
            reply["result"], notes, outcome.wall_s
        )  # what the solution used is not known
    raise SandboxError("the sandbox of assert-style tests ended twice under the same submission")


def _run_both(
    solution: Sandbox,
    judge: Sandbox,
    tests: AssertTests,
    source: str,
    limits: dict[str, Any],
    test_s: float,
    max_tests: int,
) -> Outcome:
    """Run the tests in one sandbox against the solution in the other; return how the tests ended."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        solution.start({"job": "solution", "source": source}, limits, [ours.fileno()])
        job = {"job": "tests", "source": tests.source, "timeout_s": test_s, "max_tests": max_tests}
        if tests.entry_point:
            job["entry_point"] = tests.entry_point
        judge.start(job, limits, [theirs.fileno()])
    return judge.result(limits["wall_s"])


def _what_happened(
    solution: Sandbox, outcome: Outcome, limit_s: float
) -> tuple[dict[str, Any], list[bytes]]:
    """Return the referee's question about assert-style tests, and the raw reports."""
    request: dict[str, Any] = {"form": "asserts", "outcome": _ending(outcome, limit_s)}
    blobs = [outcome.report, outcome.stderr[-1000:]]
    if b'"gone": true' not in outcome.report:
        return request, blobs
    try:
        ended = solution.result(wall_s=0, grace_s=LAST_WORDS_S)
    except SandboxLost:
        return request, blobs  # it still runs, or said nothing
    request["ended"] = _ending(ended, ended.wall_s)
    return request, [*blobs, ended.report, ended.stderr[-1000:]]


# -- the three forms of test cases --------------------------------------------------------------------

_FORMS = "{inputs, outputs}, {inputs, outputs, fn_name}, {asserts: source} or {check: source, entry_point}"


@dataclass(slots=True, frozen=True)
class StdioTests:
    """Text on stdin, text expected on stdout."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(slots=True, frozen=True)
class CallTests:
    """Arguments of a function, value expected from it."""

    function: str
    inputs: tuple[list[Any], ...]
    outputs: tuple[Any, ...]


@dataclass(slots=True, frozen=True)
class AssertTests:
    """Python source that raises when the solution is wrong."""

    source: str
    entry_point: str | None = None


Tests = StdioTests | CallTests | AssertTests


def read_tests(test_cases: Mapping[str, Any] | None, *, parse: bool = True) -> Tests:
    """Return the test cases of a prompt or request; raise a RewardError that says what is wrong.

    Without `parse`, Python source is left to the judge, which can be killed while it reads it.
    """
    if not isinstance(test_cases, Mapping) or not test_cases:
        raise RewardError(f"test_cases: got {_short(test_cases)}, allowed: {_FORMS}")
    if "asserts" in test_cases:
        return AssertTests(_source(test_cases["asserts"], "asserts", parse))
    if "check" in test_cases:
        entry_point = test_cases.get("entry_point")
        if not isinstance(entry_point, str) or not entry_point.isidentifier():
            raise RewardError(
                f"test_cases: entry_point got {_short(entry_point)}, allowed: a function's name"
            )
        return AssertTests(_source(test_cases["check"], "check", parse), entry_point)
    return _read_pairs(test_cases)


def _read_pairs(test_cases: Mapping[str, Any]) -> Tests:
    inputs, outputs = test_cases.get("inputs"), test_cases.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list):
        raise RewardError(f"test_cases: got the keys {sorted(test_cases)}, allowed: {_FORMS}")
    if not inputs or len(inputs) != len(outputs):
        raise RewardError(
            f"test_cases: got {len(inputs)} inputs and {len(outputs)} outputs, "
            "allowed: as many of each, at least one"
        )
    name = test_cases.get("fn_name")
    if not name:
        return StdioTests(tuple(map(_as_text, inputs)), tuple(map(_as_text, outputs)))
    if not isinstance(name, str):
        raise RewardError(f"test_cases: fn_name got {_short(name)}, allowed: a function's name")
    pairs = [_call_pair(given, expected) for given, expected in zip(inputs, outputs, strict=True)]
    return CallTests(name, tuple(args for args, _ in pairs), tuple(value for _, value in pairs))


def _call_pair(given: Any, expected: Any) -> tuple[list[Any], Any]:
    """Read one call: a list as it is, text as one JSON value per line (the output likewise)."""
    if not isinstance(given, str):
        return (given if isinstance(given, list) else [given]), expected
    try:
        args = [json.loads(line) for line in given.split("\n") if line.strip()]
        return args, json.loads(expected) if isinstance(expected, str) else expected
    except ValueError:
        return [given], expected


def _source(value: Any, key: str, parse: bool) -> str:
    text = "\n".join(value) if isinstance(value, list) and all(map(_is_text, value)) else value
    if not isinstance(text, str) or not text.strip():
        raise RewardError(f"test_cases: {key} got {_short(value)}, allowed: Python source")
    if not parse:
        return text
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise RewardError(f"test_cases: {key} is not valid Python: {error}") from None
    if not body:
        raise RewardError(f"test_cases: {key} got no statement, allowed: at least one test")
    return text


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _as_text(value: Any) -> str:
    if isinstance(value, list) and all(map(_is_text, value)):
        return "\n".join(value)
    return value if isinstance(value, str) else json.dumps(value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
