"""Several engines of a service as worker processes: the bits of one engine, also when one is killed."""

from __future__ import annotations

import importlib.util
import os
import signal
import sqlite3
from pathlib import Path

import pytest

import penstock
from penstock import SamplingParams
from penstock.cli import main
from penstock.service.audit import audit_service
from penstock.service.client import SamplingClient
from penstock.store.command_log import FILE
from stages.service_engines import IDS, Asking

pytestmark = pytest.mark.usefixtures("warm_workers")


@pytest.mark.slow
def test_two_engines_answer_as_one_and_a_killed_one_loses_nothing(tmp_path: Path) -> None:
    one = Asking(tmp_path / "one")
    wanted = one.answers()
    one.service.close()
    two = Asking(tmp_path / "two", num_producers=2)
    with two.service:
        assert two.answers() == wanted
        assert two.holding() == {"engine-0", "engine-1"}
        without_all_weights = [answer for n, answer in enumerate(wanted) if n % 4 != 2]
        assert two.answers_with_a_kill() == without_all_weights
        assert two.until_back() == 1
        assert two.answers() == wanted
        assert two.holding() == {"engine-0", "engine-1"}  # it was given them again
    with sqlite3.connect(tmp_path / "two" / FILE) as database:
        assert database.execute("SELECT DISTINCT outcome, runs FROM commands").fetchall() == [("done", 1)]  # fmt: skip
    assert audit_service(tmp_path / "two") == 0


def test_a_service_without_engines_ends_and_the_next_one_answers_what_was_asked(
    tmp_path: Path,
) -> None:
    service = penstock.Service("demo", folder=tmp_path, settings={"launch.num_producers": 2, "launch.max_restarts": 0})  # fmt: skip
    sampler = service.create_sampling_client()
    asked = [sampler.sample(IDS, 2, SamplingParams(max_tokens=60, seed=n)) for n in range(8)]
    for engine in service._core._engines.supervised.values():  # type: ignore[union-attr]
        os.kill(engine.worker.pid, signal.SIGKILL)  # type: ignore[union-attr]
    with pytest.raises(penstock.RunError, match="it has ended: no engine is left: engine-0"):
        [future.result() for future in asked]
    service.close()
    with penstock.Service("demo", folder=tmp_path) as service:
        other = service.create_sampling_client()
        again = SamplingClient(service, sampler.sampler_id)  # its requests are known
        for n in range(8):
            values = IDS, 2, SamplingParams(max_tokens=60, seed=n)
            assert again.sample(*values).result() == other.sample(*values).result()
    assert audit_service(tmp_path) == 0
    with sqlite3.connect(tmp_path / FILE) as database:
        assert database.execute("SELECT count(*), max(runs) FROM commands").fetchone() == (16, 2)


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("launch.num_consumers=2", "launch.num_consumers: got 2, allowed: 1 for a service"),
        ("launch.num_producers=100000", "launch.num_producers: got 100000, allowed: at most"),
        ("launch.kind=ray", "ray: not installed; install it with"),
    ],
)
def test_a_layout_that_a_service_cannot_have_is_refused_before_anything_starts(
    word: str,
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "ray" else find(name, *more))  # fmt: skip
    words = ["penstock", "serve", "demo", "--port", "0", word, f"run.dir={tmp_path}"]
    monkeypatch.setattr("sys.argv", words)
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    assert line in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_without_peft_the_service_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "peft" else find(name, *more))  # fmt: skip
    with pytest.raises(penstock.UserError, match=r"peft is not installed.* 'penstock\[lora\]'"):
        penstock.Service("demo", folder=tmp_path / "service")
    assert not list(tmp_path.iterdir())
