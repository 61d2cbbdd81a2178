"""Measure what one slow engine costs a pool, on a virtual clock, for docs/workers.md.

Two or more engines of 64 slots, one of them slower; groups of 8 responses with log-normal lengths. "sync" is
the mean of 8 batches, "async" a closed loop of callers over the first three quarters of the groups. Prints
seconds per batch as one Markdown table.

    python benchmarks/slow_engine.py [--engines 2] [--groups 48]
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from penstock.engine.protocol import GenerationRequest
from penstock.run.twin.virtual_time import VirtualClock
from stages.paced_engine import PacedEngine, request_of
from stages.supervised import EngineCrew

TOKEN_S, SLOTS, GROUP, BATCHES = 0.01, 64, 8, 8
SLOWER, SIGMAS = (1, 2, 4, 10, 100), (0.0, 0.5, 1.0)


def batches(count: int, groups: int, sigma: float) -> list[list[list[GenerationRequest]]]:
    """Return batches of groups of requests."""
    rng = np.random.default_rng(1)

    def request(number: int, group: int, index: int) -> GenerationRequest:
        length = int(np.clip(rng.lognormal(np.log(100), sigma), 1, 2000))
        made = request_of(f"{number}.{group}.{index}", 0, length=length, longest=2000)
        return replace(made, prompt_ids=np.array([number * groups + group], np.int32))

    return [
        [[request(number, group, index) for index in range(GROUP)] for group in range(groups)]
        for number in range(count)
    ]


async def sync_seconds(crew: EngineCrew, work: list[list[list[GenerationRequest]]]) -> float:
    """Generate one batch after another."""
    clock = asyncio.get_running_loop()
    pool, began = await crew.start(), clock.time()
    for groups in work:
        await asyncio.gather(*(pool.generate_many(group) for group in groups))
    return (clock.time() - began) / len(work)


async def async_seconds(crew: EngineCrew, work: list[list[list[GenerationRequest]]]) -> float:
    """Generate with as many callers as two batches have groups."""
    clock, groups = asyncio.get_running_loop(), iter([group for some in work for group in some])
    pool, began = await crew.start(), clock.time()
    ends: list[float] = []

    async def caller() -> None:
        for group in groups:
            await pool.generate_many(group)
            ends.append(clock.time() - began)

    await asyncio.gather(*(caller() for _ in range(2 * len(work[0]))))
    measured = 3 * len(ends) // 4
    return sorted(ends)[measured - 1] * len(work[0]) / measured


def seconds(paces: list[float], groups: int, sigma: float, *, sync: bool) -> float:
    clock = VirtualClock()
    engines = [PacedEngine(pace, slots=SLOTS, prefill_s=pace / 50) for pace in paces]
    crew = EngineCrew(engines, slots=SLOTS)
    measure = sync_seconds if sync else async_seconds
    found = clock.run(measure(crew, batches(BATCHES, groups, sigma)))
    clock.run(crew.pool.close())
    clock.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--groups", type=int, default=48)
    options = parser.parse_args()
    print(
        "| times slower |", " | ".join(f"{m}, sigma {s}" for m in ("sync", "async") for s in SIGMAS)
    )
    print("|---" * (1 + 2 * len(SIGMAS)) + "|")
    for slower in SLOWER:
        paces = [TOKEN_S] * (options.engines - 1) + [slower * TOKEN_S]
        found = [
            seconds(paces, options.groups, sigma, sync=sync)
            for sync in (True, False)
            for sigma in SIGMAS
        ]
        print(f"| {slower} |", " | ".join(f"{one:.1f}" for one in found), "|", flush=True)


if __name__ == "__main__":
    main()
