"""An engine that is slower than the others gets fewer requests, and is named."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from penstock.engine.protocol import Generation, GenerationRequest
from penstock.run.twin.virtual_time import VirtualClock
from stages.paced_engine import PacedEngine, request_of, tokens_of
from stages.supervised import EngineCrew

pytestmark = pytest.mark.usefixtures("warm_workers")

FAST_S, SLOW_S, SLOTS = 0.01, 0.1, 8
GROUPS, GROUP = 24, 4
SLOW_SHARE = 0.15  # of all responses; by pace alone it would be 0.09, split evenly 0.5


@pytest.fixture
def clock() -> Iterator[VirtualClock]:
    made = VirtualClock()
    yield made
    made.close()


def lengths(seed: int, sigma: float) -> np.ndarray:
    """Return the response lengths of a batch: log-normal, median 100 tokens."""
    drawn = np.random.default_rng(seed).lognormal(np.log(100), sigma, (GROUPS, GROUP))
    return np.clip(drawn, 1, 2000).astype(int)


def batch(number: int, sigma: float = 0.5) -> list[list[GenerationRequest]]:
    """Return the groups of a batch, which many agent loops request at once."""
    return [
        [
            request_of(
                f"{number}.{group}.{index}",
                1000 * number + group,
                seed=10 * group + index,
                length=int(length),
                longest=2000,
            )
            for index, length in enumerate(row)
        ]
        for group, row in enumerate(lengths(number, sigma))
    ]


class Crew(EngineCrew):
    """A pool over engines of these paces."""

    def __init__(self, *paces: float, **options: Any) -> None:
        engines = [PacedEngine(pace, slots=SLOTS, prefill_s=pace / 50) for pace in paces]
        super().__init__(engines, slots=SLOTS, **options)

    async def make(self, groups: list[list[GenerationRequest]]) -> list[Generation]:
        made = await asyncio.gather(*(self.pool.generate_many(group) for group in groups))
        return [one for group in made for one in group]


def seconds_for(clock: VirtualClock, crew: Crew, batches: int, sigma: float = 0.5) -> list[float]:
    """Return the seconds of each batch; the next begins when all of it is generated (sync mode)."""

    async def run() -> list[float]:
        found = []
        await crew.start()
        for number in range(batches):
            began, groups = clock.now, batch(number, sigma)
            made = await crew.make(groups)
            found.append(clock.now - began)
            asked = [request for group in groups for request in group]
            for request, one in zip(asked, made, strict=True):
                wanted = tokens_of(request.seed, 0, request.sampling.min_tokens)
                assert np.array_equal(one.token_ids, wanted)
        return found

    return clock.run(run())


@pytest.mark.parametrize("sigma", [0.0, 0.5, 1.0])
def test_an_engine_ten_times_slower_is_named_and_begins_less(
    clock: VirtualClock, sigma: float
) -> None:
    """Its speed is unknown in the first batch; later it gets the work that the other one has no time for."""
    crew = Crew(FAST_S, SLOW_S)
    seconds_for(clock, crew, 6, sigma)
    assert crew.engines[1].calls < SLOW_SHARE * 6 * GROUPS * GROUP
    assert len(crew.notes) == 1
    assert crew.notes[0].startswith("engine-1: it is slow, ")


@pytest.mark.parametrize("pace", [FAST_S, 2 * FAST_S])
def test_engines_of_about_one_pace_share_a_batch(clock: VirtualClock, pace: float) -> None:
    alone = seconds_for(clock, Crew(FAST_S), 3)
    crew = Crew(FAST_S, pace)
    both = seconds_for(clock, crew, 3)
    assert sum(both) <= (0.7 if pace == FAST_S else 1.0) * sum(alone)
    assert crew.notes == []


def test_work_that_comes_as_it_is_finished_goes_to_the_fast_one(clock: VirtualClock) -> None:
    """A closed loop with as many callers as slots; no caller is tied to an engine."""

    async def closed_loop() -> tuple[int, int]:
        crew = Crew(FAST_S, SLOW_S)
        await crew.start()
        numbers = iter(range(400))

        async def caller() -> None:
            for number in numbers:
                await crew.pool.generate(request_of(f"r{number}", number))

        await asyncio.gather(*(caller() for _ in range(2 * SLOTS)))
        return crew.engines[0].calls, crew.engines[1].calls

    fast, slow = clock.run(closed_loop())
    assert slow > 0
    assert fast >= 9 * slow


def test_an_engine_that_recovers_gets_its_share_again(clock: VirtualClock) -> None:
    crew = Crew(FAST_S, SLOW_S)
    seconds_for(clock, crew, 1)
    crew.engines[1].token_s = FAST_S

    async def later() -> float:
        for number in range(1, 12):
            before = crew.engines[1].calls
            await crew.make(batch(number))
        return (crew.engines[1].calls - before) / (GROUPS * GROUP)

    assert 0.3 <= clock.run(later()) <= 0.7
