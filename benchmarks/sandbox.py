"""Measures what one code verdict costs: wall time, and CPU time of all processes that take part.

    python benchmarks/sandbox.py [--submissions 40]

One worker; each row is one form of test cases with right solutions. CPU time counts this process, the
factory and every sandbox, so it is comparable while other work runs; wall time is not.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import time
from typing import Any

from penstock.reward.sandbox.pool import SandboxPool
from penstock.reward.sandbox.settings import SandboxSettings
from penstock.reward.sandbox.verify import verify

ADD = "def add(a, b):\n    return a + b\n"
FORMS: dict[str, tuple[dict[str, Any], str]] = {
    "stdio, 1 test": ({"inputs": ["1 2"], "outputs": ["3"]}, "print(3)"),
    "stdio, 10 tests": ({"inputs": ["1 2"] * 10, "outputs": ["3"] * 10}, "print(3)"),
    "call, 10 tests": ({"inputs": [[1, 2]] * 10, "outputs": [3] * 10, "fn_name": "add"}, ADD),
    "3 asserts": ({"asserts": "assert add(1, 2) == 3\n" * 3}, ADD),
    "check, 100 calls": (
        {
            "check": "def check(f):\n    for n in range(100):\n        assert f(n, 1) == n + 1",
            "entry_point": "add",
        },
        ADD,
    ),
}


def cpu_s() -> float:
    """Return the CPU time of this process and of all its ended descendants."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def measure(tests: dict[str, Any], source: str, submissions: int) -> tuple[float, float]:
    """Return the median wall time and the mean CPU time of one submission, in milliseconds."""
    # without bubblewrap, whose own parent does not pass on the CPU time of what it starts
    pool = SandboxPool(SandboxSettings(workers=1, minimum="filtered", bubblewrap="never"))
    assert pool.isolation.level
    before, walls = cpu_s(), []
    try:
        for _ in range(submissions):
            started = time.perf_counter()
            assert verify(pool, tests, source, 20).passed
            walls.append((time.perf_counter() - started) * 1000)
    finally:
        pool.close()
    return statistics.median(walls), (cpu_s() - before) * 1000 / submissions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--submissions", type=int, default=40)
    arguments = parser.parse_args()
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    for name, (tests, source) in FORMS.items():
        wall, cpu = measure(tests, source, arguments.submissions)
        print(f"{name:18}{wall:8.1f} ms wall (median) {cpu:8.1f} ms CPU")


if __name__ == "__main__":
    main()
