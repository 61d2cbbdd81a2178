"""Measures symbolic checks and code verdicts per second, and the cost of one test in the sandbox.

    python benchmarks/rewards.py [--pairs 400] [--submissions 60]

Compares 1 and 2 workers with math-verify called directly (whose time-out works only in the main
thread). Prints a table; the numbers depend on the load of the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

from penstock.reward.equality import decide
from penstock.reward.math_answer import MathPool, compare
from penstock.reward.sandbox.pool import SandboxPool
from penstock.reward.sandbox.settings import SandboxSettings
from penstock.reward.sandbox.verify import verify


def make_pairs(count: int) -> list[tuple[str, str]]:
    """Return different pairs that only algebra decides, a mix of what math problems ask."""
    draw, forms = random.Random(0), []
    for _ in range(count):
        a, b = draw.sample(range(2, 99), 2)
        forms.append(
            draw.choice(
                [
                    (f"x^2+{a + b}x+{a * b}", f"(x+{a})(x+{b})"),
                    (rf"\frac{{{a}}}{{{b}}}\pi", rf"\frac{{{2 * a}\pi}}{{{2 * b}}}"),
                    (rf"\sqrt{{{a * a * b}}}", rf"{a}\sqrt{{{b}}}"),
                    (rf"\{{{a},{b}\}}", rf"\{{{b},{a}\}}"),
                    (str(a * b), rf"{a} \times {b}"),
                ]
            )
        )
    return forms


def in_line(pairs: list[tuple[str, str]]) -> float:
    compare("x+1", "1+x")
    started = time.perf_counter()
    for gold, answer in pairs:
        compare(gold, answer)
    return len(pairs) / (time.perf_counter() - started)


async def pooled(pairs: list[tuple[str, str]], workers: int) -> float:
    pool = MathPool(workers, timeout_s=20)
    try:
        warm = [pool.compare("x+1", f"{n}+x") for n in range(1, 4 * workers + 1)]
        await asyncio.gather(*warm)
        started = time.perf_counter()
        await asyncio.gather(*(pool.compare(gold, answer) for gold, answer in pairs))
        return len(pairs) / (time.perf_counter() - started)
    finally:
        await pool.close()


def plain_equality(count: int = 20_000) -> float:
    started = time.perf_counter()
    for number in range(count):
        decide("42", str(number % 97))
    return (time.perf_counter() - started) / count * 1e6


def sandbox(submissions: int, workers: int) -> tuple[str, float, float]:
    """Return the isolation, the median ms of an empty test, and submissions per second."""
    pool = SandboxPool(SandboxSettings(workers=workers, minimum="filtered"))
    tests = {"inputs": [""], "outputs": ["1"]}
    try:
        times = []
        for _ in range(submissions):
            started = time.perf_counter()
            assert verify(pool, tests, "print(1)", 20).passed
            times.append((time.perf_counter() - started) * 1000)
        started = time.perf_counter()
        with ThreadPoolExecutor(workers) as threads:
            list(threads.map(lambda _: verify(pool, tests, "print(1)", 20), range(submissions)))
        rate = submissions / (time.perf_counter() - started)
        return ", ".join(pool.isolation.layers), statistics.median(times), rate
    finally:
        pool.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=400)
    parser.add_argument("--submissions", type=int, default=60)
    arguments = parser.parse_args()
    pairs = make_pairs(arguments.pairs)
    assert all(decide(*pair) is None for pair in pairs)
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    print(f"plain equality, in line     {plain_equality():8.2f} us a check")
    print(f"math-verify, in line        {in_line(pairs):8.0f} checks/s")
    for workers in (1, 2):
        print(
            f"math-verify, {workers} worker(s)   {asyncio.run(pooled(pairs, workers)):8.0f} checks/s"
        )
    for workers in (1, 2):
        layers, median, rate = sandbox(arguments.submissions, workers)
        print(
            f"sandbox, {workers} worker(s)       {median:8.1f} ms a test (median), {rate:.0f} submissions/s"
        )
    print(f"isolation: {layers}")


if __name__ == "__main__":
    main()
