"""Measure the driver's CPU time per group with many producers: light Ray actors, real control plane.

    python benchmarks/many_producers.py [--producers 64] [--groups 2000] [--profile]

Every producer is an actor that answers each request at once with a response of the wanted length, so only
the driver is measured: sampler, strategy, pool, supervision, waits, Ray calls, journal, buffer, batches.
Prints the CPU time of its event loop's thread, which bounds the groups per second, and of all its threads
(journal and Ray client included). The actors' CPU time is not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import os
import pstats
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
import numpy as np
import ray
from instant_engine import FACTORY, cpu_s

from penstock.config import LaunchConfig, SamplingConfig
from penstock.data.sampler import Sampler
from penstock.reward.protocol import Reward
from penstock.rollout import AsyncProduceStrategyConfig, ProduceProgress, Producer, ProduceTask
from penstock.rollout.agent.single_turn import SingleTurn
from penstock.rollout.progress import ReplayBuffer
from penstock.store.journal import Journal
from penstock.types import Prompt, Rollout, Score, StepReport
from penstock.waits import Waits
from penstock.workers.pool.pool import EnginePool
from penstock.workers.ray.actor import ActorWorker
from penstock.workers.supervise.supervised import Supervised, SupervisionCallbacks, Worker

GROUPS_PER_STEP, GENERATIONS = 128, 8


class Even(Reward):
    """A reward that costs nothing."""

    async def score(self, rollout: Rollout, prompt: Prompt) -> Score:
        return Score(1.0)

    async def close(self) -> None: ...


async def engines(count: int, tokens: int, folder: Path) -> EnginePool:
    events, settings = SupervisionCallbacks(waits=Waits()), LaunchConfig(kind="ray")

    def make(number: int) -> Supervised:
        name = f"engine-{number}"

        async def spawn() -> Worker:
            remote = await ActorWorker.create(name, folder / name, 1, 300.0, num_cpus=0)
            await remote.build(FACTORY, tokens, timeout_s=300.0)
            return remote

        return Supervised(name, spawn, settings, events)

    made = [make(number) for number in range(count)]
    for start in range(0, count, 8):  # many processes start at once
        await asyncio.gather(*(one.start() for one in made[start : start + 8]))
    return EnginePool(made, events)


def producer(engine: Any, journal: Journal, steps: int) -> Producer:
    buffer = ReplayBuffer()
    ids = np.arange(64, dtype=np.int32)
    prompts = [Prompt(prompt_id=f"p:{n}", messages=(), token_ids=ids + n) for n in range(4096)]
    sampler = Sampler(
        prompts, task_name="t", prompt_repeat_k=GENERATIONS, seed=0, replay_buffer=buffer
    )
    agent = SingleTurn(
        engine=engine, reward=Even(), sampling=SamplingConfig(), decode=lambda ids: ""
    )
    task = ProduceTask(
        name="t",
        weight=1.0,
        strategy=AsyncProduceStrategyConfig(max_staleness=steps).build(),
        agent_loop=agent,
        sampler=sampler,
    )
    return Producer(
        tasks=[task],
        replay_buffer=buffer,
        journal=journal,
        progress=ProduceProgress.build(["t"]),
        groups_per_step=GROUPS_PER_STEP,
        last_step=steps,
    )


async def measure(options: argparse.Namespace, folder: Path) -> None:
    steps = max(2, options.groups // GROUPS_PER_STEP)
    crew = await engines(options.producers, options.tokens, folder)
    journal = Journal.open(folder / "journal.db")
    made = producer(crew, journal, steps)
    profile = cProfile.Profile()
    began, loop_before = time.perf_counter(), cpu_s(resource.RUSAGE_THREAD)
    all_before = cpu_s(resource.RUSAGE_SELF)
    if options.profile:
        profile.enable()
    producing = asyncio.create_task(made.run())
    for step in range(1, steps + 1):
        await made.take_batch(step)
        await journal.commit_step(StepReport(step=step, policy_version=step, digest="d"))
    profile.disable()
    wall, loop_s = time.perf_counter() - began, cpu_s(resource.RUSAGE_THREAD) - loop_before
    all_s = cpu_s(resource.RUSAGE_SELF) - all_before
    producing.cancel()
    await asyncio.wait([producing])
    groups = steps * GROUPS_PER_STEP
    print(
        f"{options.producers} producers, {groups} groups of {GENERATIONS} x {options.tokens} tokens: "
        f"{loop_s / groups * 1e3:.2f} ms of the driver's loop a group ({all_s / groups * 1e3:.2f} ms of "
        f"all its threads), so up to {groups / loop_s:.0f} groups/s; "
        f"here {groups / wall:.0f} by the wall clock"
    )
    journal.close()
    await crew.close()
    if options.profile:
        pstats.Stats(profile, stream=sys.stdout).sort_stats("tottime").print_stats(25)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--producers", type=int, default=64)
    parser.add_argument("--groups", type=int, default=2000)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    quiet: dict[str, Any] = {
        "log_to_driver": False,
        "logging_level": "error",
        "include_dashboard": False,
    }
    ray.init(address="local", num_cpus=4, object_store_memory=2**29, **quiet)
    try:
        with tempfile.TemporaryDirectory() as folder:
            asyncio.run(measure(options, Path(folder)))
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
