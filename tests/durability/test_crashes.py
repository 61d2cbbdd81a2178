"""kill -9 at any boundary, then resume to the end: nothing lost, nothing twice, the same bits.

25 crashes by default; PENSTOCK_CRASHES=100 for more. PENSTOCK_CRASH_SEED chooses others.
"""

from __future__ import annotations

import os
import random

import pytest
from rich.console import Console
from tiny_run import CrashServer, assert_sound, digests

from penstock.audit import audit_run

CRASHES = int(os.environ.get("PENSTOCK_CRASHES", "25"))
SEED = int(os.environ.get("PENSTOCK_CRASH_SEED", "0"))
KILLED = -9
STRATEGIES = ("sync", "async")


@pytest.fixture(scope="module")
def whole(server: CrashServer) -> dict[str, tuple[list[str], dict[str, int]]]:
    """Runs that were never killed: their digests, and how often each point was passed."""
    found = {}
    for strategy in STRATEGIES:
        run, code = server.train(f"whole-{strategy}", f"produce.strategy={strategy}")
        assert code == 0, server.output()
        assert_sound(run)
        assert len(set(digests(run))) > 1  # it does train
        found[strategy] = (digests(run), server.counts())
    return found


def death(choice: random.Random, counts: dict[str, int]) -> dict[str, str | int]:
    """A boundary, and which of its passings; every boundary is as likely as any other."""
    point = choice.choice(sorted(counts))
    return {"point": point, "number": choice.randint(1, counts[point])}


@pytest.mark.parametrize("number", range(CRASHES))
def test_killed_anywhere_it_goes_on_to_the_same_end(
    number: int, server: CrashServer, whole: dict[str, tuple[list[str], dict[str, int]]]
) -> None:
    choice = random.Random(f"{SEED}/{number}")
    strategy = STRATEGIES[number % 2]
    expected, counts = whole[strategy]
    place = death(choice, counts)
    run, code = server.train(f"killed-{number}", f"produce.strategy={strategy}", **place)
    assert code in (KILLED, 0), server.output()
    again = death(choice, counts) if choice.random() < 0.3 else {}
    code = server.run("resume", str(run.path), **again)
    if code == KILLED:
        code = server.run("resume", str(run.path))
    assert code == 0, f"{place}, then {again}: {server.output()}"
    assert "Traceback" not in server.output()
    assert_sound(run)
    assert audit_run(run, console=Console(quiet=True)) == 0
    if strategy == "sync":
        assert digests(run) == expected, f"{place}, then {again}"
