"""A supervised run has what every run has: kills, resume to the same bits, audit and replay, without an engine."""

from __future__ import annotations

import random

import pytest

from stages.tiny_run import KILLED, SEED, CrashServer, assert_went_on, death, digests

IMITATES = ("algorithm.name=sft",)


@pytest.fixture(scope="module")
def undisturbed(server: CrashServer) -> tuple[list[str], dict[str, int]]:
    run, code = server.train("imitates", *IMITATES)
    assert code == 0, server.output()
    return digests(run), server.counts()


@pytest.mark.parametrize(
    "number", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 8))]
)
def test_a_killed_run_ends_in_the_same_bits(
    server: CrashServer, undisturbed: tuple[list[str], dict[str, int]], number: int
) -> None:
    expected, counts = undisturbed
    choice = random.Random(1000 * SEED + number)
    run, code = server.train(f"imitates-{number}", *IMITATES, **death(choice, counts))
    assert code == KILLED, server.output()
    if run.journal.exists():
        assert server.run("resume", str(run.path)) == 0, server.output()
        assert_went_on(server, run, expected)


def test_replay_recomputes_it(
    server: CrashServer, undisturbed: tuple[list[str], dict[str, int]]
) -> None:
    assert server.run("replay", str(server.folder / "imitates")) == 0, server.output()
    assert server.output().count("  equal") == len(undisturbed[0])


def test_no_engine_is_started(server: CrashServer) -> None:
    run, code = server.train("imitates-locally", *IMITATES, "launch.kind=local")
    assert code == 0, server.output()
    assert sorted(path.stem for path in run.logs.glob("*.log")) == ["run", "trainer"]
