"""Measure what the driver spends on each response when many responses end together.

    python benchmarks/driver.py [--groups 64] [--generations 16] [--tokens 80] [--steps 6] [--profile]

One engine in a worker process answers a request at once with random tokens, so only the driver is measured:
sampler, strategy, pool, socket, text, a user's reward function, journal, buffer, batches. Prints the
CPU time per response of the driver's event loop, which bounds the responses per second, and of all its
threads. The engine's CPU time is not counted.
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

import numpy as np
from instant_engine import FACTORY, cpu_s

from penstock.config import LaunchConfig, RewardConfig, SamplingConfig
from penstock.data.chat import ChatTemplate, load_tokenizer
from penstock.data.sampler import Sampler
from penstock.reward import build_reward
from penstock.rollout import AsyncProduceStrategyConfig, ProduceProgress, Producer, ProduceTask
from penstock.rollout.agent.single_turn import SingleTurn
from penstock.rollout.progress import ReplayBuffer
from penstock.store.journal import Journal
from penstock.types import Prompt, StepReport
from penstock.waits import Waits
from penstock.workers.pool.pool import EnginePool
from penstock.workers.processes.process_worker import ProcessWorker
from penstock.workers.supervise.supervised import Supervised, SupervisionCallbacks, Worker

REWARD = f"{Path(__file__).resolve()}:has_number"


def has_number(response: str, gt_answer: str) -> float:
    """A user's reward function, as cheap as one is."""
    return float(gt_answer in response)


async def engine_pool(options: argparse.Namespace, folder: Path) -> EnginePool:
    events, settings = SupervisionCallbacks(waits=Waits()), LaunchConfig()
    slots = options.groups * options.generations

    async def spawn() -> Worker:
        return await ProcessWorker.start(
            *("engine-0", FACTORY, options.tokens, slots),
            log_path=folder / "engine-0.log",
            threads=1,
            timeout_s=120.0,
        )

    supervised = Supervised("engine-0", spawn, settings, events)
    await supervised.start()
    pool = EnginePool([supervised], events)
    await pool.start()
    return pool


def make_producer(
    engine: EnginePool,
    journal: Journal,
    options: argparse.Namespace,
    *,
    groups_per_step: int,
    max_staleness: int,
    prompt_tokens: int = 40,
    last_step: int | None = None,
    waits: Waits | None = None,
) -> Producer:
    """Return a producer of one task: prompts of one length, the demo's tokenizer, a user's reward function."""
    waits = waits or Waits()
    policy = (
        Path(__file__).resolve().parent.parent / "src" / "penstock" / "config" / "demo" / "policy"
    )
    buffer, ids = ReplayBuffer(), np.arange(3, 3 + prompt_tokens, dtype=np.int32)
    prompts = [
        Prompt(prompt_id=f"p:{n}", messages=(), token_ids=ids, gt_answer=str(n))
        for n in range(4096)
    ]
    reward = build_reward([RewardConfig(type=REWARD)], max_tokens=options.tokens, waits=waits)
    task = ProduceTask(
        name="t",
        weight=1.0,
        strategy=AsyncProduceStrategyConfig(max_staleness=max_staleness).build(),
        agent_loop=SingleTurn(
            engine=engine,
            reward=reward,
            sampling=SamplingConfig(num_generations=options.generations),
            decode=ChatTemplate(load_tokenizer(policy)).decode,
        ),
        sampler=Sampler(
            prompts,
            task_name="t",
            prompt_repeat_k=options.generations,
            seed=0,
            replay_buffer=buffer,
        ),
    )
    return Producer(
        tasks=[task],
        replay_buffer=buffer,
        journal=journal,
        progress=ProduceProgress.build(["t"]),
        groups_per_step=groups_per_step,
        last_step=last_step,
        waits=waits,
    )


async def measure(options: argparse.Namespace, folder: Path) -> None:
    gc.freeze()  # as a session does
    gc.set_threshold(50_000, 20, 100)
    engine = await engine_pool(options, folder)
    journal = Journal.open(folder / "journal.db")
    made = make_producer(
        engine,
        journal,
        options,
        groups_per_step=options.groups,
        max_staleness=options.steps,
        last_step=options.steps,
    )
    profile = cProfile.Profile()
    began, loop_before = time.perf_counter(), cpu_s(resource.RUSAGE_THREAD)
    all_before = cpu_s(resource.RUSAGE_SELF)
    if options.profile:
        profile.enable()
    producing = asyncio.create_task(made.run())
    waits = []
    for step in range(1, options.steps + 1):
        asked = time.perf_counter()
        await made.take_batch(step)
        waits.append(time.perf_counter() - asked)
        await journal.commit_step(StepReport(step=step, policy_version=step, digest="d"))
    profile.disable()
    wall, loop_s = time.perf_counter() - began, cpu_s(resource.RUSAGE_THREAD) - loop_before
    all_s = cpu_s(resource.RUSAGE_SELF) - all_before
    producing.cancel()
    await asyncio.wait([producing])
    responses = options.steps * options.groups * options.generations
    print(
        f"{options.groups} groups of {options.generations} x {options.tokens} tokens a step: "
        f"{loop_s / responses * 1e3:.3f} ms of the driver's loop a response "
        f"({all_s / responses * 1e3:.3f} ms of all its threads); {responses / wall:,.0f} responses/s by "
        f"the wall clock; waits for a batch {', '.join(f'{wait:.2f}' for wait in waits)} s"
    )
    journal.close()
    await engine.close()
    if options.profile:
        pstats.Stats(profile, stream=sys.stdout).sort_stats("tottime").print_stats(35)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", type=int, default=64)
    parser.add_argument("--generations", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=80)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(options, Path(folder)))


if __name__ == "__main__":
    main()
