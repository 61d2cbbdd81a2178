"""Redo compares digests: a difference stops the run if the device repeats bits, else it is noted."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from penstock.config.source import load_config
from penstock.errors import DigestMismatch, JournalDamaged, UserError
from penstock.inspection.findings.live import LiveFindings
from penstock.inspection.laws import chain_faults, redone_versions
from penstock.inspection.track.logs import last_logged_step, read_metrics, restore_metrics
from penstock.rollout.evaluation.evaluate import SUMMARY, restore_summaries
from penstock.run.recover import keep_trainer_alive, redo, save_at_stop
from penstock.store.checkpoint import CheckpointStore
from penstock.store.journal import Journal
from penstock.store.run_folder import RunFolder
from penstock.types import (
    Arithmetic,
    Batch,
    Group,
    Rollout,
    Status,
    StepReport,
    VersionSegment,
)
from penstock.workers.supervise.trainer import TrainerClient
from stages.rollouts import make_prompt


class Trainer:
    """Gives each step a digest: the journalled one, or another from step 2 on."""

    def __init__(self, *, exact: bool, differs: bool, device: str = "cpu") -> None:
        self._exact, self._differs = exact, differs
        self._arithmetic = Arithmetic(device=device, libraries={"torch": "2.11.0"})

    async def is_exact(self) -> bool:
        return self._exact

    async def train(self, batch: Batch) -> StepReport:
        other = "-other" if self._differs and batch.step >= 2 else ""
        return StepReport(
            step=batch.step,
            policy_version=batch.step,
            digest=f"d{batch.step}{other}",
            arithmetic=self._arithmetic,
        )


@pytest.fixture(params=["cpu"])
def journal(tmp_path: Path, request: pytest.FixtureRequest):
    """Three steps, all trained on one device, or each on its own."""
    devices = 3 * [request.param] if isinstance(request.param, str) else request.param
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
            trained = Batch(step=step, groups=(group,)).fingerprints()
            digest, metrics = f"d{step}", {"m": 1}
            report = StepReport(
                step=step,
                policy_version=step,
                digest=digest,
                metrics=metrics,
                trained=trained,
                arithmetic=Arithmetic(device=devices[step - 1], libraries={"torch": "2.11.0"}),
            )
            await journal.commit_step(report)

    asyncio.run(three_steps())
    yield journal
    journal.close()


def redone(
    journal: Journal, trainer: Trainer, notes: list[str], *, first: int = 1, **options: bool
) -> list[str]:
    async def run() -> list[str]:
        steps = redo(trainer, journal, first, 3, notes.append, **options)  # type: ignore[arg-type]
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


H200, A100 = "NVIDIA H200", "NVIDIA A100"


@pytest.mark.parametrize("journal", [H200], indirect=True)
def test_a_gpu_that_repeats_bits_stops_at_a_difference_like_a_cpu(journal: Journal) -> None:
    with pytest.raises(DigestMismatch, match="or a damaged journal"):
        redone(journal, Trainer(exact=True, differs=True, device=H200), [])


@pytest.mark.parametrize("journal", [H200], indirect=True)
def test_on_another_kind_of_gpu_the_redone_digest_takes_its_place_with_a_note(
    journal: Journal,
) -> None:
    notes: list[str] = []
    redone(journal, Trainer(exact=True, differs=True, device=A100), notes)
    assert notes == [
        "step 2 redone, with other bits: the run was made on NVIDIA H200 (torch 2.11.0), this is "
        "NVIDIA A100 (torch 2.11.0); continuing"
    ]
    assert [arithmetic.device for arithmetic in journal.arithmetic_since(1)] == [H200, A100]
    assert [arithmetic.device for arithmetic in journal.arithmetic_since(2)] == [A100]


@pytest.mark.parametrize("journal", [H200], indirect=True)
def test_a_redo_that_was_killed_on_another_kind_of_gpu_goes_on_there(journal: Journal) -> None:
    async def killed_after_step_2() -> None:
        trainer = Trainer(exact=True, differs=True, device=A100)
        async for report in redo(trainer, journal, 2, 3, lambda text: None):  # type: ignore[arg-type]
            if report.step == 2:
                return

    asyncio.run(killed_after_step_2())
    assert [report.digest for report in journal.steps()] == ["d1", "d2-other", "d3"]
    redone(journal, Trainer(exact=True, differs=True, device=A100), [], first=2)
    assert [report.digest for report in journal.steps()] == ["d1", "d2-other", "d3-other"]


@pytest.mark.parametrize("device", ["cpu", A100])
@pytest.mark.parametrize("journal", [(H200, H200, A100)], indirect=True)
def test_a_replay_elsewhere_names_the_device_that_the_step_was_made_on(
    journal: Journal, device: str
) -> None:
    with pytest.raises(
        DigestMismatch, match=r"made on NVIDIA H200 \(torch 2.11.0\), this is"
    ) as error:
        redone(journal, Trainer(exact=True, differs=True, device=device), [], repair=False)
    assert "damaged" not in str(error.value)


def publish(journal: Journal, *versions: int, again: str = "") -> None:
    for version in versions:
        journal.record_published(version, f"d{version}{again}")
        journal.record_confirmed("engine", version, f"d{version}{again}")


REDONE = [
    "weights 2: redone after a crash, with other bits (d2 and d2-other)",
    "weights 3: redone after a crash, with other bits (d3 and d3-other)",
]


def test_after_a_resume_the_audit_lists_every_redone_version_and_balances(journal: Journal) -> None:
    """All steps after the checkpoint are redone, but only the last is published again."""
    publish(journal, 0, 1, 2, 3)
    redone(journal, Trainer(exact=False, differs=True), [])
    publish(journal, 3, again="-other")
    assert chain_faults(journal) == []
    assert redone_versions(journal) == REDONE


def test_a_trainer_restored_inside_a_live_run_has_its_redone_versions_listed(
    journal: Journal, tmp_path: Path
) -> None:
    """Nothing is published again: the engines keep what they have until the next step."""
    publish(journal, 0, 1, 2, 3)
    restores: list[Callable[[TrainerClient], Awaitable[None]]] = []
    job = SimpleNamespace(
        journal=journal,
        checkpoints=CheckpointStore(tmp_path / "checkpoints"),
        tracker=SimpleNamespace(note=lambda text: None),
        trainer=SimpleNamespace(restart_with=restores.append),
        status=SimpleNamespace(activity="training step 4", doing=lambda activity: None),
    )
    keep_trainer_alive(job)  # type: ignore[arg-type]
    asyncio.run(restores[0](Trainer(exact=False, differs=True)))  # type: ignore[arg-type]
    assert chain_faults(journal) == []
    assert redone_versions(journal) == REDONE


def test_a_redo_of_other_groups_than_the_trainer_recorded_is_damage(journal: Journal) -> None:
    class OtherGroups(Trainer):
        async def train(self, batch: Batch) -> StepReport:
            return replace(await super().train(batch), trained=(("t:9", "1-other"),))

    with pytest.raises(JournalDamaged, match="the groups of step 1 are not those"):
        redone(journal, OtherGroups(exact=True, differs=False), [])


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


def peak_of_reading(folder: RunFolder, steps: int) -> int:
    """Most bytes in use while a resume reads the metrics of a run with so many steps."""
    rows = (
        {"step": step, **{f"metric/{n}": step / 7 + n for n in range(60)}}
        for step in range(1, steps + 1)
    )
    folder.path.mkdir()
    folder.metrics.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    config = load_config(None, []).config
    tracemalloc.start()
    try:
        last_logged_step(folder.metrics)
        restore_metrics(folder.metrics, steps, lambda step: {})
        LiveFindings(folder, config, 2 * steps).start(steps, {})
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.slow
def test_the_memory_of_a_resume_does_not_grow_with_the_steps_behind_it(tmp_path: Path) -> None:
    """Read as a whole, the metrics of a step were 8 KiB of the driver for as long as it lived."""
    short, long = (peak_of_reading(RunFolder(tmp_path / str(n)), n) for n in (700, 1900))
    assert (long - short) / 1200 < 300  # bytes a step: where its line begins
    assert list(read_metrics(tmp_path / "1900" / "metrics.jsonl")) == list(range(1, 1901))


def test_a_redo_reads_the_reports_of_its_own_steps(journal: Journal) -> None:
    assert [report.step for report in journal.steps(2)] == [2, 3]
    assert [report.step for report in journal.steps(2, 2)] == [2]
    assert journal.steps(4, 3) == []
