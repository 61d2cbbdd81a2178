"""Codes per test, in all three forms, and solutions that attack the checker."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from penstock.errors import RewardError
from penstock.reward.sandbox.inside import wire
from penstock.reward.sandbox.inside.judging import same_output, same_value
from penstock.reward.sandbox.pool import SandboxPool
from penstock.reward.sandbox.verify import read_tests, verify
from stages.sandbox_pools import left_over, make_pool

SUM = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}
ADD = {"inputs": [[1, 2], [3, 4]], "outputs": [3, 7], "fn_name": "add"}
ASSERTS = {"asserts": "assert add(1, 2) == 3\nassert add(3, 4) == 7"}
CHECK = {"check": "def check(candidate):\n    assert candidate(3, 4) == 7", "entry_point": "add"}
GOOD_ADD = "def add(a, b):\n    return a + b\n"


# what judges is the same in both; `test_escapes.py` attacks the filters alone
@pytest.fixture(
    scope="module", params=["namespaces", pytest.param("filtered", marks=pytest.mark.slow)]
)
def pool(request: pytest.FixtureRequest) -> Iterator[SandboxPool]:
    pool = make_pool(request.param)
    yield pool
    pool.close()
    assert left_over() == []


def codes(
    pool: SandboxPool, tests: dict[str, Any], source: str, timeout_s: float = 30
) -> list[int]:
    verdict = verify(pool, tests, source, timeout_s)
    assert len(verdict.metadata) == len(verdict.result)
    return verdict.result


@pytest.mark.parametrize(
    ("tests", "source", "expected"),
    [
        (SUM, "print(sum(map(int, input().split())))", [1, 1]),
        (SUM, "print(3)", [1, 0]),
        (SUM, "print('3   \\n\\n')", [1, 0]),
        (SUM, "print(3.0)", [0, 0]),
        (SUM, "x = input(); print(1 // 0)", [-1, -1]),
        (SUM, "print(", [-2, -2]),
        (SUM, "print(3)\x00", [-2, -2]),
        (SUM, "", [0, 0]),
        (SUM, "print(3); raise SystemExit(0)", [1, 0]),
        (SUM, "print(3); raise SystemExit(1)", [-1, -1]),
        (
            SUM,
            "import sys\nsys.stdout.write('3'); sys.stdout.flush(); import os; os._exit(0)",
            [1, 0],
        ),
        (SUM, "import sys\nprint(sum(map(int, sys.stdin.read().split())))", [1, 1]),
        (
            SUM,
            "if __name__ == '__main__':\n    print(sum(map(int, open(0).read().split())))",
            [1, 1],
        ),
        (ADD, GOOD_ADD, [1, 1]),
        (ADD, "class Solution:\n    def add(self, a, b):\n        return a + b", [1, 1]),
        (ADD, "def add(a, b): return 3", [1, 0]),
        (ADD, "def add(a, b): return [a + b]", [0, 0]),
        (ADD, "def add(a, b): return str(a + b)", [0, 0]),
        (ADD, "def plus(a, b): return a + b", [-1, -1]),
        (ADD, "def add(a, b): return open", [0, 0]),
        (
            {"inputs": ["[1, 2]\n3"], "outputs": ["[1, 2, 3]"], "fn_name": "f"},
            "def f(a, b): return (*a, b)",
            [1],
        ),
        ({"inputs": [[2]], "outputs": [[4]], "fn_name": "f"}, "def f(a): return a * a", [1]),
        (
            {"inputs": [[1.0]], "outputs": [0.1], "fn_name": "f"},
            "def f(a): return a / 10.0000000001",
            [1],
        ),
        (ASSERTS, GOOD_ADD, [1, 1]),
        (ASSERTS, "def add(a, b): return 3", [1, 0]),
        (ASSERTS, "def add(a, b): return a / 0", [-1, -1]),
        (ASSERTS, "def add(a, b) return", [-2, -2]),
        (ASSERTS, "1 / 0", [-1, -1]),
        (ASSERTS, "", [-1, -1]),
        (CHECK, GOOD_ADD, [1]),
        (CHECK, "def add(a, b): return 8", [0]),
        (CHECK, "def other(a, b): return 7", [-1]),
    ],
)
def test_codes(pool: SandboxPool, tests: dict[str, Any], source: str, expected: list[int]) -> None:
    assert codes(pool, tests, source) == expected


RICH_ASSERTS = """
import math
box = Box(3)
assert box.size == 3
assert box.grow(2).size == 5
assert str(Box(1)) == "Box(size=1)"
assert list(count(3)) == [0, 1, 2]
numbers = [3, 1, 2]
sort_in_place(numbers)
assert numbers == [1, 2, 3]
assert math.isclose(third(), 1 / 3)
try:
    fail()
except ValueError as error:
    assert str(error) == "no"
assert pairs() == {(1, 2): {3}, "x": b"y", None: 10 ** 30}
assert LIMIT == 7
"""
RICH_SOLUTION = """
from dataclasses import dataclass
@dataclass
class Box:
    size: int
    def grow(self, by):
        self.size += by
        return self
def count(n):
    yield from range(n)
def sort_in_place(numbers): numbers.sort()
def third(): return 1 / 3
def fail(): raise ValueError("no")
def pairs(): return {(1, 2): {3}, "x": b"y", None: 10 ** 30}
LIMIT = 7
"""


def test_asserts_may_use_objects_generators_exceptions_and_changes_in_place(
    pool: SandboxPool,
) -> None:
    names = ["Box", "LIMIT", "count", "fail", "pairs", "sort_in_place", "third"]
    tests = {"asserts": RICH_ASSERTS, "entry_point": names}
    assert codes(pool, tests, RICH_SOLUTION) == [1] * 8


def test_all_of_the_standard_library_is_there() -> None:
    pool = make_pool("namespaces")
    threaded = "import threading\nthreading.Thread(target=lambda: print(input())).start()"
    source = "import asyncio\nasync def main(): print(input())\nasyncio.run(main())\n"
    source += "import sqlite3, ssl, ctypes, unittest, zoneinfo, xml.etree.ElementTree"
    try:
        for program in (source, threaded):
            assert codes(pool, {"inputs": ["a"], "outputs": ["a"]}, program) == [1]
    finally:
        pool.close()


def test_a_test_that_takes_too_long_is_an_error(pool: SandboxPool) -> None:
    slow = "def add(a, b):\n    while True: pass"
    for tests in (ADD, ASSERTS):
        verdict = verify(pool, tests, slow, 0.2)
        assert verdict.result == [-1, -1]
        assert "time-out" in verdict.metadata[0]["note"]
    assert codes(pool, ASSERTS, "while True: pass", 0.2) == [-1, -1]


def test_the_time_of_a_submission_is_bounded_over_all_tests() -> None:
    pool = make_pool("namespaces", submission_timeout_s=0.5)
    try:
        verdict = verify(
            pool, {"inputs": [""] * 50, "outputs": ["1"] * 50}, "while True: pass", 0.2
        )
        assert verdict.result == [-1] * 50
        assert verdict.metadata[-1]["note"] == "not run: the submission's time limit has passed"
    finally:
        pool.close()


def test_tests_after_a_failure_may_be_left_out(pool: SandboxPool) -> None:
    verdict = verify(
        pool, SUM | {"inputs": ["", "", ""], "outputs": ["1", "2", "1"]}, "print(1)", 30, True
    )
    assert verdict.result == [1, 0, -1]
    assert verdict.metadata[2]["note"] == "not run: an earlier test failed"


# Solutions that know no answer. `TOKEN` is what the tests expect.
TOKEN = "k3y-7f2c9d"
CHEATS = {
    "leaving with success": "import os\nos._exit(0)",
    "leaving in the function": "import os\ndef answer(): os._exit(0)",
    "sys.exit in the function": "import sys\ndef answer(): sys.exit(0)",
    "equal to everything": "class Any:\n    def __eq__(self, other): return True\n    def __ne__(self, other): return False\n    __hash__ = None\ndef answer(): return Any()",
    "a text that equals everything": "class Any(str):\n    def __eq__(self, other): return True\n    __hash__ = str.__hash__\ndef answer(): return Any('x')",
    "a number that equals everything": "class Any(int):\n    def __eq__(self, other): return True\n    __hash__ = int.__hash__\ndef answer(): return Any(1)",
    "patching builtins": "import builtins\nbuiltins.AssertionError = ValueError\nbuiltins.print = lambda *a: None\nbuiltins.len = lambda x: 0\ndef answer(): return ''",
    "patching the comparison": "import sys\nfor name, module in list(sys.modules.items()):\n    for part in ('same_output', 'same_value', 'verify', 'encode', 'decode'):\n        if hasattr(module, part): setattr(module, part, lambda *a: True)\ndef answer(): return True",
    "reading the caller's constants": "import sys\ndef answer():\n    frame, seen = sys._getframe(), []\n    while frame:\n        seen += [c for c in frame.f_code.co_consts if isinstance(c, str) and c.startswith('k3y')]\n        frame = frame.f_back\n    return (seen or [''])[0]",
    "searching memory": "import gc, re\ndef answer():\n    for o in gc.get_objects():\n        found = re.search('k3y-7f2c9[d]', repr(o)[:100000]) if isinstance(o, (dict, list, tuple)) else None\n        if found: return found.group()\n    return ''",
    "reading descriptors": "import os, re\ndef answer():\n    for fd in range(3, 64):\n        try:\n            os.set_blocking(fd, False)\n            found = re.search(b'k3y-7f2c9[d]', os.read(fd, 1 << 20))\n            if found: return found.group().decode()\n        except OSError: pass\n    return ''",
    "forging reports": 'import os\nfor line in (b\'{"count": 1}\', b\'{"test": 0, "code": 1, "note": "", "gone": false}\', b\'{"value": true}\', b\'{"result": [1]}\'):\n    os.write(3, line + b\'\\n\')\ndef answer(): return \'\'',
    "forging frames": "import os, json, struct\nbody = json.dumps({'value': {'object': [0, True]}, 'args': []}).encode()\ntry:\n    for _ in range(100): os.write(4, struct.pack('!I', len(body)) + body)\nexcept OSError: pass\ndef answer(): return ''",
    "breaking the protocol": "import os\ntry:\n    os.write(4, b'\\xff' * 4096)\nexcept OSError: pass\ndef answer(): return ''",
    "raising what tests catch": "def answer(): raise AssertionError",
    "raising an exit": "def answer(): raise KeyboardInterrupt",
    "an endless value": "def answer():\n    x = []\n    x.append(x)\n    return x",
    "a huge number": "def answer(): return 1 << 10_000_000",
    "a forged value": 'import os\nos.write(3, b\'{"value": {"dict": [[[1], {"int": 5}]]}}\\n\')\nos._exit(0)',
    "a forged depth": "import os\nos.write(3, b'{\"value\": ' + b'[' * 900 + b']' * 900 + b'}\\n')\nos._exit(0)",
    "a report of newlines": "import os\nos.write(3, b'\\n' * 4_000_000)\nos._exit(0)",
    "a report of objects": "import os\nos.write(3, b'{}\\n' * 1_300_000)\nos._exit(0)",
    "a deep report": "import os\nos.write(3, b'[' * 4_000_000)\nos._exit(0)",
    "a real-time signal": "import os\ndef answer(): os.kill(os.getpid(), 40)",
    "a huge value": "def answer(): return 'x' * (100 << 20)",
    "printing much": "def answer(): print('x' * (100 << 20))",
    "a hostile error": "class Bad(Exception):\n    def __str__(self): raise RuntimeError\ndef answer(): raise Bad",
}
CHEATED_TESTS = {
    "stdio": {"inputs": [""], "outputs": [TOKEN]},
    "call": {"inputs": [[]], "outputs": [TOKEN], "fn_name": "answer"},
    "asserts": {"asserts": f"assert answer() == {TOKEN!r}"},
    "check": {
        "check": f"def check(candidate):\n    assert candidate() == {TOKEN!r}",
        "entry_point": "answer",
    },
}


# those that take long, in one form; `make test-long` tries them in all
LONG_CHEATS = {"a huge value": "call", "patching builtins": "asserts", "printing much": "call"}


@pytest.mark.parametrize(
    ("cheat", "form"),
    [
        pytest.param(
            cheat, form, marks=[] if LONG_CHEATS.get(cheat, form) == form else [pytest.mark.slow]
        )
        for cheat in CHEATS
        for form in CHEATED_TESTS
    ],
)
def test_cheating_does_not_pay(pool: SandboxPool, cheat: str, form: str) -> None:
    source = CHEATS[cheat] + ("\nprint(answer())" if form == "stdio" else "")
    (code,) = codes(pool, CHEATED_TESTS[form], source, timeout_s=1.0)
    assert code in (0, -1)


def test_files_of_one_test_are_not_seen_by_the_next(pool: SandboxPool) -> None:
    source = "import os\ntry: os.makedirs('a/b'); open('f', 'w').close()\nexcept OSError: pass\n"
    source = "import os\nprint(os.listdir('.'))\n" + source
    assert codes(pool, {"inputs": [""] * 3, "outputs": ["[]"] * 3}, source) == [1, 1, 1]


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        (None, "got None"),
        ({}, "got {}"),
        ({"inputs": [], "outputs": []}, "0 inputs and 0 outputs"),
        ({"inputs": ["a"], "outputs": []}, "1 inputs and 0 outputs"),
        ({"inputs": "a", "outputs": "b"}, "allowed: {inputs, outputs}"),
        ({"asserts": ""}, "asserts got ''"),
        ({"asserts": "# nothing"}, "at least one test"),
        ({"asserts": "assert ("}, "not valid Python"),
        ({"asserts": []}, "allowed: Python source"),
        ({"check": "def check(c): pass"}, "entry_point got None"),
        (
            {"check": "def check(c): pass", "entry_point": "os.system"},
            "entry_point got 'os.system'",
        ),
        ({"inputs": [1], "outputs": [1], "fn_name": 5}, "fn_name got 5"),
        ({"tests": []}, "got the keys"),
    ],
)
def test_broken_test_cases_are_a_fault_of_the_data(tests: Any, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        read_tests(tests)


@pytest.mark.parametrize(
    ("expected", "printed", "same"),
    [
        ("1\n2\n", "1\n2", True),
        ("1 2", "1  2", True),
        ("a", "A", False),
        ("0.5", "0.50000001", True),
        ("0.5", "0.6", False),
        ("3", "3.0", False),
        ("1e3", "1000", True),
        ("x", "", False),
        ("", "", True),
        ("1.0", "nan", False),
        ("1\n2 3\n", "1 2 3\n", False),  # lines count
        ("1\n\n2", "1\n2\n\n", True),
        ("123456789.0", "123456700", False),
        ("123456789.25", "123456789.2500001", True),
        ("0.0000009", "0", False),
        ("0.0", "-1e-12", True),
        ("0.000123456789", "0.000123", True),
        ("1.10", "1.1", True),
        ("7e4521", "9e999", False),
    ],
)
def test_same_output(expected: str, printed: str, same: bool) -> None:
    assert same_output(expected, printed) is same


@pytest.mark.parametrize(
    ("expected", "value", "same"),
    [
        ([1, 2], (1, 2), True),
        ([[1], [2]], ([1], (2,)), True),
        ([5], 5, True),
        (1, True, False),
        (True, 1, False),
        (True, True, True),
        (1.0, 1, True),
        (1, 1.0, True),
        (123456789.0, 123456700, False),
        (0.1 + 0.2, 0.3, True),
        ({"1": 2}, {1: 2}, True),
        ({"1": 2}, {1: 3}, False),
        ([1], {1}, False),
        (None, None, True),
        ("a", "b", False),
    ],
)
def test_same_value(expected: Any, value: Any, same: bool) -> None:
    assert same_value(wire.encode(expected), wire.encode(value)) is same
