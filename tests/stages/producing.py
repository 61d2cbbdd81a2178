"""A stage for tests of the producing side: one task, a held agent loop, a journal, virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from penstock.config import SamplingConfig
from penstock.data.sampler import Sampler
from penstock.engine.protocol import GenerationRequest
from penstock.rollout import (
    AsyncProduceStrategyConfig,
    ProduceContext,
    ProduceProgress,
    Producer,
    ProduceTask,
    ReplayBuffer,
)
from penstock.rollout.agent.single_turn import SingleTurn
from penstock.run.twin.virtual_time import VirtualClock
from penstock.store.journal import Journal
from penstock.types import Batch, Group, Status, StepReport
from penstock.waits import Waits
from stages.fake_agent_loop import FakeAgentLoop
from stages.fake_engine import FakeEngine
from stages.rewards import CountingReward
from stages.rollouts import finish_rollout, make_prompts


def on_virtual_time(main: Callable[[], Coroutine[Any, Any, None]]) -> float:
    """Run the coroutine; return the virtual seconds it took."""
    clock = VirtualClock()
    try:
        clock.run(main())
        return clock.now
    finally:
        clock.close()


class ProducerStage:
    """A strategy with its parts; tests call it directly with the context, or run the producer."""

    def __init__(
        self,
        path: Path,
        config: AsyncProduceStrategyConfig,
        *,
        batch: int = 4,
        interval: int = 1,
        agent_loop: Any = None,
        prompts: int = 1000,
        k: int = 2,
        is_valid: Any = None,
        last_step: int | None = None,
    ) -> None:
        self.journal = Journal.open(path / "journal.db", threaded=False)
        self.buffer = ReplayBuffer()
        self.loop = agent_loop if agent_loop is not None else FakeAgentLoop()
        if is_valid is not None:
            config = config.model_copy(update={"is_valid_sample_fn": is_valid})
        self.strategy = config.build(sync_weights_interval=interval)
        self.sampler = Sampler(
            make_prompts(prompts),
            task_name="t",
            prompt_repeat_k=k,
            seed=0,
            replay_buffer=self.buffer,
        )
        self.progress, self.waits = ProduceProgress.build(["t"]), Waits()
        self.producer = Producer(
            tasks=[
                ProduceTask(
                    name="t",
                    weight=1.0,
                    strategy=self.strategy,
                    agent_loop=self.loop,
                    sampler=self.sampler,
                )
            ],
            replay_buffer=self.buffer,
            journal=self.journal,
            progress=self.progress,
            groups_per_step=batch,
            sync_weights_interval=interval,
            last_step=last_step,
            waits=self.waits,
        )
        self.ctx: ProduceContext = self.producer._tasks[0].ctx
        self.ctx.task_batch_size = batch

    def count(self, status: Status) -> int:
        return self.buffer.count("t", status)

    def finish_all(self) -> None:
        for group_id in list(self.loop.held):
            self.loop.finish(group_id)

    def buffered(self, status: Status, version: int = 0) -> Group:
        """Put a finished group with that status into the buffer; return it."""
        group = self.sampler.sample("t")
        self.strategy.runner.drawn += 1
        self.journal.drawn(group)
        for rollout in group.rollouts:
            finish_rollout(rollout, version=version)
        group.tries = 1
        group.move_to(status)
        self.buffer.put(group)
        return group

    async def train(self, batch: Batch, *, publish: bool = True) -> None:
        step = batch.step
        await self.journal.commit_step(
            StepReport(step=step, policy_version=step, digest=f"digest-{step}")
        )
        if publish:
            self.publish(step)

    def publish(self, version: int) -> None:
        self.loop.version = version
        self.producer.weights_updated(version)


async def turns(count: int = 20) -> None:
    """Let everything that can run at this instant run."""
    for _ in range(count):
        await asyncio.sleep(0)


def single_turn(engine: FakeEngine, reward: CountingReward | None = None) -> SingleTurn:
    return SingleTurn(
        engine=engine,
        reward=reward or CountingReward(),
        sampling=SamplingConfig(),
        decode=lambda ids: " ".join(map(str, ids)),
    )


async def cancel(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.wait([task])


def fingerprint(batch: Batch) -> list[tuple]:
    return [
        (
            r.rollout_id,
            r.seed,
            r.response_ids.tolist(),
            r.logprobs.tolist(),
            r.segments,
            r.temperature,
        )
        for r in batch.rollouts
    ]


def uneven(request: GenerationRequest) -> int:
    return 1 + request.seed % 9


async def train_steps(stage: ProducerStage, engine: FakeEngine, first: int, last: int) -> list:
    seen = []
    for step in range(first, last + 1):
        batch = await stage.producer.take_batch(step)
        seen.append(fingerprint(batch))
        await asyncio.sleep(0.07)
        await stage.train(batch, publish=False)
        await engine.update_weights(step)
        stage.publish(step)
    return seen
