"""An agent loop that defines `generate` for one sample: groups, faults and pauses are built on it."""

from __future__ import annotations

import asyncio
from typing import Any

from penstock.data.sampler import Sampler
from penstock.rollout.agent import AgentLoop
from penstock.types import Rollout, Status
from stages.rollouts import finish_rollout, make_prompts


def four() -> list[Rollout]:
    sampler = Sampler(make_prompts(1), task_name="t", prompt_repeat_k=4, seed=0)
    return sampler.sample("t").rollouts


class OneByOne(AgentLoop):
    """Finishes even members, fails the third and waits for ever in the last."""

    async def generate(self, rollout: Rollout, **options: Any) -> Rollout:
        index = int(rollout.rollout_id.rpartition(".")[2])
        if index == 2:
            raise RuntimeError("no tool")
        if index == 3:
            await asyncio.Event().wait()
        finish_rollout(rollout)
        return rollout


def test_a_fault_and_a_pause_concern_their_own_member() -> None:
    async def main() -> None:
        loop = OneByOne()
        rollouts = four()
        making = asyncio.create_task(loop.generate_group(rollouts))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not making.done()
        await loop.pause()
        made = await making
        done, failed, aborted = Status.COMPLETED, Status.FAILED, Status.ABORTED
        assert [one.status for one in made] == [done, done, failed, aborted]
        assert made[2].error == "agent: RuntimeError: no tool"

    asyncio.run(main())


def test_a_call_that_is_cancelled_ends_its_samples() -> None:
    async def main() -> None:
        loop = OneByOne()
        making = asyncio.create_task(loop.generate_group(four()))
        for _ in range(10):
            await asyncio.sleep(0)
        making.cancel()
        await asyncio.wait([making])
        assert making.cancelled()
        for _ in range(5):
            await asyncio.sleep(0)
        assert not loop._running_samples()

    asyncio.run(main())
