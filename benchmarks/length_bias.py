"""Measure what oversampling does to the response lengths that are trained, for docs/async.md.

Runs 40 steps of 16 groups on virtual time. Lengths are log-normal and belong to the prompt. Generation pauses
for every update, as on a machine where trainer and engine take turns. Prints one Markdown table.

    python benchmarks/length_bias.py
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from functools import cache
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from penstock.config import SamplingConfig
from penstock.data.sampler import epoch_order
from penstock.engine.protocol import GenerationRequest
from penstock.rollout import (
    AsyncProduceStrategyConfig,
    ProduceProgress,
    Producer,
    ProduceTask,
    ReplayBuffer,
    Sampler,
)
from penstock.rollout.agent.single_turn import SingleTurn
from penstock.run.twin.virtual_time import VirtualClock
from penstock.store.journal import Journal
from penstock.types import StepReport
from stages.fake_engine import FakeEngine
from stages.rewards import CountingReward
from stages.rollouts import make_prompts

STEPS, GROUPS = 40, 16
LENGTHS = np.random.default_rng(0).lognormal(4.5, 1.0, 4000).astype(int) + 1
SETTINGS = {
    "no oversampling": {},
    "over_sample 0.5 (defaults)": {"over_sample_threshold": 0.5},
    "over_sample 0.5, tail batch 16": {"over_sample_threshold": 0.5, "tail_batch_trigger_size": 16},
    "over_sample 0.5, max_staleness 1, partial": {
        "over_sample_threshold": 0.5,
        "max_staleness": 1,
        "enable_partial_rollout": True,
    },
    "no oversampling, max_staleness 1, no pause": {"max_staleness": 1},
}


@cache
def order_of(epoch: int) -> np.ndarray:
    return epoch_order(0, "t", epoch, 4000)


def prompt_of(request: GenerationRequest) -> int:
    cursor = int(request.request_id.split(":")[1].split(".")[0])
    return int(order_of(cursor // 4000)[cursor % 4000])


async def experiment(settings: dict, pausing: bool, folder: str) -> dict[str, float]:
    journal, buffer = Journal.open(Path(folder) / "journal.db", threaded=False), ReplayBuffer()
    sampler = Sampler(
        make_prompts(4000), task_name="t", prompt_repeat_k=1, seed=0, replay_buffer=buffer
    )
    engine = FakeEngine(length=lambda r: int(LENGTHS[prompt_of(r)]))
    loop = SingleTurn(
        engine=engine, reward=CountingReward(), sampling=SamplingConfig(), decode=lambda ids: ""
    )
    producer = Producer(
        tasks=[
            ProduceTask(
                name="t",
                weight=1.0,
                strategy=AsyncProduceStrategyConfig(**settings).build(),
                agent_loop=loop,
                sampler=sampler,
            )
        ],
        replay_buffer=buffer,
        journal=journal,
        progress=ProduceProgress.build(["t"]),
        groups_per_step=GROUPS,
        last_step=STEPS,
    )
    running = asyncio.create_task(producer.run())
    for step in range(1, STEPS + 1):
        await producer.take_batch(step)
        if pausing:
            await producer.pause()
        await asyncio.sleep(1.0)
        await journal.commit_step(StepReport(step=step, policy_version=step, digest=str(step)))
        await engine.update_weights(step)
        producer.weights_updated(step)
        if pausing:
            producer.resume()
    now = producer.snapshot().tasks[0]
    trained = journal.query("SELECT num_tokens, prompt_id FROM groups WHERE state = 'trained'")
    drawn = [
        LENGTHS[int(p.split(":")[1])] for (p,) in journal.query("SELECT prompt_id FROM groups")
    ]
    seconds = asyncio.get_running_loop().time()
    running.cancel()
    await asyncio.wait([running])
    journal.close()
    return {
        "drawn": now.drawn,
        "trained": now.trained,
        "left": now.buffered + now.in_flight,
        "dropped": sum(now.dropped.values()),
        "mean drawn": float(np.mean(drawn)),
        "mean trained": float(np.mean([tokens for tokens, _ in trained])),
        "generated / trained": engine.tokens / sum(tokens for tokens, _ in trained),
        "virtual s": seconds,
    }


def main() -> None:
    heads: list[str] = []
    for name, settings in SETTINGS.items():
        clock = VirtualClock()
        with tempfile.TemporaryDirectory() as folder:
            row = clock.run(experiment(settings, "no pause" not in name, folder))
        clock.close()
        if not heads:
            heads = ["setting", *row]
            print("| " + " | ".join(heads) + " |\n|" + "---|" * len(heads))
        values = [
            f"{v:.0f}" if float(v).is_integer() or v > 20 else f"{v:.2f}" for v in row.values()
        ]
        print("| " + " | ".join([name, *values]) + " |", flush=True)


if __name__ == "__main__":
    main()
