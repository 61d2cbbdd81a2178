"""Redo compares digests: a difference stops the run if the device repeats bits, else it is noted."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest

from penstock.checkpoint import CheckpointStore
from penstock.errors import DigestMismatch, UserError
from penstock.evaluation.evaluate import SUMMARY, restore_summaries
from penstock.journal import Journal
from penstock.recover import redo, save_at_stop
from penstock.run_folder import RunFolder
from penstock.types import Batch, Group, Rollout, Status, StepReport, VersionSegment
from stages.rollouts import make_prompt


class Trainer:
    """Gives each step a digest: the journalled one, or another from step 2 on."""

    def __init__(self, *, exact: bool, differs: bool) -> None:
        self._exact, self._differs = exact, differs

    async def is_exact(self) -> bool:
        return self._exact

    async def train(self, batch: Batch) -> StepReport:
        other = "-other" if self._differs and batch.step >= 2 else ""
        return StepReport(
            step=batch.step, policy_version=batch.step, digest=f"d{batch.step}{other}"
        )


@pytest.fixture
def journal(tmp_path: Path):
    journal = Journal.open(tmp_path / "journal.db", threaded=False)

    async def three_steps() -> None:
        for step in (1, 2, 3):
            prompt = make_prompt(step)
            rollout = Rollout(rollout_id=f"t:{step}.0", prompt_ids=prompt.token_ids, seed=0)
            rollout.append(np.arange(2), np.zeros(2), (VersionSegment(step - 1, 2),))
            rollout.move_to(Status.COMPLETED)
            group = Group(
                group_id=f"t:{step}", task="t", cursor=step, prompt=prompt, rollouts=[rollout]
            )
            journal.drawn(group)
            await journal.landed(group)
            await journal.begin_step(step, [group])
            report = StepReport(step=step, policy_version=step, digest=f"d{step}", metrics={"m": 1})
            await journal.commit_step(report)

    asyncio.run(three_steps())
    yield journal
    journal.close()


def redone(journal: Journal, trainer: Trainer, notes: list[str], **options: bool) -> list[str]:
    async def run() -> list[str]:
        steps = redo(trainer, journal, 1, 3, notes.append, **options)  # type: ignore[arg-type]
        return [report.digest async for report in steps]

    return asyncio.run(run())


class StoppedTrainer:
    """A trainer that has done a given number of updates."""

    def __init__(self, updates: int) -> None:
        self._updates = updates

    async def identity(self) -> tuple[int, str]:
        return self._updates, f"d{self._updates}"

    async def snapshot(self, folder: str) -> tuple[int, str]:
        return await self.identity()

    async def write_snapshot(self) -> None: ...


@pytest.mark.parametrize(("updates", "kept"), [(3, ["step-3"]), (4, [])])
def test_a_stop_keeps_no_state_that_the_journal_does_not_know(
    journal: Journal, tmp_path: Path, updates: int, kept: list[str]
) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    trainer = StoppedTrainer(updates)
    assert asyncio.run(save_at_stop(store, trainer, journal)) is bool(kept)  # type: ignore[arg-type]
    assert [path.name for path in tmp_path.glob("checkpoints/*")] == kept


def test_equal_steps_pass(journal: Journal) -> None:
    assert redone(journal, Trainer(exact=True, differs=False), []) == ["d1", "d2", "d3"]


def test_a_difference_stops_where_bits_repeat(journal: Journal) -> None:
    with pytest.raises(DigestMismatch, match="step 2: redone weights have digest d2-other"):
        redone(journal, Trainer(exact=True, differs=True), [])
    assert [report.digest for report in journal.steps()] == ["d1", "d2", "d3"]


def test_where_bits_do_not_repeat_the_redone_digest_takes_its_place(journal: Journal) -> None:
    notes: list[str] = []
    redone(journal, Trainer(exact=False, differs=True), notes)
    assert [report.digest for report in journal.steps()] == ["d1", "d2-other", "d3-other"]
    assert journal.steps()[1].metrics == {"m": 1}
    assert len(notes) == 1
    assert "step 2" in notes[0]


def test_a_check_never_repairs(journal: Journal) -> None:
    with pytest.raises(DigestMismatch):
        redone(journal, Trainer(exact=False, differs=True), [], repair=False)
    assert [report.digest for report in journal.steps()] == ["d1", "d2", "d3"]


def test_a_run_is_written_by_one_process(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with folder.lock(), pytest.raises(UserError, match="is being trained by process"):
        with folder.lock():
            raise AssertionError("two hold the lock")
    with folder.lock():
        pass


def test_evaluations_of_lost_steps_and_a_torn_line_are_cut(tmp_path: Path) -> None:
    whole = [{"task": "a", "step": step, "accuracy": 0.5} for step in (0, 2, 4)]
    lines = [json.dumps(line) for line in whole]
    (tmp_path / SUMMARY).write_text("\n".join(lines) + '\n{"task": "a", "st')
    restore_summaries(tmp_path, 2)
    kept = [json.loads(line) for line in (tmp_path / SUMMARY).read_text().splitlines()]
    assert kept == whole[:2]
