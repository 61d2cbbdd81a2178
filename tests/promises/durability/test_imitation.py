"""Runs that demonstrations, a teacher or a value model teach have what every run has: kills, resume to the same bits, replay."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable

import pytest

from stages.tiny_run import KILLED, SEED, CrashServer, assert_went_on, death, digests

KINDS = {
    "imitates": ("algorithm.name=sft",),
    "distils": ("algorithm.name=distill", "algorithm.teacher=big", "teachers.big.path=demo"),
    "distils-itself": (
        *("algorithm.name=distill", "algorithm.teacher=self", "teachers.self.path=policy"),
        "tasks.train.teacher_template='{prompt} = {answer}'",
    ),
    "references": ("algorithm.kl_beta=0.1", "train.reference_every=2", "train.ema_decay=0.5"),
    "adapts": (
        *("algorithm.kl_beta=0.1", "algorithm.kl_target=0.05"),
        *("algorithm.entropy_beta=0.01", "algorithm.entropy_target=2.0"),
    ),
    "values": ("algorithm.name=ppo", "sampling.num_generations=1", "train.num_epochs=2"),
}
KILLED_QUICKLY = ("distils", "values")
IN_ORDER = "produce.strategy=sync"  # else the order in which groups land decides what a step trains


Undisturbed = Callable[[str], tuple[list[str], dict[str, int]]]


@pytest.fixture(scope="module")
def undisturbed(server: CrashServer) -> Undisturbed:
    """The digests of a run of a kind, which is trained once, and how often it passes each boundary."""

    @functools.cache
    def trained(kind: str) -> tuple[list[str], dict[str, int]]:
        run, code = server.train(kind, IN_ORDER, *KINDS[kind])
        assert code == 0, server.output()
        return digests(run), server.counts()

    return trained


@pytest.mark.parametrize(
    ("kind", "number"),
    [
        pytest.param(kind, n, marks=[] if kind in KILLED_QUICKLY and n == 0 else [pytest.mark.slow])
        for kind in KINDS
        for n in range(8)
    ],
)
def test_a_killed_run_ends_in_the_same_bits(
    server: CrashServer, undisturbed: Undisturbed, kind: str, number: int
) -> None:
    expected, counts = undisturbed(kind)
    choice = random.Random(1000 * SEED + number)
    place = death(choice, counts)
    run, code = server.train(f"{kind}-{number}", IN_ORDER, *KINDS[kind], **place)
    assert code in (KILLED, 0), server.output()  # how often a journal commits depends on the time
    if run.journal.exists():
        assert server.run("resume", str(run.path)) == 0, server.output()
        assert_went_on(server, run, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_replay_recomputes_it(server: CrashServer, undisturbed: Undisturbed, kind: str) -> None:
    expected, _ = undisturbed(kind)
    assert server.run("replay", str(server.folder / kind)) == 0, server.output()
    assert server.output().count("  equal") == len(expected)


@pytest.mark.slow
def test_a_recorded_run_can_be_distilled(server: CrashServer) -> None:
    run, code = server.train("rewarded")
    assert code == 0, server.output()
    words = ("replay", str(run.path), "--algo", "distill")
    assert server.run(*words) == 2
    assert "algorithm.teacher: got ''" in server.output()
    divergence = "algorithm.divergence=jsd"
    assert server.run(*words, *KINDS["distils"][1:], divergence) == 0, server.output()


def test_no_engine_is_started(server: CrashServer) -> None:
    run, code = server.train("imitates-locally", *KINDS["imitates"], "launch.kind=local")
    assert code == 0, server.output()
    assert sorted(path.stem for path in run.logs.glob("*.log")) == ["run", "trainer"]
