"""Solutions that try to decide their own verdict, stall the host, or talk to other tests."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.errors import RewardError, SandboxError
from penstock.reward.sandbox import verify as verify_module
from penstock.reward.sandbox.host import SandboxLost
from penstock.reward.sandbox.inside import judging, wire
from penstock.reward.sandbox.pool import SandboxPool
from penstock.reward.sandbox.settings import SandboxSettings
from penstock.reward.sandbox.verify import verify
from stages.forger import forger
from stages.sandbox_pools import left_over, make_pool


@pytest.fixture(scope="module")
def pool() -> Iterator[SandboxPool]:
    pool = make_pool("namespaces")
    yield pool
    pool.close()
    assert left_over() == []


FORGED_TESTS = {
    "set": "assert set(f()) == set([1, 2])",
    "abs": "assert abs(f() - 3.5) < 1e-6",
    "sorted": "assert sorted(f()) == sorted([2, 1])",
    "an import": "import math\nassert math.isclose(f(), 0.5)",
    "a loop over range": "def check(g):\n    for i in range(9):\n        assert g(i) == i\ncheck(f)",
    "enumerate and zip": "def check(g):\n    inputs, results = [1, 2], [3, 4]\n    for i, (x, y) in enumerate(zip(inputs, results)):\n        assert g(x) == y\ncheck(f)",
}


@pytest.mark.parametrize("tests", FORGED_TESTS.values(), ids=FORGED_TESTS)
def test_built_ins_of_the_judge_cannot_be_forged(pool: SandboxPool, tests: str) -> None:
    for changes in ("args", "changed"):
        verdict = verify(pool, {"asserts": tests}, forger(changes), 5)
        assert not verdict.passed, verdict
    honest = verify(pool, {"asserts": "assert sorted(f()) == [1, 2]"}, "def f(): return [2, 1]", 30)
    assert honest.passed  # the same names work for an honest solution


OBJECT = "class Any:\n    def {method}(self, *a): return {value}\ndef f(*a): return Any()\n"
DECIDERS: dict[str, tuple[str, str]] = {
    "StopIteration ends all(map())": (
        "assert all(map(lambda x: f(x) == x, [1, 2, 3]))",
        "def f(x): raise StopIteration",
    ),
    "StopIteration from an attribute": (
        "assert all(map(lambda x: Box(x).size == x, [1, 2]))",
        "class Box:\n    def __init__(self, n): pass\n    @property\n    def size(self): raise StopIteration",
    ),
    "StopIteration of a subclass": (
        "assert all(map(lambda x: f(x) == x, [1, 2, 3]))",
        "class Stop(StopIteration): pass\ndef f(x): raise Stop",
    ),
    "__contains__": ("assert 3 in f()", OBJECT.format(method="__contains__", value="True")),
    "__eq__ of two objects": (
        "assert f([3, 1]) == f([1, 3])",
        OBJECT.format(method="__eq__", value="True"),
    ),
    "__hash__": (
        "assert len({f(1), f(2)}) == 2",
        OBJECT.format(method="__hash__", value="1"),
    ),
    "__len__": ("assert len(f()) < 3", OBJECT.format(method="__len__", value="0")),
    "__iter__": (
        "assert all(x > 0 for x in f())",
        OBJECT.format(method="__iter__", value="iter([])"),
    ),
    "an object is true": ("assert f(7)", "def f(n): return object()"),
    "a function is true": ("assert f(7)", "def f(n): return print"),
    "not equal to anything": ("assert f() != 3", "def f(): return object()"),
    "an emptied argument": (
        "x = [3, 1, 2]\nassert f(x) == sorted(x)",
        "def f(x):\n    x.clear()\n    return x",
    ),
    "an argument emptied in a loop": (
        "def check(g):\n    x = [3, 1, 2]\n    y = g(x)\n    assert len(y) == len(x)\ncheck(f)",
        "def f(x):\n    x.clear()\n    return x",
    ),
    "swallowed by the test": (
        "try:\n    ok = 3 in f()\nexcept BaseException:\n    ok = True\nassert ok",
        OBJECT.format(method="__contains__", value="True"),
    ),
    "an end that the test catches": (
        "try:\n    f()\n    ok = False\nexcept BaseException:\n    ok = True\nassert ok",
        "import os\ndef f(): os._exit(0)",
    ),
}


@pytest.mark.parametrize("name", DECIDERS)
def test_a_solution_does_not_decide_the_comparison(pool: SandboxPool, name: str) -> None:
    tests, source = DECIDERS[name]
    assert not verify(pool, {"asserts": tests}, source, 5).passed
    whole = "def check(candidate):\n" + "\n".join(f"    {line}" for line in tests.split("\n"))
    if "f(" in tests:
        check = {"check": whole, "entry_point": "f"}
        assert not verify(pool, check, source, 5).passed


def test_an_answer_that_is_not_plain_data_is_wrong_and_says_so(pool: SandboxPool) -> None:
    source = OBJECT.format(method="__contains__", value="True")
    verdict = verify(pool, {"asserts": "assert 3 in f()\nassert 1 == 1"}, source, 30)
    assert verdict.result == [0, 1]
    assert "an object of its own class where the test needs plain data" in str(verdict.metadata[0])


@pytest.mark.parametrize(
    ("raised", "note"), [("StopIteration", "StopIteration"), ("Own('so')", "Own: so")]
)
def test_a_note_names_what_the_solution_raised(pool: SandboxPool, raised: str, note: str) -> None:
    source = f"class Own(Exception): pass\ndef f(): raise {raised}"
    verdict = verify(pool, {"asserts": "assert f()"}, source, 30)
    assert (verdict.result, verdict.metadata) == ([-1], [{"note": f"SolutionError: {note}"}])


def test_arguments_are_as_before_the_call_unless_only_the_effect_is_asked_for(
    pool: SandboxPool,
) -> None:
    source = "def put(x, n):\n    x.append(n)\n    return len(x)"
    asked = "x = []\nput(x, 3)\nput(x, n=4)\nassert x == [3, 4]"
    assert verify(pool, {"asserts": asked}, source, 30).result == [1]
    used = "x = []\nn = put(x, 3)\nassert x == [3]"
    verdict = verify(pool, {"asserts": used}, source, 30)
    assert verdict.result == [0]
    assert "tests see arguments as they were before the call" not in verdict.metadata[0]["note"]
    in_one = "x = []\nassert put(x, 3) == len(x)"
    verdict = verify(pool, {"asserts": in_one}, source, 30)
    assert verdict.result == [0]
    assert "tests see arguments as they were before the call" in verdict.metadata[0]["note"]


HONEST = {
    "iterators": (
        "assert list(f()) == [0, 1]\nassert sorted(g().keys()) == [1]\nassert 1 in f()\nassert next(f()) == 0",
        "def f(): yield from range(2)\ndef g(): return {1: 2}",
    ),
    "closures": ("assert f(2)(3) == 5", "def f(a): return lambda b: a + b"),
    "items of an object": (
        "s = Stack()\ns.push(4)\nassert s[0] == 4\nassert s.size() == 1",
        "class Stack:\n    def __init__(self): self.all = []\n    def push(self, x): self.all.append(x)\n    def size(self): return len(self.all)\n    def __getitem__(self, i): return self.all[i]",
    ),
    "nodes": (
        "root = build([1, 2])\nassert root.next.value == 2\nassert root.next.next is None",
        "class Node:\n    def __init__(self, v, n): self.value, self.next = v, n\ndef build(v): return Node(v[0], build(v[1:])) if v else None",
    ),
    "an expected exception": (
        "try:\n    f()\n    assert False\nexcept ZeroDivisionError:\n    pass\nassert True",
        "def f(): return 1 / 0",
    ),
    "named tuples and number classes": (
        "assert f() == (1, 2)\nassert g() == 3",
        "import collections, enum\nP = collections.namedtuple('P', 'x y')\nclass E(enum.IntEnum):\n    A = 3\ndef f(): return P(1, 2)\ndef g(): return E.A",
    ),
}


@pytest.mark.parametrize("name", HONEST)
def test_honest_solutions_pass(pool: SandboxPool, name: str) -> None:
    tests, source = HONEST[name]
    names = [name for name in ("f", "g") if f"{name}(" in tests]
    verdict = verify(pool, {"asserts": tests, "entry_point": names}, source, 30)
    assert verdict.passed, verdict


# The host

COLLIDING = """
import json, os
def f():
    items = [hex(n * ((1 << 61) - 1)) for n in range({count})]
    form = {{"set": [{{"int": one}} for one in items]}}
    os.write(3, json.dumps({{"value": form}}).encode() + b"\\n")
    os._exit(0)
"""


def test_the_host_decodes_nothing_that_a_solution_made(
    pool: SandboxPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def boom(*_: object, **__: object) -> None:
        raise AssertionError("decoded on the host")

    monkeypatch.setattr(wire, "decode", boom)
    add = {"inputs": [[1, 2]], "outputs": [{"3": [3.0]}], "fn_name": "add"}
    assert verify(pool, add, "def add(a, b): return {a + b: (3.0,)}", 30).passed
    call = {"inputs": [[]], "outputs": [[1]], "fn_name": "f"}
    assert verify(pool, call, COLLIDING.format(count=60_000), 30).result == [0]


@pytest.mark.slow
def test_values_that_hash_alike_are_compared_without_hashing() -> None:
    def form(count: int) -> Any:
        return [{"int": hex(n * ((1 << 61) - 1))} for n in range(count)]

    many = form(62_000)  # 118 s in a set
    for kind in ("set", "frozenset"):
        assert judging.same_value({kind: many}, {kind: many[::-1]})
        assert not judging.same_value({kind: many}, {kind: form(61_999)})
    pairs = {"dict": [[key, 1] for key in many]}
    assert judging.same_value(pairs, {"dict": pairs["dict"][::-1]})
    assert not judging.same_value(pairs, {"dict": [[key, 2] for key in many]})


def test_a_delay_of_the_host_is_not_the_solutions(
    pool: SandboxPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host stands still for 100 s between two tests: a right solution stays right."""
    real, calls = time.monotonic, [0]

    def slow() -> float:
        calls[0] += 1
        return real() + 100 * calls[0]

    monkeypatch.setattr(time, "monotonic", slow)
    tests = {"inputs": ["1", "2", "3"], "outputs": ["1", "2", "3"]}
    assert verify(pool, tests, "print(input())", 30).result == [1, 1, 1]


class LosingPool:
    """Lends sandboxes that do not answer."""

    settings = SandboxSettings()

    class _Lost:
        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None:
            return None

        def run(self, *_: object) -> None:
            raise SandboxLost

    def sandbox(self) -> Any:
        return self._Lost()


def test_a_sandbox_that_is_lost_is_a_fault_and_not_a_zero() -> None:
    with pytest.raises(SandboxError, match="lost"):
        verify(LosingPool(), {"inputs": ["", ""], "outputs": ["", ""]}, "", 1)  # type: ignore[arg-type]


def test_a_referee_that_ends_is_replaced(pool: SandboxPool) -> None:
    tests = {"inputs": ["1"], "outputs": ["1"]}
    assert verify(pool, tests, "print(input())", 30).passed
    with pool.referee() as referee:
        referee.end()
    assert verify(pool, tests, "print(input())", 30).passed


def test_broken_tests_and_too_many_tests_are_faults_of_the_data(pool: SandboxPool) -> None:
    with pytest.raises(RewardError, match="not valid Python"):
        verify(pool, {"asserts": "assert ("}, "", 30)
    with pytest.raises(verify_module.TooManyTests, match="got 3 tests, allowed: up to 2"):
        verify(pool, {"asserts": "assert True\n" * 3}, "", 30, max_tests=2)
    with pytest.raises(verify_module.TooManyTests, match="got 3 tests, allowed: up to 2"):
        verify(pool, {"inputs": [""] * 3, "outputs": [""] * 3}, "", 30, max_tests=2)
    forged = "import os\nos.write(3, b'{\"count\": 99999999999}\\n')\nassert True"
    assert verify(pool, {"asserts": forged}, "", 30).result == [1]  # the first count holds


@pytest.mark.parametrize("value", [{"int": "0x" + "f" * 10_000_000}, {"range": [0, 1, 0]}, {"x": 1}, {}, [[]] * 5, 1e5, {"float": "1" * 100}, {"dict": [[1]]}, {"dict": [[[1], 2]]}, {"set": 5}, {"object": [1, 2]}])  # fmt: skip
def test_a_forged_value_is_wrong(value: Any) -> None:
    request = {
        "form": "call",
        "expected": 3,
        "outcome": {"status": 0, "stopped": "", "limit_s": 1},
        "blobs": [b"", b"", json.dumps({"value": value}).encode()],
    }
    assert judging.answer(request)["code"] == 0


POLY = "def check(candidate):\n    assert abs(poly([1, 2], candidate([1, 2]))) < 1e-4"
HELPERS = "def poly(xs, x):\n    return sum(c * x ** i for i, c in enumerate(xs))\ndef find_zero(xs):\n    'Find x.'\n"
FORGED_HELPERS = "def find_zero(xs): return 0\ndef poly(*a): return 0\n"


def test_helpers_come_with_the_tests_and_never_from_the_solution(pool: SandboxPool) -> None:
    """As HumanEval/32 and /38 are written: the prompt defines a helper that the tests use."""
    tests = {"check": POLY, "entry_point": "find_zero", "prelude": HELPERS}
    assert verify(pool, tests, FORGED_HELPERS, 30).result == [0]
    assert verify(pool, tests, "def find_zero(xs): return -xs[0] / xs[1]", 30).result == [1]


FREE = {
    "a helper": ({"check": POLY, "entry_point": "find_zero"}, "poly"),
    "numpy": ({"asserts": "assert np.allclose(f(), 1.0)"}, "f, np"),
    "isclose": ({"asserts": "assert isclose(f(), 0.5)", "entry_point": "f"}, "isclose"),
    "two functions": ({"asserts": "assert f(g()) == 1"}, "f, g"),
}


@pytest.mark.parametrize("name", FREE)
def test_names_that_tests_leave_free_are_a_fault_of_the_data(pool: SandboxPool, name: str) -> None:
    tests, names = FREE[name]
    with pytest.raises(RewardError, match=f"they use {names} without a definition"):
        verify(pool, tests, FORGED_HELPERS, 30)
    with pytest.raises(RewardError, match=f"they use {names} without a definition"):
        verify_module.read_tests(
            tests
        )  # before any program runs, as `penstock check` looks at data


def test_tests_name_several_names_of_the_solution_and_what_they_import(pool: SandboxPool) -> None:
    named = {"asserts": "assert f(g(1)) == 3", "entry_point": ["f", "g"]}
    assert verify(pool, named, "def f(x): return x + 1\ndef g(x): return x + 1", 30).passed
    star = {"asserts": "from math import *\nassert isclose(math.sqrt(f(4)), 2)"}
    assert verify(pool, star, "def f(x): return x\ndef isclose(*a): return True", 30).passed
    caught = "def check(g):\n    try:\n        g(0)\n    except ZeroDivisionError as error:\n        assert error"
    divides = {"asserts": f"{caught}\ncheck(f)"}
    assert verify(pool, divides, "def f(x): return 1 / x", 30).passed


# State

SEEN = {
    "the mode of its folder": "s = os.stat('.').st_mode & 0o777\nprint('seen' if s != 0o700 else 'fresh')\nos.chmod('.', 0o711)",
    "the time of its folder": "s = os.stat('.').st_mtime\nprint('seen' if s < 1000 else 'fresh')\nos.utime('.', (1, 1))",
    "a folder that cannot be deleted": "print('seen' if os.path.exists('d') else 'fresh')\nos.makedirs('d/e', exist_ok=True)\nos.chmod('d', 0)",
    "a file": "print('seen' if os.listdir('.') else 'fresh')\nopen('f', 'w').close()",
}


@pytest.mark.parametrize("mode", ["bubblewrap", "namespaces", "root namespaces"])
def test_nothing_in_the_scratch_passes_from_one_test_to_the_next(mode: str) -> None:
    pool = make_pool(mode)
    tests = {"inputs": [""] * 3, "outputs": ["fresh"] * 3}
    try:
        for name, source in SEEN.items():
            assert verify(pool, tests, f"import os\n{source}", 30).result == [1, 1, 1], name
    finally:
        pool.close()
