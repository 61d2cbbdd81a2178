"""A resumed run with other settings: finished steps stay the same, later ones use them."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from penstock.store.run_folder import RunFolder
from stages.tiny_run import KILLED, SEED, CrashServer, assert_sound, death, digests

CHANGES = ["train.lr=2e-3", "train.steps=5", "train.schedule=cosine"]


@pytest.fixture(scope="module")
def original(server: CrashServer) -> RunFolder:
    """Three steps are journalled, the newest checkpoint is of step 2."""
    words = ("produce.strategy=sync", "checkpoint.every_steps=1", "checkpoint.keep=3")
    run, code = server.train("changed", *words, point="after take", number=4)
    assert code == -9, server.output()
    assert len(digests(run)) == 3
    # the checkpoint of step 2 is complete; that of step 3 may or may not be
    assert (run.checkpoints / "step-2").is_dir()
    shutil.rmtree(run.checkpoints / "step-3", ignore_errors=True)
    return run


@pytest.fixture
def killed(original: RunFolder, tmp_path: Path) -> RunFolder:
    """Return a copy of that run to continue."""
    shutil.copytree(original.path, tmp_path / "run")
    return RunFolder(tmp_path / "run")


@pytest.mark.slow
def test_steps_are_redone_with_the_settings_they_had(
    server: CrashServer, killed: RunFolder
) -> None:
    before = digests(killed)
    changes = ["train.lr=2e-3", "train.steps=6", "train.schedule=cosine", "checkpoint.keep=1"]
    assert server.run("resume", str(killed.path), *changes) == 0, server.output()
    output = server.output()
    assert "changed: train.lr 0.001 -> 0.002" in output
    assert "redoing step 3 of 3 with the settings it had" in output
    assert digests(killed)[:3] == before
    assert_sound(killed, steps=6)
    assert [era.last_step for era in killed.eras()] == [3, None]
    assert killed.config().train.lr == 2e-3
    assert server.run("replay", str(killed.path)) == 0, server.output()
    assert server.run("audit", str(killed.path)) == 0, server.output()


@pytest.mark.slow
def test_a_lost_checkpoint_is_made_up_for_across_the_change(
    server: CrashServer, killed: RunFolder
) -> None:
    words = ["train.lr=2e-3", "train.steps=5", "checkpoint.every_steps=0"]
    code = server.run("resume", str(killed.path), *words, point="before step", number=3)
    assert code == -9, server.output()
    assert len(digests(killed)) == 4
    newest = killed.checkpoints / "step-3" / "consumer.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    assert server.run("resume", str(killed.path)) == 0, server.output()
    assert "step-3: consumer.safetensors is not what was written" in server.output()
    assert_sound(killed, steps=5)
    assert server.run("replay", str(killed.path)) == 0, server.output()


@pytest.fixture(scope="module")
def changed(
    server: CrashServer, original: RunFolder, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[str], dict[str, int]]:
    """Continue that run with changes, unkilled; return its digests and its passed points."""
    folder = tmp_path_factory.mktemp("changed") / "run"
    shutil.copytree(original.path, folder)
    assert server.run("resume", str(folder), *CHANGES) == 0, server.output()
    return digests(RunFolder(folder)), server.counts()


@pytest.mark.parametrize(
    "number", [0, *(pytest.param(number, marks=pytest.mark.slow) for number in range(1, 5))]
)
def test_killed_while_its_settings_change_it_goes_on_with_the_new_ones(
    server: CrashServer, killed: RunFolder, changed: tuple[list[str], dict[str, int]], number: int
) -> None:
    expected, counts = changed
    place = death(random.Random(f"{SEED}/changed/{number}"), counts)
    code = server.run("resume", str(killed.path), *CHANGES, **place)
    assert code in (KILLED, 0), server.output()
    assert server.run("resume", str(killed.path), *CHANGES) == 0, f"{place}: {server.output()}"
    assert_sound(killed, steps=5)
    assert digests(killed) == expected, place
    assert server.run("replay", str(killed.path)) == 0, server.output()


def test_a_refused_change_changes_nothing(server: CrashServer, killed: RunFolder) -> None:
    before = (killed.path / "config.toml").read_text()
    assert server.run("resume", str(killed.path), "seed=9") == 2
    assert "seed: got 9 for a run with 0, allowed: the same value" in server.output()
    assert (killed.path / "config.toml").read_text() == before


@pytest.mark.slow
def test_a_finished_run_can_be_made_longer(server: CrashServer) -> None:
    run, code = server.train("longer", "train.steps=2")
    assert code == 0
    assert server.run("resume", str(run.path), "train.steps=3") == 0, server.output()
    assert_sound(run, steps=3)
    before = (run.path / "config.toml").read_text()
    assert server.run("resume", str(run.path), "train.steps=2") == 2
    assert (
        "train.steps: got 2, allowed: at least 3, the steps that the run has done"
        in server.output()
    )
    assert (run.path / "config.toml").read_text() == before
