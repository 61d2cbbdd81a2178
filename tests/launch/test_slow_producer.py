"""An engine that is slower than the others: it gets less to do, and little waits for it. Virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest

from fakes import FakeEngine, VirtualClock
from penstock.engine.pool import EnginePool
from penstock.engine.protocol import Generation, GenerationRequest, SamplingParams

FAST_S, SLOW_S, SLOTS, TOKENS = 0.01, 0.1, 4, 10


class SlottedEngine(FakeEngine):
    """Decodes a few at once; the others wait for a slot."""

    def __init__(self, seconds_per_token: float) -> None:
        super().__init__(length=lambda request: TOKENS, seconds_per_token=seconds_per_token)
        self._slots = asyncio.Semaphore(SLOTS)

    async def generate(self, request: GenerationRequest) -> Generation:
        async with self._slots:
            return await super().generate(request)


@pytest.fixture
def clock() -> Iterator[VirtualClock]:
    made = VirtualClock()
    yield made
    made.close()


def request(number: int) -> GenerationRequest:
    return GenerationRequest(
        request_id=f"r{number}",
        prompt_ids=np.array([number], np.int32),
        sampling=SamplingParams(max_tokens=TOKENS),
        seed=number,
    )


def crew() -> tuple[EnginePool, SlottedEngine, SlottedEngine]:
    fast, slow = SlottedEngine(FAST_S), SlottedEngine(SLOW_S)
    return EnginePool([fast, slow]), fast, slow


def test_a_batch_that_comes_at_once_is_shared_by_speed(clock: VirtualClock) -> None:
    """Nothing is known at first, so the slow one gets half; then it no longer holds the batch up."""

    async def batches() -> list[float]:
        pool, fast, slow = crew()
        seconds = []
        for batch in range(4):
            began, before = clock.now, slow.calls
            numbers = range(40 * batch, 40 * (batch + 1))
            made = await pool.generate_many([request(number) for number in numbers])
            assert all(one.finish_reason == "stop" for one in made)
            seconds.append(clock.now - began)
            assert slow.calls - before <= (20 if batch == 0 else 6)
        assert fast.calls + slow.calls == 160
        return seconds

    first, *others = clock.run(batches())
    assert max(others) <= first / 2


def test_work_that_comes_as_it_is_finished_goes_to_the_fast_one(clock: VirtualClock) -> None:
    """Eight callers that ask again when they are answered: none of them is bound to an engine."""

    async def closed_loop() -> tuple[int, int]:
        pool, fast, slow = crew()
        numbers = iter(range(400))

        async def caller() -> None:
            for number in numbers:
                await pool.generate(request(number))

        await asyncio.gather(*(caller() for _ in range(8)))
        return fast.calls, slow.calls

    fast, slow = clock.run(closed_loop())
    assert fast + slow == 400
    assert slow > 0
    assert fast >= 9 * slow


def test_an_engine_that_recovers_gets_its_share_again(clock: VirtualClock) -> None:
    async def recovery() -> float:
        pool, _, slow = crew()
        await pool.generate_many([request(number) for number in range(40)])
        slow._seconds = FAST_S
        for batch in range(1, 12):
            before = slow.calls
            numbers = range(40 * batch, 40 * (batch + 1))
            await pool.generate_many([request(number) for number in numbers])
        return (slow.calls - before) / 40

    assert 0.3 <= clock.run(recovery()) <= 0.7
