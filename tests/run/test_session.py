"""What a session does to the interpreter that it runs in, and undoes."""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock import cli
from penstock.config.demo import policy_path
from penstock.config.source import load_config
from penstock.errors import StopRequested
from penstock.run import job
from penstock.run.run_data import RunData
from penstock.run.session import model_config, tuned_interpreter
from penstock.store import run_folder
from penstock.workers.processes import local
from stages.tiny_run import TINY


@pytest.fixture
def unfrozen(count_frozen: None) -> Iterator[None]:
    """Run a test in an interpreter as it starts, unlike that of the tests: nothing is frozen."""
    threshold = gc.get_threshold()
    gc.unfreeze()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*threshold)
    gc.freeze()


@pytest.mark.usefixtures("unfrozen")
def test_objects_of_before_a_run_stay_out_of_its_collections_and_come_back() -> None:
    before = gc.get_threshold()
    with tuned_interpreter():
        assert gc.get_freeze_count() > 1000
        assert gc.get_threshold() > before
    assert gc.get_freeze_count() == 0
    assert gc.get_threshold() == before


@pytest.mark.usefixtures("unfrozen")
def test_what_the_program_around_a_run_froze_stays_frozen() -> None:
    gc.freeze()
    made = [object() for _ in range(10)], {}
    with tuned_interpreter():
        assert any(one is made for one in gc.get_objects())  # of a run: not frozen
        assert gc.get_freeze_count() > 1000
    assert gc.get_freeze_count() > 1000


@pytest.mark.parametrize(("owner", "name"), [(RunData, "load"), (job, "measure")])
@pytest.mark.parametrize("kind", ["inline", "local"])
def test_a_stop_during_the_start_does_not_wait_for_the_data(
    kind: str, owner: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, left = list[bool](), threading.Event()

    def load(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        read.append(left.wait(20))  # a large file: this long, if the run waits for it

    async def launch(*_: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(owner, name, load)
    monkeypatch.setattr(local, "start", launch)
    try:
        done = CliRunner().invoke(cli.app, ["train", *TINY, f"launch.kind={kind}"])
    finally:
        left.set()
    assert isinstance(done.exception, StopRequested)
    assert "stopped during the start" in str(done.exception)
    assert False not in read  # the run did not wait that long


def test_a_checkpoint_of_a_run_has_the_settings_of_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`penstock eval runs/NAME/checkpoints/step-1` said that there were no evaluation tasks."""
    words = [*TINY, f"run.dir={tmp_path}", "run.name=settled", "sampling.max_tokens=7"]
    run = run_folder.create(load_config(None, words).config)
    for step in (1, 2):
        checkpoint = run.checkpoints / f"step-{step}"
        shutil.copytree(policy_path(), checkpoint / "model")
        (checkpoint / "manifest.json").write_text("{}")
    monkeypatch.chdir(run.checkpoints)
    for name in ("step-1", str(run.checkpoints / "step-1")):
        config = model_config(name, ["eval.max_problems=3"])
        assert Path(config.model.path) == run.checkpoints / "step-1" / "model"
        assert config.sampling.max_tokens == 7
        assert config.eval.tasks == run.config().eval.tasks
        assert config.eval.max_problems == 3
