"""A run that distils from a teacher: kills, resume to the same bits, replay."""

from __future__ import annotations

import random

import pytest

from stages.tiny_run import KILLED, SEED, CrashServer, assert_went_on, death, digests

DISTILS = (
    "algorithm.name=distill",
    "algorithm.teacher=big",
    "teachers.big.path=demo",
)


@pytest.fixture(scope="module")
def undisturbed(server: CrashServer) -> tuple[list[str], dict[str, int]]:
    run, code = server.train("distils", *DISTILS)
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
    run, code = server.train(f"distils-{number}", *DISTILS, **death(choice, counts))
    assert code == KILLED, server.output()
    if run.journal.exists():
        assert server.run("resume", str(run.path)) == 0, server.output()
        assert_went_on(server, run, expected)


def test_replay_recomputes_it_and_a_recorded_run_can_be_distilled(
    server: CrashServer, undisturbed: tuple[list[str], dict[str, int]]
) -> None:
    assert server.run("replay", str(server.folder / "distils")) == 0, server.output()
    assert server.output().count("  equal") == len(undisturbed[0])
    run, code = server.train("rewarded")
    assert code == 0, server.output()
    words = ("replay", str(run.path), "--algo", "distill")
    assert server.run(*words) == 2
    assert "algorithm.teacher: got ''" in server.output()
    assert server.run(*words, *DISTILS[1:], "algorithm.divergence=jsd") == 0, server.output()
