"""Rules of XTuner's produce strategies, each at work in a run of `penstock train`."""

from __future__ import annotations

from pathlib import Path

import pytest

from stages.command_runs import CommandRun, penstock, train
from stages.held_engine import DEAF_ENGINE, HELD_ENGINE
from stages.tiny_run import GROUPS, STEPS

RULES = """
from pathlib import Path

def keep(rollouts, **_):
    group = rollouts[0].rollout_id.split(".")[0]
    states = sorted({one.status.name for one in rollouts})
    with open(Path(__file__).with_name("asked.txt"), "a") as file:
        file.write(group + " " + " ".join(states) + "\\n")
    return group != "train:1"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("strategies")


@pytest.fixture(scope="module")
def chosen(folder: Path) -> CommandRun:
    """A sync run whose rule refuses the second group."""
    (folder / "rules.py").write_text(RULES)
    rule = f"produce.is_valid_sample={folder / 'rules.py'}:keep"
    return train(folder, "chosen", "produce.strategy=sync", rule)


@pytest.fixture(scope="module")
def ahead(folder: Path) -> CommandRun:
    """An asynchronous run that asks for twice its batch; the engine holds every second group."""
    return train(
        folder,
        "ahead",
        f"engine.name={HELD_ENGINE}",
        "checkpoint.every_steps=0",
        "produce.max_staleness=0",
        "produce.over_sample_threshold=1.0",
        "produce.tail_batch_trigger_size=2",
    )


def batches(run: CommandRun) -> list[list[str]]:
    with run.journal() as journal:
        return [
            [group.group_id for group in journal.batch(step).groups] for step in range(1, STEPS + 1)
        ]


def test_sync_makes_exactly_its_batch_and_refills_what_was_refused(chosen: CommandRun) -> None:
    assert chosen.code == 0, chosen.told
    numbers = [0, *range(2, STEPS * GROUPS + 1)]  # group 1 was refused, one more was drawn
    assert [one for batch in batches(chosen) for one in batch] == [f"train:{n}" for n in numbers]
    assert chosen.query("SELECT COUNT(*) FROM groups") == [(STEPS * GROUPS + 1,)]


def test_validity_is_asked_once_of_each_completed_group(chosen: CommandRun, folder: Path) -> None:
    asked = (folder / "asked.txt").read_text().splitlines()
    groups = [line.split()[0] for line in asked]
    assert sorted(groups) == sorted(f"train:{number}" for number in range(STEPS * GROUPS + 1))
    assert {line.split(maxsplit=1)[1] for line in asked} == {"COMPLETED"}


def test_over_sampling_fills_a_batch_past_groups_that_are_slow(ahead: CommandRun) -> None:
    assert ahead.code == 0, ahead.told
    assert batches(ahead)[0] == ["train:0", "train:2"]  # four were asked for, 1 and 3 are held


def test_a_tail_batch_takes_expired_groups_before_new_ones(ahead: CommandRun) -> None:
    """Batch 3, or batch 2 if they land before it is planned."""
    assert ["train:1", "train:3"] in batches(ahead)[1:3]
    assert ahead.query("SELECT COUNT(*) FROM groups WHERE state = 'trained' AND tries > 1") >= [
        (2,)
    ]


def test_a_pause_that_takes_too_long_loses_nothing(folder: Path) -> None:
    """The engine ignores aborts, so each pause ends at its time-out."""
    run = train(
        folder,
        "patience",
        f"engine.name={DEAF_ENGINE}",
        "checkpoint.every_steps=0",
        "produce.max_staleness=1",
        "sync.on_update=abort",
        "produce.pause_timeout_s=0.2",
    )
    assert run.code == 0, run.told
    assert run.total("tasks/train/pause_timeouts") >= 1
    assert len(run.metrics) == STEPS
    assert penstock("audit", str(run.folder.path)) == 0
