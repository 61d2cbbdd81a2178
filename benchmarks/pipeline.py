"""Idle time of both sides and speed over the sync run, for several bounds of staleness.

    python benchmarks/pipeline.py [--steps 100] [--sigma 0 0.5 1]

The real producer, strategies, buffer and journal on a virtual clock; only the engine and the trainer
take set times: a response takes its length (log-normal, so that a few are long) times the time per
token, a step takes as long as the engine needs on average to make its batch. Both sides have the same
hardware throughout: the engine decodes `slots` responses at once, the trainer trains one batch at a time.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from penstock.data.sampler import Sampler
from penstock.journal import Journal
from penstock.produce import (
    AsyncProduceStrategyConfig,
    ProduceProgress,
    Producer,
    ProduceTask,
    SyncProduceStrategyConfig,
)
from penstock.produce.virtual_time import VirtualClock
from penstock.replay import ReplayBuffer
from penstock.types import Prompt, Rollout, Score, Status, StepReport, VersionSegment

GROUPS, GENERATIONS, SLOTS = 32, 8, 64
TOKEN_S, MEAN_TOKENS, MOST_TOKENS = 0.02, 200, 2000


@dataclass
class Figures:
    steps: int
    seconds: float
    trainer_busy: float
    engine_busy: float  # slot seconds
    staleness: float
    wall_s: float

    @property
    def trainer_idle(self) -> float:
        return 1 - self.trainer_busy / self.seconds

    @property
    def engine_idle(self) -> float:
        return 1 - self.engine_busy / (self.seconds * SLOTS)


class TimedAgent:
    """Takes a slot for each response, holds it for as long as its tokens take, and scores it."""

    def __init__(self, sigma: float) -> None:
        self._sigma = sigma
        self._slots = asyncio.Semaphore(SLOTS)
        self.version = 0
        self.busy = 0.0

    def length(self, rollout: Rollout) -> int:
        mean = np.log(MEAN_TOKENS) - self._sigma**2 / 2
        drawn = np.random.default_rng(rollout.seed).lognormal(mean, self._sigma)
        return int(np.clip(drawn, 1, MOST_TOKENS))

    async def generate_group(
        self, rollouts: list[Rollout], *, enable_partial_rollout: bool = False
    ) -> list[Rollout]:
        await asyncio.gather(*(self._generate(rollout) for rollout in rollouts))
        return rollouts

    async def _generate(self, rollout: Rollout) -> None:
        if rollout.status is Status.ABORTED:
            rollout.restart()
        async with self._slots:
            version, tokens = self.version, self.length(rollout)
            await asyncio.sleep(tokens * TOKEN_S)
            self.busy += tokens * TOKEN_S
        ids = np.ones(8, np.int32)  # the bytes of a long response would only fill the journal
        rollout.append(ids, np.zeros(8, np.float32), [VersionSegment(version, 8)])
        rollout.finish_reason, rollout.score = "stop", Score(1.0)
        rollout.move_to(Status.COMPLETED)

    async def pause(self) -> None: ...


def prompts(count: int) -> list[Prompt]:
    ids = np.array([1, 2, 3])
    return [Prompt(prompt_id=f"p:{n}", messages=(), token_ids=ids) for n in range(count)]


async def run(
    steps: int, staleness: int | None, sigma: float, train_s: float, path: Path
) -> Figures:
    """`staleness` None: the sync strategy."""
    clock = asyncio.get_running_loop().time
    started = time.perf_counter()
    journal = Journal.open(path, threaded=False)
    agent, buffer = TimedAgent(sigma), ReplayBuffer()
    config = (
        SyncProduceStrategyConfig()
        if staleness is None
        else AsyncProduceStrategyConfig(max_staleness=staleness)
    )
    sampler = Sampler(
        prompts(4096), task_name="t", prompt_repeat_k=GENERATIONS, seed=0, replay_buffer=buffer
    )
    task = ProduceTask(
        name="t",
        weight=1.0,
        strategy=config.build(sync_weights_interval=1),
        agent_loop=agent,
        sampler=sampler,
    )
    producer = Producer(
        tasks=[task],
        replay_buffer=buffer,
        journal=journal,
        progress=ProduceProgress.build(["t"]),
        groups_per_step=GROUPS,
        sync_weights_interval=1,
        last_step=steps,
    )
    producing = asyncio.create_task(producer.run())
    busy, stale = 0.0, []
    for step in range(1, steps + 1):
        batch = await producer.take_batch(step)
        stale += [group.staleness(step) for group in batch.groups]
        await asyncio.sleep(train_s)
        busy += train_s
        await journal.commit_step(StepReport(step=step, policy_version=step, digest=str(step)))
        agent.version = step
        producer.weights_updated(step)
    producing.cancel()
    await asyncio.wait([producing])
    seconds = clock()
    journal.close()
    return Figures(
        steps, seconds, busy, agent.busy, float(np.mean(stale)), time.perf_counter() - started
    )


def measure(steps: int, staleness: int | None, sigma: float, train_s: float) -> Figures:
    with tempfile.TemporaryDirectory() as folder:
        clock = VirtualClock()
        try:
            return clock.run(run(steps, staleness, sigma, train_s, Path(folder) / "journal.db"))
        finally:
            clock.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--sigma", type=float, nargs="+", default=[0.0, 0.5, 1.0])
    arguments = parser.parse_args()
    for sigma in arguments.sigma:
        agent = TimedAgent(sigma)
        seeds = [Rollout(rollout_id="x", prompt_ids=np.array([1]), seed=n) for n in range(4000)]
        mean = float(np.mean([agent.length(rollout) for rollout in seeds]))
        train_s = GROUPS * GENERATIONS * mean * TOKEN_S / SLOTS  # the rates match
        print(f"lengths: log-normal, sigma {sigma:g}, mean {mean:.0f} tokens; step {train_s:.2f} s")
        print(
            "  max_staleness   s/step  speed   trainer idle  engine idle  staleness  driver ms/group"
        )
        sync = measure(arguments.steps, None, sigma, train_s)
        for name, one in [("sync", sync)] + [
            (str(n), measure(arguments.steps, n, sigma, train_s)) for n in (0, 1, 2, 4)
        ]:
            per_step = one.seconds / one.steps
            cost = one.wall_s / (one.steps * GROUPS) * 1e3
            print(
                f"  {name:>13}  {per_step:7.2f}  {sync.seconds / one.seconds:4.2f}x  "
                f"{one.trainer_idle:12.1%}  {one.engine_idle:11.1%}  {one.staleness:9.2f}  {cost:15.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
