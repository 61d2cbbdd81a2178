"""Runs on a GPU: a real model, faults of the device, weights that stay there, trainer and engines that
take turns.

PENSTOCK_GPU_MODEL names the folder of a real checkpoint, such as `benchmarks/smollm2.py` writes; without
it the demo policy is trained.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.config.demo import resolve_model_path
from penstock.inspection.audit import audit_run
from penstock.model.loading import load_causal_lm
from penstock.run.job import Job
from penstock.store.journal import Journal
from penstock.store.run_folder import RunFolder
from penstock.types import WeightHandle
from penstock.weights.model_weights import model_digest
from stages.disturbed_run import SMALL, STEPS, assert_balanced, config_of, kill, run
from stages.faulty_engine import plan

pytestmark = pytest.mark.gpu
LONG_PROMPTS = (  # a real tokenizer needs more than the demo's
    "tasks.train.max_prompt_tokens=64",
    "eval.tasks.heldout.max_prompt_tokens=64",
)


def test_a_model_on_a_gpu_has_the_bits_of_its_file() -> None:
    path, how = resolve_model_path("demo"), {"dtype": torch.bfloat16, "trust_remote_code": False}
    there = load_causal_lm(path, device=torch.device("cuda", 0), **how)
    here = load_causal_lm(path, device=torch.device("cpu"), **how)
    assert {one.device.type for one in (*there.parameters(), *there.buffers())} == {"cuda"}
    assert model_digest(there) == model_digest(here)
    for moved, buffer in zip(there.buffers(), here.buffers(), strict=True):
        torch.testing.assert_close(moved.cpu(), buffer)


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


def penstock(*words: str) -> tuple[int, str]:
    """Run a command as a user does; return its exit code and output."""
    program = "from penstock.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    return done.returncode, done.stdout


def metrics(folder: RunFolder) -> list[dict[str, float]]:
    return [json.loads(line) for line in folder.metrics.read_text().splitlines()]


@pytest.mark.timeout(500)
@pytest.mark.parametrize("colocate", ["false", "true"])
def test_thirty_steps_of_a_real_model(tmp_path: Path, colocate: str) -> None:
    steps = 30
    words = [
        f"model.path={os.environ.get('PENSTOCK_GPU_MODEL') or 'demo'}",
        f"train.steps={steps}",
        "train.groups_per_step=32",
        "train.lr=1e-6",
        "sampling.num_generations=8",
        "sampling.max_tokens=64",
        *LONG_PROMPTS,
        "engine.max_slots=0",
        f"launch.colocate={colocate}",
        f"run.dir={tmp_path}",
        "run.name=real",
    ]
    code, text = penstock("train", *SMALL, *words)
    assert code == 0, text
    folder = RunFolder(tmp_path / "real")
    lines = metrics(folder)
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    for line in lines:
        assert math.isfinite(line["grad_norm"])
        assert line["grad_norm"] > 0
        assert 0 < line["entropy/mean"] < 12
        assert abs(line["mismatch/kl"]) < 0.02  # trainer and engine compute the same model
        assert line["staleness/max"] <= 1
        assert line["workers/restarts"] == 0
    assert audit_run(folder, as_json=True) == 0
    sizes = (folder.logs / "engine-0.log").read_text()
    assert "512 slots, KV cache of" in sizes  # 32 groups of 8, one step ahead
    assert ("beside a trainer" in sizes) == (colocate == "false" and torch.cuda.device_count() == 1)
    trained = (folder.logs / "trainer.log").read_text()
    assert "micro-batches of" in trained
    if os.environ.get("PENSTOCK_GPU_MODEL"):  # of an architecture that has kernels, as SmolLM2
        assert re.search(r"\d+ layers decode by kernels", sizes)
    assert re.search(r"\d+ layers train by kernels", trained)


@pytest.mark.timeout(500)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_small_updates_arrive_and_float16_does_not_overflow(tmp_path: Path, dtype: str) -> None:
    words = [
        f"model.path={os.environ.get('PENSTOCK_GPU_MODEL') or 'demo'}",
        f"model.dtype={dtype}",
        *LONG_PROMPTS,
        "train.steps=5",
        "train.lr=1e-6",
        f"run.dir={tmp_path}",
        "run.name=half",
    ]
    code, text = penstock("train", *SMALL, *words)
    assert code == 0, text
    for line in metrics(RunFolder(tmp_path / "half")):
        assert line["updates/skipped"] == 0
        assert line["loss_scale"] == (65536 if dtype == "float16" else 1)
        assert 0.5 < line["update/arrived"] < 1.5
        assert abs(line["mismatch/kl"]) < 0.02


@pytest.mark.timeout(500)
def test_a_run_survives_an_engine_that_dies_of_a_fault_of_the_device(tmp_path: Path) -> None:
    words = [*SMALL, f"run.dir={tmp_path}", "run.name=dies", *plan(tmp_path, "dies", 12)]
    code, text = penstock("train", *words)
    assert code == 0, text
    folder = RunFolder(tmp_path / "dies")
    assert_balanced(folder)
    assert "engine-0: it died: " in text
    assert "device-side assert triggered; starting it again (1 of 3)" in text
    assert metrics(folder)[-1]["workers/restarts"] == 1
    assert "in _gather" in (folder.logs / "engine-0.log").read_text()
    journal = Journal.open(folder.journal, readonly=True)
    assert journal.query("SELECT COUNT(*) FROM events WHERE kind = 'failed'") == [(0,)]
    journal.close()


@pytest.mark.timeout(500)
def test_a_device_that_always_fails_stops_the_run(tmp_path: Path) -> None:
    always = plan(tmp_path, "always", 12, then=1)
    words = [*SMALL, f"run.dir={tmp_path}", "run.name=always", *always]
    code, text = penstock("train", *words)
    assert code == 1, text
    last = text.strip().splitlines()[-1]
    assert last.startswith("error: no engine is left: engine-0: it died: ")
    assert "device-side assert triggered; engine-0 died of this 3 times in a row" in last
    assert (tmp_path / "always/logs/engine-0.log").read_text().count("in _gather") == 3
