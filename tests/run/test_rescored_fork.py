"""A fork with other rewards: its scores are a file of its folder, which may be lost."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from penstock.run.replay import make_fork
from penstock.store.run_folder import RESCORED, RunFolder
from stages.command_runs import penstock
from stages.made_run import make_run
from stages.tiny_run import CrashServer, digests

FORKED = ("run.name=rescored", "tasks.train.rewards=[{type='soft_overlong'}]")


@pytest.fixture(scope="module")
def whole(server: CrashServer) -> RunFolder:
    """A fork that trained to its end."""
    run, code = server.train("rescored-parent")
    assert code == 0, server.output()
    assert server.run("replay", str(run.path), *FORKED) == 0, server.output()
    return RunFolder(run.path.with_name("rescored"))


@pytest.fixture
def killed(whole: RunFolder, tmp_path: Path) -> RunFolder:
    """The same fork, killed before its first step."""
    copy = RunFolder(tmp_path / "killed")
    copy.path.mkdir()
    for name in ("config.toml", "origin.json", RESCORED):
        shutil.copy(whole.path / name, copy.path / name)
    return copy


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda path: path.unlink(), "got the scores of 0 rollouts, allowed: all 16"),
        (lambda path: path.write_text("{}\n"), f"{RESCORED}: it is damaged"),
    ],
)
def test_a_fork_does_not_train_without_its_scores(
    killed: RunFolder, damage: object, told: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert callable(damage)
    damage(killed.path / RESCORED)
    assert penstock("resume", str(killed.path)) == 1
    said = capfd.readouterr().err
    assert told in said
    assert "Traceback" not in said


def test_a_damaged_origin_is_one_line(killed: RunFolder, capfd: pytest.CaptureFixture[str]) -> None:
    (killed.path / "origin.json").write_text("{")
    assert penstock("resume", str(killed.path)) == 1
    assert "its origin.json is damaged; fork the run again" in capfd.readouterr().err


def test_a_fork_without_its_origin_does_not_begin_to_generate(
    whole: RunFolder, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(whole.path, tmp_path / "copy")
    (copy / "origin.json").unlink()
    assert penstock("resume", str(copy), "train.steps=8") == 1
    assert "its origin.json is missing; fork again: penstock replay " in capfd.readouterr().err


def test_a_backup_has_the_scores(server: CrashServer, whole: RunFolder, tmp_path: Path) -> None:
    killed = {"point": "before step", "number": 2}
    words = ("run.name=rescored-half", *FORKED[1:])
    parent = whole.path.with_name("rescored-parent")
    assert server.run("replay", str(parent), *words, **killed) == -9
    assert penstock("backup", str(parent.with_name("rescored-half")), str(tmp_path / "copy")) == 0
    assert server.run("resume", str(tmp_path / "copy")) == 0, server.output()
    assert digests(RunFolder(tmp_path / "copy")) == digests(whole)


def test_the_name_of_a_further_fork_ends_with_its_number(tmp_path: Path) -> None:
    run = make_run(tmp_path / "qwen2.5", steps=2, groups_per_step=2)
    overrides = ["train.groups_per_step=2"]
    names = [make_fork(run, "rloo", overrides, to_step=None).name for _ in range(3)]
    assert names == ["qwen2.5-rloo", "qwen2.5-rloo-2", "qwen2.5-rloo-3"]
