"""An engine that is slower than the others: it takes what it can chew, and no batch waits for it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.engine.protocol import Generation, GenerationRequest
from penstock.pool.pool import EnginePool
from penstock.produce.virtual_time import VirtualClock
from penstock.run_folder import RunFolder
from penstock.types import WeightHandle
from stages import stalling_engine
from stages.disturbed_run import assert_balanced, config_of, digests, run
from stages.paced_engine import PacedEngine, request_of, tokens_of

pytestmark = pytest.mark.usefixtures("warm_workers")

FAST_S, SLOW_S, SLOTS = 0.01, 0.1, 8
GROUPS, GROUP = 24, 4


@pytest.fixture
def clock() -> Iterator[VirtualClock]:
    made = VirtualClock()
    yield made
    made.close()


def lengths(seed: int, sigma: float) -> np.ndarray:
    """Of a batch's responses: 100 tokens in the middle, log-normal."""
    drawn = np.random.default_rng(seed).lognormal(np.log(100), sigma, (GROUPS, GROUP))
    return np.clip(drawn, 1, 2000).astype(int)


def batch(number: int, sigma: float = 0.5) -> list[list[GenerationRequest]]:
    """Groups, as many agent loops ask for them at once."""
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


class Crew:
    """A pool over engines of these paces, and what it told."""

    def __init__(self, *paces: float) -> None:
        self.engines = [PacedEngine(pace, slots=SLOTS, prefill_s=pace / 50) for pace in paces]
        self.lines: list[str] = []
        self.pool = EnginePool(
            self.engines, slots=SLOTS, name_of="engine-{}".format, tell=self.lines.append
        )

    async def make(self, groups: list[list[GenerationRequest]]) -> list[Generation]:
        made = await asyncio.gather(*(self.pool.generate_many(group) for group in groups))
        return [one for group in made for one in group]


def seconds_for(clock: VirtualClock, crew: Crew, batches: int, sigma: float = 0.5) -> list[float]:
    """Of each batch, which begins when the one before it is whole (sync mode)."""

    async def run() -> list[float]:
        found = []
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
def test_a_batch_is_not_held_by_an_engine_ten_times_slower(
    clock: VirtualClock, sigma: float
) -> None:
    """Not even the first one, before anything is known of it; compared with the fast one alone."""
    alone = seconds_for(clock, Crew(FAST_S), 4, sigma)
    crew = Crew(FAST_S, SLOW_S)
    both = seconds_for(clock, crew, 4, sigma)
    for with_it, without in zip(both, alone, strict=True):
        assert with_it <= 1.25 * without
    assert len(crew.lines) == 1
    assert crew.lines[0].startswith("engine-1: it is slow, ")


def test_engines_of_one_pace_share_a_batch_and_move_nothing(clock: VirtualClock) -> None:
    alone = seconds_for(clock, Crew(FAST_S), 3)
    crew = Crew(FAST_S, FAST_S)
    both = seconds_for(clock, crew, 3)
    assert sum(both) <= 0.7 * sum(alone)
    assert clock.run(crew.pool.stats()).moved == 0
    assert crew.lines == []


def test_a_response_moves_with_its_tokens_and_versions(clock: VirtualClock) -> None:
    """New weights come before and after the move; every token says under which it was made."""
    crew = Crew(FAST_S, SLOW_S)

    async def run() -> Generation:
        handle: Any = WeightHandle(version=1, digest="digest-1", kind="none")
        warm = [request_of(f"w{n}", n, length=100) for n in range(4)]
        await asyncio.gather(*(crew.pool.generate(request) for request in warm))
        long = request_of("long", 9, seed=3, length=500, longest=500)
        crew.pool._owner["long"] = 1
        moved = asyncio.Event()
        crew.engines[0].on_begin = lambda name: moved.set()
        making = asyncio.create_task(crew.pool.generate(long))
        await asyncio.sleep(2.5 * SLOW_S)
        await crew.pool.update_weights(1, handle)
        await moved.wait()
        await crew.pool.update_weights(2, handle)
        return await making

    made = clock.run(run())
    assert np.array_equal(made.token_ids, tokens_of(3, 0, 500))
    assert [segment.version for segment in made.segments] == [0, 1, 2]
    assert made.segments[0].length == 2
    assert crew.engines[0].begun["long"] == crew.engines[1].begun["long"] == 1


def test_work_that_comes_as_it_is_finished_goes_to_the_fast_one(clock: VirtualClock) -> None:
    """As many callers as slots, who ask again when they are answered: none is bound to an engine."""

    async def closed_loop() -> tuple[int, int]:
        crew = Crew(FAST_S, SLOW_S)
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


def test_an_engine_that_becomes_slow_is_found_out_while_it_holds_the_last_response(
    clock: VirtualClock,
) -> None:
    async def run() -> None:
        crew = Crew(FAST_S, FAST_S)
        for number in range(3):
            await crew.make(batch(number))
        long = request_of("long", 9, seed=3, length=1000)
        crew.pool._owner["long"] = 1
        making = asyncio.create_task(crew.pool.generate(long))
        await asyncio.sleep(8.0)
        crew.engines[1].set_pace(100 * FAST_S)
        began = clock.now
        assert len((await making).token_ids) == 1000
        assert clock.now - began < 10.0  # 200 s were left there
        assert len(crew.lines) == 1

    clock.run(run())


def test_engines_serve_from_the_moment_on_that_they_have_new_weights(clock: VirtualClock) -> None:
    """Sync mode: a batch begins when the first engine has them; the other one joins in later."""

    async def run() -> tuple[float, list[int]]:
        crew, began = Crew(FAST_S, FAST_S), asyncio.Event()
        crew.engines[0].load_s, crew.engines[1].load_s = 1.0, 5.0
        crew.pool._first_loaded = lambda version, digest: began.set()
        handle: Any = WeightHandle(version=1, digest="digest-1", kind="none")
        updating = asyncio.create_task(crew.pool.update_weights(1, handle))
        await began.wait()
        made = await crew.make(batch(0))
        assert {segment.version for one in made for segment in one.segments} == {1}
        assert await updating == "digest-1"
        return clock.now, [engine.calls for engine in crew.engines]

    alone = seconds_for(clock, Crew(FAST_S), 1)[0]
    before = clock.now
    seconds, calls = clock.run(run())
    assert seconds - before < 1.0 + alone
    assert all(calls)


# ---- a whole run


ENGINE = f"engine.name={stalling_engine.__file__}:StallingSecond"


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_run_does_not_wait_for_an_engine_that_hardly_makes_a_token(
    quiet: RunFolder, tmp_path: Path, staleness: int
) -> None:
    """Its responses go on elsewhere; in sync mode the weights are those of a run without it."""
    words = [
        ENGINE,
        "launch.num_producers=2",
        f"produce.max_staleness={staleness}",
        "produce.strategy=" + ("async" if staleness else "sync"),
    ]
    folder, notes = run(config_of(tmp_path, "slow", *words))
    assert_balanced(folder)
    told = [note for note in notes if "it is slow" in note]
    assert len(told) == 1
    assert told[0].startswith("engine-1: it is slow, ")
    metrics = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    assert sum(line.get("responses/moved", 0) for line in metrics) > 0
    if not staleness:
        assert digests(folder) == digests(quiet)
