"""Measure how many groups a second one driver carries, by the number of its engines.

    python benchmarks/driver_rate.py [--engines 8 64 512] [--seconds 8] [--generations 8] [--profile]

The driver is real: sampler, strategy, group runner, single-turn loop, pool, supervision, waits and timeline,
a user's reward function, journal, replay buffer, batches. An engine is an object of this process that answers
at once with tokens made beforehand: what an engine, a socket or Ray costs is not in the figures (`driver.py`
and `many_producers.py` have them). Prints the CPU time per group of the event loop's thread, which bounds
the groups per second, and of all threads: the journal's and the reward's share the interpreter lock with it.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import gc
import pstats
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from driver import make_producer
from instant_engine import cpu_s

from penstock.config import LaunchConfig
from penstock.engine.protocol import EngineStats, Generation, GenerationRequest
from penstock.inspection.track.logs import TimelineLog
from penstock.store.journal import Journal
from penstock.types import StepReport, VersionSegment
from penstock.waits import Waits
from penstock.workers.pool.pool import EnginePool
from penstock.workers.supervise.supervised import Supervised, SupervisionCallbacks, Worker

GROUPS_PER_STEP, SLOTS = 512, 64


class InstantWorker:
    """A worker of this process whose engine answers in the next turn of the event loop."""

    can_be_killed, place = False, "this process"

    def __init__(self, name: str, tokens: int) -> None:
        self.name, self._tokens, self.version = name, tokens, 0
        ids = np.random.default_rng(0).integers(3, 60, tokens, dtype=np.int32)
        self._arrays = (ids, np.zeros(tokens, np.float32))
        self._closed = asyncio.Event()

    async def call(self, method: str, *args: Any) -> Any:
        await asyncio.sleep(0)
        if method == "generate_many":
            return self._generate(args[0])
        if method == "stats":
            stats: dict[str, Any] = dict.fromkeys(("running", "waiting", "tokens_generated"), 0)
            return EngineStats(policy_version=0, digest="", busy_s=0.0, slots=SLOTS, **stats)
        return None

    def _generate(self, requests: list[GenerationRequest]) -> list[Generation]:
        ids, logprobs = self._arrays
        segments = (VersionSegment(self.version, self._tokens),)
        return [
            Generation(
                request_id=request.request_id,
                token_ids=ids,
                logprobs=logprobs,
                segments=segments,
                finish_reason="stop",
            )
            for request in requests
        ]

    async def ended(self) -> str:
        await self._closed.wait()
        return "closed"

    async def stack(self) -> str:
        return ""

    async def activity(self) -> float | None:
        return None

    async def kill(self) -> None: ...

    async def close(self) -> None:
        self._closed.set()


async def engine_pool(
    count: int, tokens: int, waits: Waits
) -> tuple[EnginePool, list[InstantWorker]]:
    workers = [InstantWorker(f"engine-{number}", tokens) for number in range(count)]
    events, made = SupervisionCallbacks(waits=waits), []
    for worker in workers:

        async def spawn(worker: Worker = worker) -> Worker:
            return worker

        one = Supervised(worker.name, spawn, LaunchConfig(), events)
        await one.start()
        made.append(one)
    pool = EnginePool(made, events)
    await pool.start()
    return pool, workers


async def measure(options: argparse.Namespace, engines: int, folder: Path) -> str:
    waits = Waits()
    timeline = TimelineLog(folder / "timeline", waits)
    pool, workers = await engine_pool(engines, options.tokens, waits)
    journal = Journal.open(folder / "journal.db", waits=waits)
    made = make_producer(
        pool,
        journal,
        options,
        groups_per_step=GROUPS_PER_STEP,
        max_staleness=1,
        prompt_tokens=64,
        waits=waits,
    )
    profile = cProfile.Profile()
    producing = asyncio.create_task(made.run())
    step = groups = 0
    before, loop_before, all_before = float("inf"), 0.0, 0.0
    while time.perf_counter() - before < options.seconds:
        step += 1
        batch = await made.take_batch(step)
        await journal.commit_step(StepReport(step=step, policy_version=step, digest="d"))
        for worker in workers:
            worker.version = step
        made.weights_updated(step)
        groups += len(batch.groups)
        if step == 2:  # warm
            groups, before = 0, time.perf_counter()
            loop_before, all_before = cpu_s(resource.RUSAGE_THREAD), cpu_s(resource.RUSAGE_SELF)
            if options.profile:
                profile.enable()
    profile.disable()
    loop_s = (cpu_s(resource.RUSAGE_THREAD) - loop_before) / groups
    all_s = (cpu_s(resource.RUSAGE_SELF) - all_before) / groups
    wall_s = (time.perf_counter() - before) / groups
    producing.cancel()
    await asyncio.wait([producing])
    journal.close()
    timeline.close()
    await pool.close()
    if options.profile:
        pstats.Stats(profile, stream=sys.stdout).sort_stats("tottime").print_stats(45)
    times = f"{loop_s * 1e3:.3f} | {all_s * 1e3:.3f}"
    return f"| {engines} | {times} | {1 / loop_s:,.0f} | {1 / wall_s:,.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    gc.freeze()  # as a session does
    gc.set_threshold(50_000, 20, 100)
    print(
        f"groups of {options.generations} x {options.tokens} tokens\n"
        "| engines | loop, ms a group | all threads, ms | groups/s of the loop | by the wall clock |\n"
        "|---|---|---|---|---|"
    )
    for engines in options.engines:
        with tempfile.TemporaryDirectory() as folder:
            print(asyncio.run(measure(options, engines, Path(folder))), flush=True)


if __name__ == "__main__":
    main()
