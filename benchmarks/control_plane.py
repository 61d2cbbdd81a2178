"""Measure what the control plane costs per group, from 1,000 to 1,000,000 groups; it must be flat.

    python benchmarks/control_plane.py [--most 1000000] [--journal-most 100000]

Prints nanoseconds per count and microseconds per put and per take in a buffer of that size; microseconds per
group for the whole way (schedule, land, journal, take); and groups per second of the journal alone (drawn,
landed, begun), for groups of 2 and of 4 rollouts of 16 tokens. Times are CPU times of this process, all
threads, so that load from other processes counts less.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
import numpy as np

from penstock.rollout import (
    AsyncProduceStrategyConfig,
    ProduceProgress,
    Producer,
    ProduceTask,
    ReplayBuffer,
    Sampler,
)
from penstock.store.journal import Journal
from penstock.types import Group, Rollout, Score, Status, StepReport, VersionSegment
from stages.rollouts import finish_rollout, make_prompt, make_prompts

SAMPLES = 1000
IDS = np.arange(16, dtype=np.int32)
LOGPROBS = np.zeros(16, dtype=np.float32)
SCORE = Score(1.0)


def make_groups(count: int) -> list[Group]:
    """Return groups that share one rollout's arrays; the buffer never looks at them."""
    prompt = make_prompt(0)
    rollout = Rollout(rollout_id="t:0.0", prompt_ids=prompt.token_ids, seed=0)
    finish_rollout(rollout, num_tokens=16)
    return [
        Group(group_id=f"t:{n}", task="t", cursor=n, prompt=prompt, rollouts=[rollout])
        for n in range(count)
    ]


def seconds(function: object, times: int) -> float:
    """Return the seconds per call, the best of three."""
    best = float("inf")
    for _ in range(3):
        started = time.process_time()
        for _ in range(times):
            function()  # type: ignore[operator]
        best = min(best, (time.process_time() - started) / times)
    return best


def buffer_costs(size: int) -> tuple[float, float, float]:
    groups = make_groups(size + SAMPLES)
    buffer = ReplayBuffer()
    for group in groups[:size]:
        buffer.put(group)
    extra = iter(groups[size:])
    started = time.process_time()
    for group in extra:
        buffer.put(group)
    put = (time.process_time() - started) / SAMPLES
    count = seconds(lambda: buffer.count("t", Status.COMPLETED), 10_000)
    started = time.process_time()
    for _ in range(SAMPLES):
        buffer.take("t", Status.COMPLETED)
    take = (time.process_time() - started) / SAMPLES
    return count, put, take


async def journal_rate(size: int, folder: str, rollouts: int) -> float:
    journal = Journal.open(Path(folder) / "journal.db")
    sampler = Sampler(make_prompts(64), task_name="t", prompt_repeat_k=rollouts, seed=0)
    batch = 1000
    spent = 0.0
    for at in range(0, size, batch):
        groups = [sampler.group_at(cursor) for cursor in range(at, at + batch)]
        for group in groups:
            for rollout in group.rollouts:
                finish_rollout(rollout, num_tokens=16)
        started = time.process_time()
        for group in groups:
            journal.drawn(group)
        await asyncio.gather(*(journal.landed(group) for group in groups))
        step = at // batch + 1
        await journal.begin_step(step, groups)
        await journal.commit_step(StepReport(step=step, policy_version=step, digest="d"))
        spent += time.process_time() - started
    journal.close()
    return size / spent


def journal_rates(size: int) -> list[str]:
    rates = []
    for rollouts in (2, 4):
        with tempfile.TemporaryDirectory() as folder:
            rates.append(f"{asyncio.run(journal_rate(size, folder, rollouts)):.0f}")
    return rates


class InstantLoop:
    """Finishes every group at once."""

    async def generate_group(
        self, rollouts: list[Rollout], *, enable_partial_rollout: bool = False
    ) -> list[Rollout]:
        for rollout in rollouts:
            rollout.append(IDS, LOGPROBS, [VersionSegment(rollout.issued_version, len(IDS))])
            rollout.finish_reason, rollout.score = "stop", SCORE
            rollout.move_to(Status.COMPLETED)
        return rollouts

    async def pause(self) -> None: ...


async def whole_way(size: int, folder: str) -> float:
    """Return seconds per group through sampler, strategy, journal, buffer and take_batch."""
    journal, buffer, batch = Journal.open(Path(folder) / "journal.db"), ReplayBuffer(), 250
    sampler = Sampler(
        make_prompts(64), task_name="t", prompt_repeat_k=4, seed=0, replay_buffer=buffer
    )
    task = ProduceTask(
        name="t",
        weight=1.0,
        strategy=AsyncProduceStrategyConfig(max_staleness=1).build(),
        agent_loop=InstantLoop(),
        sampler=sampler,
    )
    producer = Producer(
        tasks=[task],
        replay_buffer=buffer,
        journal=journal,
        progress=ProduceProgress.build(["t"]),
        groups_per_step=batch,
        last_step=size // batch,
    )
    started = time.process_time()
    running = asyncio.create_task(producer.run())
    for step in range(1, size // batch + 1):
        await producer.take_batch(step)
        await journal.commit_step(StepReport(step=step, policy_version=step, digest="d"))
        producer.weights_updated(step)
    spent = time.process_time() - started
    running.cancel()
    await asyncio.wait([running])
    journal.close()
    return spent / size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--most", type=int, default=1_000_000)
    parser.add_argument("--journal-most", type=int, default=100_000)
    options = parser.parse_args()
    print(
        "| groups | count ns | put us | take us | whole way us | journal groups/s: 2 rollouts | 4 |\n"
        "|---|---|---|---|---|---|---|"
    )
    for size in (1_000, 10_000, 100_000, 1_000_000):
        if size > options.most:
            break
        gc.collect()
        gc.freeze()
        count, put, take = buffer_costs(size)
        rate, way = "- | -", "-"
        if size <= options.journal_most:
            rate = " | ".join(journal_rates(size))
            with tempfile.TemporaryDirectory() as folder:
                way = f"{asyncio.run(whole_way(size, folder)) * 1e6:.0f}"
        times = f"{count * 1e9:.0f} | {put * 1e6:.2f} | {take * 1e6:.2f} | {way}"
        print(f"| {size} | {times} | {rate} |", flush=True)


if __name__ == "__main__":
    main()
