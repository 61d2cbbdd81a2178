"""Workers that die are restarted: nothing is lost or trained twice, and the weights are the same."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest

from penstock.run.job import Job, open_job
from penstock.run.recover import keep_trainer_alive, recover
from penstock.store.run_folder import RunFolder
from penstock.workers.control import scale_run
from stages.disturbed_run import (
    STEPS,
    assert_balanced,
    config_of,
    digests,
    kill,
    run,
)

pytestmark = pytest.mark.usefixtures("warm_workers")

SYNC = "produce.strategy=sync"


@pytest.mark.slow
def test_killed_engine_and_trainer_and_one_more_engine_leave_no_trace_in_the_weights(
    quiet: RunFolder, tmp_path: Path
) -> None:
    async def disturb(job: Job, step: int) -> None:
        if step == 2:
            kill(job, "engine-0")
            await asyncio.to_thread(scale_run, job.folder.path, "producers=2")
        if step == 3:
            kill(job, "trainer")

    folder, notes = run(config_of(tmp_path, "killed", SYNC), disturb)
    assert digests(folder) == digests(quiet)
    assert_balanced(folder)
    text = "\n".join(notes)
    assert "engine-0: the worker ended unexpectedly" in text
    assert "engine-0: serves again" in text
    assert "trainer: serves again" in text
    assert "producers: 1 -> 2" in text


@pytest.mark.slow
@pytest.mark.parametrize("place", ["launch.colocate=false", "launch.colocate=true"])
def test_a_trainer_that_dies_before_its_first_step_is_restarted(
    place: str, quiet: RunFolder, tmp_path: Path
) -> None:
    async def disturb(job: Job, step: int) -> None:
        if step == 0:
            kill(job, "trainer")

    config = config_of(tmp_path, "early", SYNC, place)
    folder, notes = run(config, disturb)
    assert digests(folder) == digests(quiet)
    assert_balanced(folder)
    assert any("trainer: serves again" in note for note in notes)
    shutil.rmtree(folder.checkpoints / f"step-{STEPS}")

    async def resume() -> str:
        async with open_job(config, folder) as job, job.watched():
            keep_trainer_alive(job)
            job.notes.listen(notes.append)
            settle = job.checkpoints.settle

            async def die() -> None:  # it is called first when a trainer is restored
                job.checkpoints.settle = settle  # type: ignore[method-assign]
                kill(job, "trainer")

            job.checkpoints.settle = die  # type: ignore[method-assign]
            assert await recover(job) == STEPS
            return (await job.trainer.identity())[1]

    notes.clear()
    assert asyncio.run(resume()) == digests(quiet)[-1]
    assert any("trainer: serves again" in note for note in notes)


@pytest.mark.slow
def test_colocated_engines_fed_by_broadcast_leave_the_same_weights_though_one_dies(
    quiet: RunFolder, tmp_path: Path
) -> None:
    """An engine is killed while the first weights are being sent to both engines."""

    async def disturb(job: Job, step: int) -> None:
        if step == 2:
            kill(job, "engine-1")

    words = [SYNC, "sync.kind=collective", "launch.num_producers=2", "launch.colocate=true"]
    folder, notes = run(config_of(tmp_path, "broadcast", *words), disturb)
    assert digests(folder) == digests(quiet)
    assert_balanced(folder)
    assert any("engine-1: the worker ended unexpectedly" in note for note in notes)
    events = [json.loads(line) for line in (folder.path / "timeline/events.jsonl").open()]
    turns = [e for e in events if e["lane"] == "engine-0" and e["what"] in ("sleep", "wake")]
    turns.sort(key=lambda event: event["start"])
    assert [event["what"] for event in turns] == ["sleep", "wake"] * STEPS
    training = [event for event in events if event["what"] == "train"]
    for asleep, awake, step in zip(turns[::2], turns[1::2], training, strict=True):
        assert asleep["end"] <= step["start"]
        assert step["end"] <= awake["start"]
    loads = [e for e in events if e["lane"] == "engine-0" and e["what"] == "sync"]
    assert all(
        any(asleep["end"] <= load["start"] and load["end"] <= awake["start"] for load in loads)
        for asleep, awake in zip(turns[::2], turns[1::2], strict=True)
    )


@pytest.mark.slow
def test_a_colocated_trainer_that_dies_in_its_turn_leaves_the_same_weights(
    quiet: RunFolder, tmp_path: Path
) -> None:
    async def disturb(job: Job, step: int) -> None:
        if step == 2:
            release_gpu = job.engine.release_gpu

            async def released(**how: bool) -> None:
                await release_gpu(**how)
                job.engine.release_gpu = release_gpu  # type: ignore[method-assign]
                kill(job, "trainer")

            job.engine.release_gpu = released  # type: ignore[method-assign,assignment]

    config = config_of(tmp_path, "turns", SYNC, "launch.colocate=true")
    folder, notes = run(config, disturb)
    assert digests(folder) == digests(quiet)
    assert_balanced(folder)
    assert sum("trainer: serves again" in note for note in notes) == 1
    events = [json.loads(line) for line in (folder.path / "timeline/events.jsonl").open()]
    handed_over = [e["what"] for e in events if e["lane"] == "trainer" and e["what"] != "ask"]
    assert {"wake", "train", "sleep"} <= set(handed_over)
