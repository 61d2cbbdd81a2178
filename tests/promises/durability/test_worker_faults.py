"""Trainer, engines and driver are killed and stalled in pairs: nothing is lost, and the bits are the same.

A stalled worker (SIGSTOP) neither answers nor ends; the watchdog replaces it, unless it continues before.
One pair in `make test`, forty in `make test-long`; PENSTOCK_PAIRS=N and PENSTOCK_CRASH_SEED=N run others.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import pytest

from penstock.store.journal import Journal
from penstock.store.run_folder import RunFolder
from stages.ray_nodes import lone_nodes
from stages.tiny_run import (
    KILLED,
    SEED,
    CrashServer,
    assert_no_worker_is_left,
    assert_sound,
    assert_went_on,
    death,
    digests,
)

PAIRS, QUICK = int(os.environ.get("PENSTOCK_PAIRS", "40")), (0,)  # a stall and a kill
SYNC = "produce.strategy=sync"
LOCAL = ["launch.kind=local", "launch.restart_backoff_s=0", "launch.max_restarts=100", SYNC]
# a wait is stuck when the worker is idle for so long; a stopped process is idle at once
TWO_ENGINES = ["launch.num_producers=2", "watchdog.stall_s=2"]
VICTIMS = ("trainer", "engine-0", "engine-1")


@pytest.fixture(scope="module")
def whole(server: CrashServer) -> tuple[list[str], dict[str, int]]:
    """Return the digests of an undisturbed run, and how often its driver passes each point."""
    run, code = server.train("undisturbed", *LOCAL, *TWO_ENGINES)
    assert code == 0, server.output()
    assert_sound(run)
    return digests(run), server.counts()


def assert_as_if_nothing_had_happened(
    server: CrashServer, run: RunFolder, expected: list[str]
) -> None:
    assert_went_on(server, run, expected)
    journal = Journal.open(run.journal, readonly=True)
    try:
        versions = journal.query("SELECT step, policy_version FROM steps")
    finally:
        journal.close()
    assert all(step == version for step, version in versions)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_an_engine_stalls_while_the_trainer_dies_between_an_update_and_its_commit(
    server: CrashServer, whole: tuple[list[str], dict[str, int]]
) -> None:
    """The engine continues once the restored trainer serves; the update must not have vanished."""
    faults = [
        ("before step", 2, "SIGSTOP engine-0"),
        ("after step", 2, "SIGKILL trainer"),
        ("before worker return", 1, "SIGCONT engine-0"),
    ]
    run, code = server.train("vanished", *LOCAL, then=faults)
    assert code == 0, server.output()
    assert "trainer: serves again" in server.output()
    assert_as_if_nothing_had_happened(server, run, whole[0])


@pytest.mark.slow
def test_the_driver_dies_with_its_trainer_and_while_an_engine_is_stalled(
    server: CrashServer, whole: tuple[list[str], dict[str, int]]
) -> None:
    faults = [
        ("before step", 3, "SIGSTOP engine-0"),
        ("after step", 3, "SIGKILL trainer"),
        ("after step", 3, "SIGCONT engine-0"),
        ("after step", 3, "SIGKILL"),
    ]
    run, code = server.train("driver", *LOCAL, then=faults)
    assert code == KILLED
    assert_no_worker_is_left(run)
    assert server.run("resume", str(run.path)) == 0, server.output()
    assert_as_if_nothing_had_happened(server, run, whole[0])


def pair(number: int, counts: dict[str, int]) -> list[tuple[str, int, str]]:
    """Return two faults of two workers at two points of the run; at most one of the two is a stall."""
    choice = random.Random(f"pairs/{SEED}/{number}")
    signs = choice.choice([("SIGKILL", "SIGKILL"), ("SIGSTOP", "SIGKILL"), ("SIGKILL", "SIGSTOP")])
    found = []
    for sign, victim in zip(signs, choice.sample(VICTIMS, 2), strict=True):
        place = death(choice, counts)
        found.append((str(place["point"]), int(place["number"]), f"{sign} {victim}"))
    return found


@pytest.mark.parametrize(
    "number",
    [pytest.param(n, marks=[pytest.mark.slow] if n not in QUICK else []) for n in range(PAIRS)],
)
def test_any_two_faults_of_workers_leave_the_same_weights(
    number: int, server: CrashServer, whole: tuple[list[str], dict[str, int]]
) -> None:
    expected, counts = whole
    faults = pair(number, counts)
    run, code = server.train(f"pair-{number}", *LOCAL, *TWO_ENGINES, then=faults)
    assert code == 0, f"{faults}: {server.output()}"
    assert_as_if_nothing_had_happened(server, run, expected)


@pytest.fixture(scope="module")
def ray_address() -> Iterator[str]:
    pytest.importorskip("ray")
    with lone_nodes(3) as address:
        yield address


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", range(3))
def test_on_ray_any_two_faults_of_workers_leave_the_same_weights(
    number: int, server: CrashServer, whole: tuple[list[str], dict[str, int]], ray_address: str
) -> None:
    faults = [
        ("after step", 2, "SIGKILL trainer"),
        ("before step", 2, ("SIGKILL", "SIGSTOP", "SIGKILL")[number] + " engine-0"),
        ("before step", 3, ("SIGSTOP", "SIGKILL", "SIGKILL")[number] + " engine-1"),
    ]
    words = [*LOCAL, *TWO_ENGINES, "watchdog.stall_s=8", "launch.kind=ray"]
    words.append(f"launch.address={ray_address}")
    run, code = server.train(f"ray-pair-{number}", *words, then=faults)
    assert code == 0, f"{faults}: {server.output()}"
    assert_as_if_nothing_had_happened(server, run, whole[0])
