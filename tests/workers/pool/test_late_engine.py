"""An engine that is late with new weights delays only itself, and nothing older is trained than the bound allows."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.cli import app
from penstock.engine.protocol import GenerationRequest
from penstock.engine.transformers.engine import TransformersEngine
from penstock.errors import DigestMismatch, WeightsGone
from penstock.run.twin.virtual_time import VirtualClock
from penstock.store.run_folder import RunFolder
from penstock.types import WeightHandle
from stages.paced_engine import PacedEngine, request_of
from stages.supervised import EngineCrew
from stages.tiny_run import TINY, assert_sound

FIRST_S, LATE_S = 1.0, 10.0


@pytest.fixture
def clock() -> Iterator[VirtualClock]:
    made = VirtualClock()
    yield made
    made.close()


class Crew(EngineCrew):
    """Two engines: the first loads in 1 s, the second in 10 s."""

    def __init__(self, may_leave: bool = True) -> None:
        self.told: list[int] = []
        self.confirmed: list[int] = []
        super().__init__(
            [PacedEngine(0.01, slots=4, load_s=seconds) for seconds in (FIRST_S, LATE_S)],
            slots=4,
            may_leave=may_leave,
            told={
                "first_loaded": lambda version, digest: self.told.append(version),
                "confirmed": lambda version, digest: self.confirmed.append(version),
            },
        )

    async def publish(self, version: int) -> None:
        await self.pool.update_weights(version, handle_of(version))

    @property
    def versions(self) -> list[int]:
        return [engine.version for engine in self.engines]


def handle_of(version: int) -> WeightHandle:
    return WeightHandle(version=version, digest=f"digest-{version}", kind="none")


def play(clock: VirtualClock, crew: Crew, work: Callable[[Crew], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        await crew.start()
        found = await work(crew)
        await crew.pool.close()
        return found

    return clock.run(run())


@pytest.mark.parametrize(
    ("may_leave", "ends"),
    [
        (False, [10, 20, 30]),  # as long as the slowest
        (True, [2, 3, 4]),  # the first waits to see who is late, the others wait for nobody
    ],
)
def test_publications_wait_for_a_late_engine_only_if_nothing_may_run_ahead(
    clock: VirtualClock, may_leave: bool, ends: list[float]
) -> None:
    crew = Crew(may_leave)

    async def work(crew: Crew) -> list[float]:
        found, began = [], clock.now
        for version in (1, 2, 3):
            await crew.publish(version)
            assert crew.engines[0].version == version
            found.append(clock.now - began)
        return found

    assert play(clock, crew, work) == pytest.approx(ends)
    assert crew.told == crew.confirmed == [1, 2, 3]
    named = ["engine-1: it is late with new weights; the others go on alone"]
    assert crew.notes == (named if may_leave else [])


def test_a_late_engine_leaves_out_what_was_replaced_meanwhile(clock: VirtualClock) -> None:
    async def work(crew: Crew) -> None:
        asked = loads_of(crew)
        for version in (1, 2, 3):
            await crew.publish(version)
        await asyncio.sleep(3 * LATE_S)
        assert asked == [1, 3]
        assert crew.versions == [3, 3]

    play(clock, Crew(), work)


def test_a_late_engine_that_is_slower_than_the_publications_takes_no_request_of_theirs(
    clock: VirtualClock,
) -> None:
    """It always has older weights than the newest; none of its tokens may be passed off as newer."""

    async def work(crew: Crew) -> None:
        for version in range(1, 9):
            await crew.publish(version)
            made = await crew.pool.generate_many([ask(100 * version + n) for n in range(12)])
            assert {one.segments[0].version for one in made} == {version}
            await asyncio.sleep(LATE_S / 3)
        assert crew.engines[1].calls == 0

    play(clock, Crew(), work)


def test_a_late_engine_takes_no_requests_until_it_has_the_newest_weights(
    clock: VirtualClock,
) -> None:
    async def work(crew: Crew) -> None:
        await crew.publish(1)
        assert crew.versions == [1, 0]
        assert (await crew.pool.stats()).policy_version == 1
        async with crew.pool.set_aside() as lent:
            assert lent is None  # no other engine could take the requests
        made = await crew.pool.generate_many([ask(n) for n in range(12)])
        assert {one.segments[0].version for one in made} == {1}
        assert crew.engines[1].calls == 0
        await asyncio.sleep(LATE_S)
        assert crew.versions == [1, 1]
        await crew.pool.generate_many([ask(n) for n in range(12, 36)])
        assert crew.engines[1].calls > 0

    play(clock, Crew(), work)


def loads_of(crew: Crew, error: Exception | None = None) -> list[int]:
    """Return the versions that the late engine loads from now on; `error`: what its first load ends with."""
    late, asked = crew.engines[1], list[int]()
    load = late.update_weights

    async def update_weights(version: int, source: WeightHandle) -> str:
        asked.append(version)
        digest = await load(version, source)
        if error is not None and len(asked) == 1:
            raise error
        return digest

    late.update_weights = update_weights
    return asked


def ask(number: int) -> GenerationRequest:
    return request_of(f"one.{number}", number, seed=number, length=10)


def test_a_late_engine_that_dies_comes_back_with_the_newest_weights(clock: VirtualClock) -> None:
    async def work(crew: Crew) -> None:
        await crew.publish(1)
        crew.engines[1].load_s = FIRST_S
        crew.workers[1].die()
        await crew.publish(2)
        crew.revive(1)
        await asyncio.sleep(LATE_S)
        assert crew.versions == [2, 2]
        assert crew.pool.serving == [0, 1]

    play(clock, Crew(), work)


@pytest.mark.parametrize("error", [WeightsGone("gone"), DigestMismatch("another digest")])
def test_a_late_load_that_fails_is_tried_again_with_the_newest_weights(
    clock: VirtualClock, error: Exception
) -> None:
    """Its weights may be overwritten meanwhile; nobody waits who could be told."""

    async def work(crew: Crew) -> None:
        asked = loads_of(crew, error)
        await crew.publish(1)
        await crew.publish(2)
        await asyncio.sleep(3 * LATE_S)
        assert asked == [1, 2]
        assert crew.versions == [2, 2]

    play(clock, Crew(), work)


def test_when_only_a_late_engine_is_left_the_publication_waits_for_it(clock: VirtualClock) -> None:
    async def work(crew: Crew) -> None:
        await crew.publish(1)
        crew.workers[0].die()
        await crew.publish(2)
        assert crew.versions[1] == 2

    play(clock, Crew(), work)


PIPE = "PENSTOCK_TEST_PIPE"


class LateEngine(TransformersEngine):
    """The second engine loads version 1 only when the first has loaded version 3."""

    @classmethod
    def from_config(cls, config: Any, *, index: int = 0, **parts: Any) -> Any:
        made: Any = super().from_config(config, index=index, **parts)
        made.index = index
        return made

    async def update_weights(self, version: int, source: WeightHandle) -> str:
        if self.index == 1 and version == 1:  # type: ignore[attr-defined]
            await asyncio.to_thread(lambda: Path(os.environ[PIPE]).read_text())
        digest = await super().update_weights(version, source)
        if self.index == 0 and version == 3:  # type: ignore[attr-defined]
            await asyncio.to_thread(lambda: Path(os.environ[PIPE]).write_text("loaded"))
        return digest


@pytest.mark.usefixtures("warm_workers")
def test_a_run_goes_on_while_one_engine_is_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the second or third publication waited for the late engine, this run would never end."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    monkeypatch.setenv(PIPE, str(pipe))
    words = [f"engine.name={__file__}:LateEngine", "launch.kind=local", "launch.num_producers=2"]
    words += ["produce.max_staleness=1", f"run.dir={tmp_path}", "run.name=late"]
    result = CliRunner().invoke(app, ["train", *TINY, *words])
    assert result.exit_code == 0, result.output
    assert "engine-1: it is late with new weights; the others go on alone" in result.output
    assert_sound(RunFolder(tmp_path / "late"))
    audited = CliRunner().invoke(app, ["audit", str(tmp_path / "late")])
    assert audited.exit_code == 0, audited.output
    assert re.search(r"largest staleness trained: [01], allowed: 1", audited.output)
