"""Runs on a GPU: weights that stay there, and trainer and engines that take turns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.job import Job
from penstock.run_folder import RunFolder
from penstock.types import WeightHandle
from stages.disturbed_run import STEPS, assert_balanced, config_of, kill, run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def handles_of(job: Job, seen: list[WeightHandle]) -> None:
    """Record the handles that engines are given."""
    update = job.engine.update_weights

    async def noted(version: int, source: WeightHandle) -> str:
        seen.append(source)
        return await update(version, source)

    job.engine.update_weights = noted  # type: ignore[method-assign]


def run_with_kills(
    tmp_path: Path, name: str, kills: dict[int, str], *words: str
) -> tuple[RunFolder, list[str], list[WeightHandle]]:
    """Run and kill workers before these steps; return the folder, notes and handles."""
    seen: list[WeightHandle] = []

    async def disturb(job: Job, step: int) -> None:
        if step == 1:
            handles_of(job, seen)
        if step in kills:
            kill(job, kills[step])

    folder, notes = run(config_of(tmp_path, name, *words), disturb)
    assert_balanced(folder)
    return folder, notes, seen


def on_device(handle: WeightHandle) -> bool:
    location: dict[str, Any] = handle.location
    return location["device"] is not None


@pytest.mark.parametrize("strategy", ["sync", "async"])
def test_weights_stay_on_the_gpu_though_trainer_and_engine_die(
    tmp_path: Path, strategy: str
) -> None:
    kills = {2: "engine-0", 3: "trainer"}
    word = f"produce.strategy={strategy}"
    _, notes, seen = run_with_kills(tmp_path, strategy, kills, word)
    assert len(seen) >= STEPS
    assert all(map(on_device, seen))
    text = "\n".join(notes)
    assert "engine-0: serves again" in text
    assert "trainer: serves again" in text


def test_colocated_they_take_turns_and_a_dead_engine_comes_back_in_its_own(tmp_path: Path) -> None:
    words = ["produce.strategy=sync", "launch.colocate=true"]
    folder, _, seen = run_with_kills(tmp_path, "turns", {2: "engine-0"}, *words)
    assert not any(map(on_device, seen))  # only one side at a time uses the device's memory
    events = [json.loads(line) for line in (folder.path / "timeline/events.jsonl").open()]
    assert {"sleep", "wake"} <= {event["what"] for event in events}
