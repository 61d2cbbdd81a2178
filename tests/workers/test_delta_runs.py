"""Whole runs of bfloat16 weights with `sync.kind=delta`: the bits of the default, whoever dies on the way."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from penstock.store.journal import Journal
from penstock.store.run_folder import RunFolder
from stages.ray_nodes import lone_nodes
from stages.tiny_run import STEPS, CrashServer, assert_sound, assert_went_on, digests

WORDS = [
    "launch.kind=local",
    "launch.num_producers=2",
    "launch.restart_backoff_s=0",
    "produce.strategy=sync",
    "model.dtype=bfloat16",
    "train.lr=1e-6",  # few weights change their bits
]
DELTA = "sync.kind=delta"
PLACES = [
    "launch.ray_options.consumers={label_selector={place='first'}}",
    "launch.ray_options.producers={label_selector={place='second'}}",
]
# engine-0 stands still until the other is back: the run does not end before
LATE_ENGINE = [
    ("before step", 2, "SIGKILL engine-1"),
    ("before step", 2, "SIGSTOP engine-0"),
    ("before worker return", 1, "SIGCONT engine-0"),
]


@pytest.fixture(scope="module")
def default(server: CrashServer) -> RunFolder:
    """Return a run with the default sync on this machine."""
    run, code = server.train("default-sync", *WORDS)
    assert code == 0, server.output()
    assert_sound(run)
    assert len(set(digests(run))) == STEPS  # every update changes bits
    return run


def confirmed(run: RunFolder) -> dict[int, set[str]]:
    """Return the digests that engines confirmed, by version."""
    journal = Journal.open(run.journal, readonly=True)
    try:
        rows = journal.query("SELECT version, digest FROM weights WHERE kind = 'confirmed'")
    finally:
        journal.close()
    found: dict[int, set[str]] = {}
    for version, digest in rows:
        found.setdefault(version, set()).add(digest)
    return found


def saved(run: RunFolder) -> bytes:
    return (run.checkpoints / f"step-{STEPS}" / "model" / "model.safetensors").read_bytes()


def assert_equal(server: CrashServer, run: RunFolder, default: RunFolder) -> None:
    """Assert that a run is whole, and that engines and checkpoint have the bits of the default."""
    assert_went_on(server, run, digests(default))
    assert set(confirmed(default)) == set(range(STEPS + 1))
    assert confirmed(run) == confirmed(default)
    assert saved(run) == saved(default)


@pytest.mark.slow
def test_processes_of_one_machine_get_the_same_weights(
    server: CrashServer, default: RunFolder
) -> None:
    run, code = server.train("delta", *WORDS, DELTA)
    assert code == 0, server.output()
    assert_equal(server, run, default)


@pytest.mark.slow
def test_an_engine_that_is_killed_catches_up_with_the_same_weights(
    server: CrashServer, default: RunFolder
) -> None:
    run, code = server.train("delta-killed", *WORDS, DELTA, then=LATE_ENGINE)
    assert code == 0, server.output()
    assert "engine-1: serves again" in server.output()
    assert_equal(server, run, default)


@pytest.fixture(scope="module")
def ray_address() -> Iterator[str]:
    pytest.importorskip("ray")
    with lone_nodes(1, 2) as address:
        yield address


@pytest.mark.ray
@pytest.mark.timeout(600)
def test_two_nodes_send_deltas_though_an_engine_and_a_distributor_are_killed(
    server: CrashServer, default: RunFolder, ray_address: str
) -> None:
    """The distributor that comes back holds nothing: it gets the whole weights, then deltas again."""
    words = [*WORDS, "launch.kind=ray", f"launch.address={ray_address}", *PLACES, DELTA]
    faults = [*LATE_ENGINE, ("before step", 3, "SIGKILL distributor-1")]  # that of the engines
    run, code = server.train("delta-ray", *words, then=faults)
    output = server.output()
    assert code == 0, output
    told = re.search(r"weights: the first delta was (\S+) MB of (\S+) MB", output)
    assert told is not None, output
    assert float(told[1]) < float(told[2]) / 2
    assert "engine-1: serves again" in output
    assert "distributor-1: serves again" in output
    assert_equal(server, run, default)
