"""The plain agent loop: statuses, partials, isolation, temperatures."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from penstock.config import AnnealConfig, SamplingConfig
from penstock.data.sampler import Sampler
from penstock.reward.protocol import Reward
from penstock.rollout.agent.single_turn import SingleTurn, annealed_temperature
from penstock.run.twin.virtual_time import VirtualClock
from penstock.types import Group, Prompt, Rollout, Score, Status, expand_segments
from stages.fake_engine import FakeEngine
from stages.rewards import CountingReward
from stages.rollouts import make_prompts


def make_group(k: int = 3) -> Group:
    return Sampler(make_prompts(3), task_name="t", prompt_repeat_k=k, seed=0).group_at(0)


def make_loop(
    engine: FakeEngine, reward: CountingReward | None = None, **sampling: object
) -> SingleTurn:
    return SingleTurn(
        engine=engine,
        reward=reward or CountingReward(),
        sampling=SamplingConfig(**sampling),
        decode=lambda ids: f"{len(ids)} tokens",
    )


def run(main: object) -> None:
    clock = VirtualClock()
    clock.run(main)  # type: ignore[arg-type]
    clock.close()


def test_a_group_is_generated_and_scored() -> None:
    async def main() -> None:
        group = make_group()
        await make_loop(FakeEngine(), temperature=0.7).generate_group(group.rollouts)
        assert group.status is Status.COMPLETED
        assert {r.finish_reason for r in group.rollouts} == {"stop"}
        assert {r.text for r in group.rollouts} == {"4 tokens"}
        assert {r.temperature for r in group.rollouts} == {0.7}
        assert {r.reward for r in group.rollouts} == {1.0}

    run(main())


def test_a_rollout_is_a_function_of_its_identity_whoever_shares_its_batch() -> None:
    async def main() -> None:
        one, two = make_group(), make_group()
        await make_loop(FakeEngine()).generate_group(one.rollouts)
        await make_loop(FakeEngine()).generate_group([two.rollouts[1]])
        assert one.rollouts[1].response_ids.tolist() == two.rollouts[1].response_ids.tolist()

    run(main())


@pytest.mark.parametrize(
    ("how", "error", "statuses"),
    [
        ("out of memory", "engine: out of memory", ["completed", "failed", "completed"]),
        ("raise", "engine: RuntimeError: engine raised", ["failed", "failed", "failed"]),
    ],
)
def test_a_fault_of_the_engine_stays_in_its_rollout_and_an_engine_that_raises_fails_the_call(
    how: str, error: str, statuses: list[str]
) -> None:
    async def main() -> None:
        engine = FakeEngine(fail=lambda r: how if r.request_id.startswith("t:0.1/") else "")
        group = make_group()
        await make_loop(engine).generate_group(group.rollouts)
        assert [r.status for r in group.rollouts] == statuses
        assert group.rollouts[1].error == error
        assert group.status is Status.FAILED

    run(main())


def test_a_fault_of_the_reward_stays_in_its_rollout_and_only_it_is_scored_again() -> None:
    async def main() -> None:
        broken = {"t:0.1"}
        reward = CountingReward(lambda r: "503" if r.rollout_id in broken else "")
        engine = FakeEngine()
        loop, group = make_loop(engine, reward), make_group()
        await loop.generate_group(group.rollouts)
        assert group.rollouts[1].error == "reward: RuntimeError: 503"
        assert [r.status for r in group.rollouts] == ["completed", "failed", "completed"]
        broken.clear()
        await loop.generate_group(group.rollouts)
        assert group.status is Status.COMPLETED
        assert engine.calls == 3
        assert reward.calls == ["t:0.0", "t:0.1", "t:0.2", "t:0.1"]

    run(main())


def test_pause_aborts_and_keeps_partial_tokens_which_go_on_at_their_temperature() -> None:
    async def main() -> None:
        engine = FakeEngine(length=lambda r: 3 if r.request_id.startswith("t:0.0") else 10)
        reward = CountingReward()
        loop, group = make_loop(engine, reward), make_group()
        running = asyncio.create_task(loop.generate_group(group.rollouts))
        await asyncio.sleep(0.055)
        await loop.pause()
        await running
        assert [r.status for r in group.rollouts] == ["completed", "aborted", "aborted"]
        assert [len(r.response_ids) for r in group.rollouts] == [3, 5, 5]
        kept = group.rollouts[1].response_ids.tolist()
        await engine.update_weights(2)
        group.rollouts[1].temperature = 0.5  # that it began with
        await loop.generate_group(group.rollouts, enable_partial_rollout=True)
        assert group.status is Status.COMPLETED
        assert group.rollouts[1].response_ids.tolist()[:5] == kept
        assert group.rollouts[1].temperature == 0.5
        assert expand_segments(group.rollouts[1].segments) == [0] * 5 + [2] * 5
        assert reward.calls.count("t:0.0") == 1

    run(main())


def test_without_partial_rollouts_an_aborted_member_starts_again() -> None:
    async def main() -> None:
        engine = FakeEngine(length=lambda r: 10)
        loop, group = make_loop(engine), make_group()
        running = asyncio.create_task(loop.generate_group(group.rollouts))
        await asyncio.sleep(0.055)
        await loop.pause()
        await running
        await engine.update_weights(1)
        await loop.generate_group(group.rollouts)
        assert all(expand_segments(r.segments) == [1] * 10 for r in group.rollouts)

    run(main())


def test_a_cancelled_group_leaves_nothing_in_the_engine() -> None:
    async def main() -> None:
        engine = FakeEngine(length=lambda r: 1000)
        running = asyncio.create_task(make_loop(engine).generate_group(make_group().rollouts))
        await asyncio.sleep(0.01)
        assert (await engine.stats()).running == 3
        running.cancel()
        await asyncio.wait([running])
        await asyncio.sleep(0.01)
        assert (await engine.stats()).running == 0

    run(main())


def test_the_temperature_is_annealed_by_policy_version() -> None:
    sampling = SamplingConfig(temperature=1.2, anneal=AnnealConfig(end=0.8, steps=4))
    found = [annealed_temperature(sampling, version) for version in (0, 2, 4, 9)]
    assert found == pytest.approx([1.2, 1.0, 0.8, 0.8])
    assert annealed_temperature(SamplingConfig(temperature=0.9), 5) == 0.9

    async def main() -> None:
        group = make_group()
        for rollout in group.rollouts:
            rollout.issued_version = 2
        loop = SingleTurn(
            engine=FakeEngine(), reward=CountingReward(), sampling=sampling, decode=str
        )
        await loop.generate_group(group.rollouts)
        assert all(r.temperature == pytest.approx(1.0) for r in group.rollouts)

    run(main())


class RankReward(Reward):
    """Compares the members of a group: the first gets 0, the next 1, and so on."""

    needs_group = True

    def __init__(self) -> None:
        self.calls: list[int] = []
        self.broken = False

    async def score(self, rollout: Rollout, prompt: Prompt) -> Score:
        raise AssertionError("a member of a group is not judged alone")

    async def score_group(
        self, rollouts: Sequence[Rollout], prompts: Sequence[Prompt]
    ) -> list[Score]:
        self.calls.append(len(rollouts))
        if self.broken:
            raise RuntimeError("503")
        return [Score(float(rank)) for rank in range(len(rollouts))]


def test_a_reward_over_the_group_is_asked_once_when_all_are_finished() -> None:
    async def main() -> None:
        engine = FakeEngine(length=lambda r: 3 if r.request_id.startswith("t:0.0") else 10)
        reward = RankReward()
        loop, group = make_loop(engine, reward), make_group()
        running = asyncio.create_task(loop.generate_group(group.rollouts))
        await asyncio.sleep(0.055)
        await loop.pause()
        await running
        assert reward.calls == []
        assert group.status is Status.ABORTED
        calls = engine.calls
        await loop.generate_group(group.rollouts)
        assert engine.calls == calls + 2  # the finished one is not generated again
        assert [r.reward for r in group.rollouts] == [0.0, 1.0, 2.0]
        assert reward.calls == [3]

    run(main())


def test_a_fault_of_a_group_reward_fails_the_group_and_keeps_its_responses() -> None:
    async def main() -> None:
        engine, reward = FakeEngine(), RankReward()
        loop, group = make_loop(engine, reward), make_group()
        reward.broken = True
        await loop.generate_group(group.rollouts)
        assert group.status is Status.FAILED
        assert group.rollouts[0].error == "reward: RuntimeError: 503"
        reward.broken = False
        await loop.generate_group(group.rollouts)
        assert group.status is Status.COMPLETED
        assert engine.calls == 3

    run(main())
