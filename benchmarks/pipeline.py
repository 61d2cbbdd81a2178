"""Measure the idle time of trainer and engine, and the speed-up over sync, per staleness bound.

    python benchmarks/pipeline.py [--steps 100] [--sigma 0 0.5 1] [--slots 64] [--staleness 0 1 2 4]
    python benchmarks/pipeline.py --real [--steps 30]      # the demo model, engine and trainer in processes
    python benchmarks/pipeline.py --real --matched [--minutes 5.5] [--sigma 0.5 1] [--staleness 1 2 4]

Runs the real producer, strategies, buffer and journal on a virtual clock; only engine and trainer are
modelled. A response takes its length (log-normal, so that a few are long) times the time per token; a step
takes as long as the engine needs on average to make its batch. The engine decodes `slots` responses at
once, the trainer trains one batch at a time. "Steady" leaves out the first tenth of the steps and the
last ones, for which nothing is left to generate.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from penstock.rollout import (
    AsyncProduceStrategyConfig,
    ProduceProgress,
    Producer,
    ProduceTask,
    ReplayBuffer,
    Sampler,
    SyncProduceStrategyConfig,
)
from penstock.run.twin.virtual_time import VirtualClock
from penstock.store.journal import Journal
from penstock.types import Prompt, Rollout, Score, Status, StepReport, VersionSegment

GROUPS, GENERATIONS = 32, 8
TOKEN_S, MEAN_TOKENS, MOST_TOKENS = 0.02, 200, 2000


@dataclass
class Mark:
    """The time at which a step's batch was taken, and the slot seconds used until then."""

    at: float
    used: float


@dataclass
class Figures:
    marks: list[Mark]
    seconds: float
    train_s: float
    slots: int
    engine_busy: float  # slot seconds
    staleness: float
    wall_s: float

    @property
    def steps(self) -> int:
        return len(self.marks)

    def idle(self) -> tuple[float, float]:
        """Return the idle shares of trainer and engine over the whole run."""
        engine = self.engine_busy / (self.seconds * self.slots)
        return 1 - self.steps * self.train_s / self.seconds, 1 - engine

    def steady_idle(self, run_ahead: int) -> tuple[float, float]:
        first, last = self.steps // 10, self.steps - 2 - run_ahead
        begin, end = self.marks[first], self.marks[last]
        seconds = end.at - begin.at
        engine = (end.used - begin.used) / (seconds * self.slots)
        return 1 - (last - first) * self.train_s / seconds, 1 - engine


class TimedAgent:
    """Holds a slot for each response for as long as its tokens take, then scores the response."""

    def __init__(self, sigma: float, slots: int) -> None:
        self._sigma = sigma
        self._slots = asyncio.Semaphore(slots)
        self.version = 0
        self._running, self._used, self._since = 0, 0.0, 0.0

    def length(self, rollout: Rollout) -> int:
        mean = np.log(MEAN_TOKENS) - self._sigma**2 / 2
        drawn = np.random.default_rng(rollout.seed).lognormal(mean, self._sigma)
        return int(np.clip(drawn, 1, MOST_TOKENS))

    def used(self, change: int = 0) -> float:
        """Return the slot seconds used until now; from now on `change` more slots are in use."""
        now = asyncio.get_running_loop().time()
        self._used += self._running * (now - self._since)
        self._since, self._running = now, self._running + change
        return self._used

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
            self.used(+1)
            await asyncio.sleep(tokens * TOKEN_S)
            self.used(-1)
        ids = np.ones(8, np.int32)  # the bytes of a long response would only fill the journal
        rollout.append(ids, np.zeros(8, np.float32), [VersionSegment(version, 8)])
        rollout.finish_reason, rollout.score = "stop", Score(1.0)
        rollout.move_to(Status.COMPLETED)

    async def pause(self) -> None: ...


def prompts(count: int) -> list[Prompt]:
    ids = np.array([1, 2, 3])
    return [Prompt(prompt_id=f"p:{n}", messages=(), token_ids=ids) for n in range(count)]


async def run(
    steps: int, staleness: int | None, sigma: float, slots: int, train_s: float, path: Path
) -> Figures:
    """Run all steps; `staleness` None uses the sync strategy."""
    clock = asyncio.get_running_loop().time
    started = time.perf_counter()
    journal = Journal.open(path, threaded=False)
    agent, buffer = TimedAgent(sigma, slots), ReplayBuffer()
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
    marks, stale = [], []
    for step in range(1, steps + 1):
        batch = await producer.take_batch(step)
        marks.append(Mark(clock(), agent.used()))
        stale += [group.staleness(step) for group in batch.groups]
        await asyncio.sleep(train_s)
        await journal.commit_step(StepReport(step=step, policy_version=step, digest=str(step)))
        agent.version = step
        producer.weights_updated(step)
    producing.cancel()
    await asyncio.wait([producing])
    seconds = clock()
    journal.close()
    wall_s = time.perf_counter() - started
    return Figures(marks, seconds, train_s, slots, agent.used(), float(np.mean(stale)), wall_s)


def measure(steps: int, staleness: int | None, sigma: float, slots: int, train_s: float) -> Figures:
    with tempfile.TemporaryDirectory() as folder:
        clock = VirtualClock()
        try:
            path = Path(folder) / "journal.db"
            return clock.run(run(steps, staleness, sigma, slots, train_s, path))
        finally:
            clock.close()


def modelled(steps: int, sigma: float, slots: int, bounds: list[int]) -> None:
    agent = TimedAgent(sigma, slots)
    seeds = [Rollout(rollout_id="x", prompt_ids=np.array([1]), seed=n) for n in range(4000)]
    mean = float(np.mean([agent.length(rollout) for rollout in seeds]))
    train_s = GROUPS * GENERATIONS * mean * TOKEN_S / slots  # the rates match
    print(
        f"lengths: log-normal, sigma {sigma:g}, mean {mean:.0f} tokens; {slots} slots; "
        f"a step takes {train_s:.2f} s\n"
        "                                 idle, whole run      idle, steady\n"
        "  max_staleness   s/step  speed  trainer   engine  trainer   engine  staleness  driver ms/group"
    )
    sync = measure(steps, None, sigma, slots, train_s)
    for bound in [None, *bounds]:
        one = sync if bound is None else measure(steps, bound, sigma, slots, train_s)
        idle = [*one.idle(), *one.steady_idle(bound or 0)]
        print(
            f"  {'sync' if bound is None else bound:>13}  {one.seconds / steps:7.2f}  "
            f"{sync.seconds / one.seconds:4.2f}x  {'  '.join(f'{share:7.1%}' for share in idle)}  "
            f"{one.staleness:9.2f}  {one.wall_s / (steps * GROUPS) * 1e3:15.2f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int)
    parser.add_argument("--sigma", type=float, nargs="+")
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--staleness", type=int, nargs="+")
    parser.add_argument("--real", action="store_true")
    parser.add_argument(
        "--matched", action="store_true", help="with --real: equal rates, skewed lengths"
    )
    parser.add_argument("--minutes", type=float, default=5.5, help="with --matched: for all of it")
    given = parser.parse_args()
    if given.real:
        import pipeline_real

        bounds = [n for n in given.staleness or [1, 2, 4] if n]
        if given.matched:
            pipeline_real.matched(given.minutes, given.sigma or [0.5, 1.0], bounds)
        else:
            pipeline_real.as_it_is(given.steps or 30, bounds)
        return
    for sigma in given.sigma or [0.0, 0.5, 1.0]:
        modelled(given.steps or 100, sigma, given.slots, given.staleness or [0, 1, 2, 4])


if __name__ == "__main__":
    main()
