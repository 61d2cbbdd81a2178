"""W&B without a network: a run is written to disk, and a resumed run continues under the same id."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.config import Config
from penstock.inspection.track.logs import Fanout, RunInfo

wandb = pytest.importorskip("wandb")


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "elsewhere"))


def one_part(folder: Path, first_step: int) -> None:
    config = Config.model_validate(
        {"track": {"trackers": ["wandb"]}, "run": {"group": "g", "tags": ["a", "b"]}}
    )
    info = RunInfo(
        config=config,
        folder=folder,
        name="run",
        total_steps=4,
        first_step=first_step,
        live=lambda: "",
    )
    fanout = Fanout.from_info(info)
    assert "wandb" in fanout._trackers
    for step in (first_step + 1, first_step + 2):
        fanout.log_step(step, {"reward/mean": 0.5})
        fanout.log_eval(step - 1, {"eval/held/accuracy": 0.25})  # it was slower than the step
        assert "wandb" in fanout._trackers
    fanout.close()


def test_offline_runs_are_written_and_a_resumed_one_keeps_its_id(tmp_path: Path) -> None:
    one_part(tmp_path, 0)
    identity = (tmp_path / "wandb-id").read_text()
    one_part(tmp_path, 2)
    assert (tmp_path / "wandb-id").read_text() == identity
    files = sorted((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
    assert files
    assert {file.name for file in files} == {f"run-{identity}.wandb"}
    assert all(b"eval/held/accuracy" in file.read_bytes() for file in files)
