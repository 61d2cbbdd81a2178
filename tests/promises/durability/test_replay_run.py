"""A run is recomputed bit for bit from its journal; forks train on its rollouts without an engine."""

from __future__ import annotations

import json
import shutil
import sqlite3
from pathlib import Path

import pytest

from penstock.store.journal import Journal
from penstock.store.run_folder import RunFolder
from stages.tiny_run import STEPS, SUMS, CrashServer, assert_sound, digests


@pytest.fixture(scope="module")
def parent(server: CrashServer) -> RunFolder:
    run, code = server.train("parent", "produce.max_staleness=1")
    assert code == 0, server.output()
    return run


def equal_steps(output: str) -> int:
    return sum(line.endswith("equal") for line in output.splitlines())


@pytest.mark.parametrize("steps", [10, pytest.param(50, marks=pytest.mark.slow)])
def test_asynchronous_steps_compute_again_bit_for_bit(server: CrashServer, steps: int) -> None:
    words = (f"train.steps={steps}", "produce.max_staleness=2")
    run, code = server.train(f"long-{steps}", *words)
    assert code == 0, server.output()
    assert max(json.loads(line)["staleness/max"] for line in run.metrics.open()) > 0
    assert server.run("replay", str(run.path)) == 0, server.output()
    assert equal_steps(server.output()) == steps


def test_replay_stops_where_it_is_told(server: CrashServer, parent: RunFolder) -> None:
    assert server.run("replay", str(parent.path), "--to", "2") == 0
    assert equal_steps(server.output()) == 2
    assert server.run("replay", str(parent.path), "--to", "9") == 2
    assert f"--to: got 9, allowed: 1 to {STEPS}" in server.output()


@pytest.fixture
def copied(parent: RunFolder, tmp_path: Path) -> RunFolder:
    """Return a copy of the parent to change."""
    return RunFolder(shutil.copytree(parent.path, tmp_path / "run"))


def test_a_difference_is_named_by_its_step(server: CrashServer, copied: RunFolder) -> None:
    run = copied
    with sqlite3.connect(run.journal) as database:
        database.execute("UPDATE step_rows SET digest = 'leaves-f00d' WHERE step = 2")
    assert server.run("replay", str(run.path)) == 1
    assert equal_steps(server.output()) == 1
    (line,) = [line for line in server.output().splitlines() if line.startswith("error:")]
    assert line.startswith("error: step 2: ")
    assert "leaves-f00d" in line


def test_a_run_with_digests_of_another_form_is_refused_in_one_line(
    server: CrashServer, copied: RunFolder
) -> None:
    run = copied
    with sqlite3.connect(run.journal) as database:
        database.execute("UPDATE step_rows SET digest = '0123456789abcdef'")
    assert server.run("replay", str(run.path)) == 2, server.output()
    assert "got weights with digests of an older form (0123456789abcdef)" in server.output()


def fork(server: CrashServer, parent: RunFolder, name: str, *words: str, **death) -> RunFolder:
    code = server.run("replay", str(parent.path), f"run.name={name}", *words, **death)
    assert code == (-9 if death else 0), server.output()
    return RunFolder(server.folder / name)


def test_a_fork_with_the_same_settings_is_the_same_run(
    server: CrashServer, parent: RunFolder
) -> None:
    same = fork(server, parent, "same", "algorithm.correction.kind=none")
    assert digests(same) == digests(parent)
    assert_sound(same)


@pytest.mark.slow
def test_a_fork_with_another_algorithm_stands_on_its_own(
    server: CrashServer, parent: RunFolder
) -> None:
    other = fork(server, parent, "other", "--algo", "rloo", "train.lr=5e-4")
    assert_sound(other)
    assert digests(other)[0] != digests(parent)[0]
    config = other.config()
    kind = config.algorithm.correction.kind
    assert (config.algorithm.name, kind) == ("rloo", "sequence_truncate")  # its own
    origin = json.loads((other.path / "origin.json").read_text())
    assert (Path(origin["run"]), origin["steps"]) == (parent.path.resolve(), STEPS)
    assert server.run("replay", str(other.path)) == 0, server.output()
    assert equal_steps(server.output()) == STEPS
    assert server.run("report", str(other.path)) == 0, server.output()
    assert server.run("audit", str(other.path)) == 0, server.output()
    assert recorded_versions(other) == recorded_versions(parent)


def recorded_versions(run: RunFolder) -> set[tuple]:
    """Return the journal's records of the weights that the rollouts were sampled from."""
    journal = Journal.open(run.journal, readonly=True)
    try:
        return set(journal.query("SELECT kind, version, digest FROM weights"))
    finally:
        journal.close()


@pytest.mark.parametrize(
    "point",
    [
        "before step",
        pytest.param("after journal record", marks=pytest.mark.slow),
        pytest.param("after sync to disk", marks=pytest.mark.slow),
    ],
)
def test_a_killed_fork_goes_on_without_an_engine(
    server: CrashServer, parent: RunFolder, point: str
) -> None:
    name = f"killed-fork-{point.replace(' ', '-')}"
    killed = fork(server, parent, name, "algorithm.correction.kind=none", point=point, number=3)
    assert server.run("resume", str(killed.path)) == 0, server.output()
    assert_sound(killed)
    assert digests(killed) == digests(parent)


def test_a_fork_whose_parent_was_replaced_does_not_go_on(
    server: CrashServer, copied: RunFolder
) -> None:
    """A run that was removed and trained again has its name, and other rollouts."""
    words = ("run.dir=" + str(server.folder), "algorithm.correction.kind=none")
    killed = fork(server, copied, "orphan", *words, point="before step", number=3)
    shutil.rmtree(copied.path)
    other, code = server.train("replaced", "seed=7")
    assert code == 0, server.output()
    shutil.copytree(other.path, copied.path)
    assert server.run("resume", str(killed.path)) == 1, server.output()
    assert "got another run there than the one that was forked" in server.output()
    assert "Traceback" not in server.output()


def test_a_fork_that_was_killed_while_it_copied_the_weights_records_copies_the_rest(
    server: CrashServer, parent: RunFolder
) -> None:
    """The records of a long run are committed in parts."""
    killed = fork(server, parent, "half-copied", "train.lr=5e-4", point="before step", number=1)
    with sqlite3.connect(killed.journal) as database:  # as a kill between two parts leaves them
        database.execute("DELETE FROM weight_rows WHERE number > 3")
    assert server.run("resume", str(killed.path)) == 0, server.output()
    assert server.run("audit", str(killed.path)) == 0, server.output()
    assert recorded_versions(killed) == recorded_versions(parent)


def test_a_fork_of_a_run_that_keeps_its_best_checkpoint_keeps_no_more_than_others(
    server: CrashServer,
) -> None:
    evaluated = (f"eval.tasks={{a={{data='{SUMS}'}}}}", "eval.max_problems=2", "eval.every_steps=1")
    best, code = server.train("best", *evaluated, "checkpoint.keep_best=a/reward", "checkpoint.keep=1")  # fmt: skip
    assert code == 0, server.output()
    forked = fork(server, best, "of-best", "algorithm.correction.kind=none")
    assert digests(forked) == digests(best)
    assert [path.name for path in forked.checkpoints.iterdir()] == [f"step-{STEPS}"]


def test_smaller_batches_make_more_steps_of_the_same_rollouts(
    server: CrashServer, parent: RunFolder
) -> None:
    halves = fork(server, parent, "halves", "train.groups_per_step=1", "train.steps=3")
    assert_sound(halves, steps=3, groups=1)


def test_a_fork_refuses_another_model(server: CrashServer, parent: RunFolder) -> None:
    assert server.run("replay", str(parent.path), "model.dtype=bfloat16") == 2
    assert "whose tokens are recorded" in server.output()
