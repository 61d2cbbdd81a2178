"""kill -9 of the driver at any boundary, then resume to the end: no group is lost or trained twice,
and the bits are the same.

25 crashes, in one process, in workers of this machine and on a Ray cluster, two of them in `make test`;
PENSTOCK_CRASHES=100 for more in the same shares. PENSTOCK_CRASH_SEED chooses others.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

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

CRASHES, QUICK = int(os.environ.get("PENSTOCK_CRASHES", "25")), (2, 3)  # inline, local


@dataclass(frozen=True)
class Kind:
    """How a run is launched and how it produces."""

    launch: str
    strategy: str

    @classmethod
    def of(cls, number: int) -> Kind:
        """Return a kind by number: of 25, 13 are inline, 9 local, 3 on Ray; every other one is sync."""
        place = number % 25
        launch = "ray" if place % 9 == 4 else "local" if place % 3 == 0 else "inline"
        return cls(launch, ("sync", "async")[number % 2])

    def words(self) -> list[str]:
        engines = 2 if self.launch == "local" else 1
        return [
            f"launch.kind={self.launch}",
            f"launch.num_producers={engines}",
            f"produce.strategy={self.strategy}",
        ]

    def words_after(self, number: int) -> list[str]:
        """Return the settings to resume with: one run in three moves to a single process."""
        return ["launch.kind=inline"] if self.launch == "ray" and number % 25 == 22 else []


class Whole:
    """Runs that were never killed; each is made at its first use."""

    def __init__(self, server: CrashServer) -> None:
        self._server = server
        self._runs: dict[Kind, tuple[RunFolder, dict[str, int]]] = {}

    def counts(self, kind: Kind) -> dict[str, int]:
        """Return how often a driver passes each point; Ray's counts are those of local workers."""
        return self._run("inline" if kind.launch == "inline" else "local", kind.strategy)[1]

    def digests(self) -> list[str]:
        """Return the digests of a sync run; they are the same for every launcher."""
        return digests(self._run("inline", "sync")[0])

    def _run(self, launch: str, strategy: str) -> tuple[RunFolder, dict[str, int]]:
        kind = Kind(launch, strategy)
        if kind not in self._runs:
            run, code = self._server.train(f"whole-{launch}-{strategy}", *kind.words())
            assert code == 0, self._server.output()
            assert_sound(run)
            assert len(set(digests(run))) > 1  # the weights do change
            self._runs[kind] = (run, self._server.counts())
        return self._runs[kind]


@pytest.fixture(scope="module")
def whole(server: CrashServer) -> Whole:
    return Whole(server)


@pytest.fixture(scope="module")
def ray_address() -> Iterator[str]:
    """Return a cluster with room for one run: what a dead driver kept would block the next run."""
    pytest.importorskip("ray")
    with lone_nodes(2) as address:
        yield address


def crash_marks(number: int) -> list[pytest.MarkDecorator]:
    if Kind.of(number).launch != "ray":
        return [] if number in QUICK else [pytest.mark.slow]
    return [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(n, id=f"{n}-{Kind.of(n).launch}-{Kind.of(n).strategy}", marks=crash_marks(n))
        for n in range(CRASHES)
    ],
)
def test_killed_anywhere_it_goes_on_to_the_same_end(
    number: int, server: CrashServer, whole: Whole, request: pytest.FixtureRequest
) -> None:
    choice, kind = random.Random(f"{SEED}/{number}"), Kind.of(number)
    words, counts = kind.words(), whole.counts(kind)
    if kind.launch == "ray":
        words.append(f"launch.address={request.getfixturevalue('ray_address')}")
    place = death(choice, counts)
    run, code = server.train(f"killed-{number}", *words, **place)
    assert code in (KILLED, 0), server.output()
    assert_no_worker_is_left(run)
    twice = kind.launch != "ray" and choice.random() < 0.3  # starting actors takes long
    again = death(choice, counts) if twice else {}
    code = server.run("resume", str(run.path), *kind.words_after(number), **again)
    if code == KILLED:
        assert_no_worker_is_left(run)
        code = server.run("resume", str(run.path))
    assert code == 0, f"{place}, then {again}: {server.output()}"
    assert_went_on(server, run, whole.digests() if kind.strategy == "sync" else None)
    if kind.launch == "local":
        assert not server.folders_left()  # the next driver has removed what a killed driver left
