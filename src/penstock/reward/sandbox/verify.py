"""Runs a solution against test cases in sandboxes and returns a code per test.

    1 pass    0 wrong answer    -1 runtime error or time-out    -2 does not compile

Expected results never enter the sandbox that runs the solution: outputs and values are compared by a
referee in another sandbox, assert-style tests run in a second sandbox that talks to the first. This
side decodes nothing that a solution made. Broken test cases are a fault of the data and raise `RewardError`; they are
never a pass or a fail. Blocking, for worker threads.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.errors import RewardError, SandboxError
from penstock.reward.sandbox.host import Outcome, Sandbox, SandboxLost
from penstock.reward.sandbox.inside import child, wire
from penstock.reward.sandbox.inside.judging import COMPILE_ERROR, ERROR
from penstock.reward.sandbox.inside.judging import PASS as PASS
from penstock.reward.sandbox.pool import SandboxPool
from penstock.reward.sandbox.settings import job_limits

MAX_TESTS = 10_000  # of one submission
LAST_WORDS_S = 0.5  # for the report of a process that has ended already
ATTEMPTS = 2


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


class TooManyTests(RewardError):
    """A submission with more tests than are run."""


def verify(
    pool: SandboxPool,
    test_cases: Mapping[str, Any] | None,
    source: str,
    timeout_s: float | None = None,
    stop_at_failure: bool = False,
    max_tests: int = MAX_TESTS,
) -> Verdict:
    """Run every test and return the verdict. Raises RewardError for broken test cases or sandboxes."""
    tests = read_tests(test_cases, parse=False)
    test_s = timeout_s or pool.settings.timeout_s
    if isinstance(tests, AssertTests):
        test_s = min(test_s, pool.settings.submission_timeout_s)
        return _verify_asserts(pool, tests, source, test_s, max_tests)
    check_number(len(tests.inputs), max_tests)
    run, lost = _PairsRun(pool, tests, source, test_s, stop_at_failure), 0
    while len(run.verdict.result) < len(tests.inputs):
        with pool.sandbox() as sandbox:
            try:
                run.go_on(sandbox)
                lost = 0
            except SandboxLost:  # it is replaced once for a test
                lost += 1
                if lost == ATTEMPTS:
                    words = f"a sandbox was lost {lost} times under one test"
                    raise SandboxError(words) from None
    return run.verdict


class _PairsRun:
    """One run of a solution against pairs of input and output, in one sandbox after the other."""

    def __init__(
        self, pool: SandboxPool, tests: PairTests, source: str, test_s: float, stop_at_failure: bool
    ) -> None:
        self._pool, self._tests, self._source, self._test_s = pool, tests, source, test_s
        self._stop_at_failure = stop_at_failure
        # only time in a sandbox counts, never the host's own delay
        self._left_s = pool.settings.submission_timeout_s
        self.verdict, self._total = Verdict(), len(tests.inputs)

    def go_on(self, sandbox: Sandbox) -> None:
        """Run the remaining tests, or one where the sandbox cannot be made like new."""
        while (index := len(self.verdict.result)) < self._total:
            limit_s = max(0.0, min(self._test_s, self._left_s))
            if limit_s == 0:
                self._fill(ERROR, "not run: the submission's time limit has passed")
                return
            limits = job_limits(self._pool.settings, limit_s)
            outcome = sandbox.run(self._tests.job(index, self._source), limits)
            self._left_s -= outcome.wall_s
            request = self._tests.question(index) | {"outcome": _ending(outcome, limit_s)}
            blobs = [outcome.stdout, outcome.stderr[-1000:], outcome.report]
            reply = _ask(self._pool, request, blobs)
            code, note = int(reply["code"]), str(reply["note"])
            if code == COMPILE_ERROR:
                self._fill(COMPILE_ERROR, note)
            else:
                self.verdict.add(code, note, wall_s=round(outcome.wall_s, 4))
                if self._stop_at_failure and code != PASS:
                    self._fill(ERROR, "not run: an earlier test failed")
            if not sandbox.renews:
                return

    def _fill(self, code: int, note: str) -> None:
        while len(self.verdict.result) < self._total:
            self.verdict.add(code, note)


def _ending(outcome: Outcome, limit_s: float) -> dict[str, Any]:
    return {"status": outcome.status, "stopped": outcome.stopped, "limit_s": limit_s}


def _ask(pool: SandboxPool, request: dict[str, Any], blobs: list[bytes]) -> dict[str, Any]:
    """The referee's answer; a referee that ends or does not answer is a fault, never a zero."""
    for _ in range(ATTEMPTS):
        try:
            with pool.referee() as referee:
                return referee.ask(request, blobs)
        except SandboxLost:
            continue
    raise SandboxError("the referee of the sandboxes did not answer")


def check_number(total: int, allowed: int) -> None:
    """Raise TooManyTests, a fault of the data, past the allowed number of tests."""
    if total > allowed:
        raise TooManyTests(f"test_cases: got {total} tests, allowed: up to {allowed}")


def _verify_asserts(
    pool: SandboxPool, tests: AssertTests, source: str, test_s: float, max_tests: int
) -> Verdict:
    limits = job_limits(pool.settings, pool.settings.submission_timeout_s)
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
        return Verdict(reply["result"], [{"note": note} for note in reply["notes"]])
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
        job |= {"names": tests.names, "prelude": tests.prelude}
        if tests.calls_check:
            job["entry_point"] = tests.names[0]
        judge.start(job, limits, [theirs.fileno()])
    return judge.result(limits["wall_s"])


def _what_happened(
    solution: Sandbox, outcome: Outcome, limit_s: float
) -> tuple[dict[str, Any], list[bytes]]:
    """The referee's question about assert-style tests, and the raw reports."""
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
class PairTests:
    """Text on stdin and on stdout, or arguments and value of a function: what is given and what is expected."""

    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    function: str = ""  # empty: the whole program runs

    def job(self, index: int, source: str) -> dict[str, Any]:
        """What a sandbox is to run for one test."""
        if not self.function:
            return {"job": "program", "source": source, "stdin": self.inputs[index]}
        arguments = wire.encode(self.inputs[index])
        return {"job": "call", "source": source, "function": self.function, "args": arguments}

    def question(self, index: int) -> dict[str, Any]:
        """What the referee is to compare the outcome with."""
        if not self.function:
            return {"form": "stdio", "expected": self.outputs[index]}
        return {"form": "call", "expected": wire.encode(self.outputs[index])}


@dataclass(slots=True, frozen=True)
class AssertTests:
    """Python source that raises when the solution is wrong."""

    source: str
    names: tuple[str, ...] = ()  # that the solution defines; empty: the one that the tests do not
    prelude: str = ""  # source of helpers; what it defines of `names` is the solution's
    calls_check: bool = False  # with the first of the names


def read_tests(
    test_cases: Mapping[str, Any] | None, *, parse: bool = True
) -> PairTests | AssertTests:
    """The test cases of a prompt or request; raise a RewardError that says what is wrong.

    Without `parse`, Python source is left to the judge, which can be killed while it reads it.
    """
    if not isinstance(test_cases, Mapping) or not test_cases:
        raise RewardError(f"test_cases: got {_short(test_cases)}, allowed: {_FORMS}")
    for form in ("asserts", "check"):
        if form in test_cases:
            return _read_asserts(test_cases, form, parse)
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
        return PairTests(tuple(map(_as_text, inputs)), tuple(map(_as_text, outputs)))
    if not isinstance(name, str):
        raise RewardError(f"test_cases: fn_name got {_short(name)}, allowed: a function's name")
    pairs = [
        _call_pair(arguments, expected) for arguments, expected in zip(inputs, outputs, strict=True)
    ]
    return PairTests(tuple(args for args, _ in pairs), tuple(value for _, value in pairs), name)


def _read_asserts(test_cases: Mapping[str, Any], form: str, parse: bool) -> AssertTests:
    listed = test_cases.get("entry_point", [] if form == "asserts" else None)
    entry_points = listed if isinstance(listed, list) else [listed]
    valid = all(isinstance(name, str) and name.isidentifier() for name in entry_points)
    if not valid or (form == "check" and not entry_points):
        raise RewardError(
            f"test_cases: entry_point got {_short(listed)}, allowed: a function's name, or a list of names"
        )
    tests = AssertTests(
        _source(test_cases[form], form),
        names=tuple(entry_points),
        prelude=_source(test_cases["prelude"], "prelude") if test_cases.get("prelude") else "",
        calls_check=form == "check",
    )
    if parse:
        try:
            child.read_tests(tests.source, tests.prelude, tests.names, imports=False)
        except child.BrokenTests as error:
            raise RewardError(f"test_cases: the tests are {error}") from None
    return tests


def _call_pair(arguments: Any, expected: Any) -> tuple[list[Any], Any]:
    """Read one call: a list as it is, text as one JSON value per line (the output likewise)."""
    if not isinstance(arguments, str):
        return (arguments if isinstance(arguments, list) else [arguments]), expected
    try:
        args = [json.loads(line) for line in arguments.split("\n") if line.strip()]
        return args, json.loads(expected) if isinstance(expected, str) else expected
    except ValueError:
        return [arguments], expected


def _source(value: Any, key: str) -> str:
    text = "\n".join(value) if isinstance(value, list) and all(map(_is_text, value)) else value
    if not isinstance(text, str) or not text.strip():
        raise RewardError(f"test_cases: {key} got {_short(value)}, allowed: Python source")
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
