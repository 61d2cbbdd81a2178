"""What a service forgets after a day: its folder shrinks, and nothing that is kept changes."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import penstock
from penstock import AdamParams, Datum, SamplingParams
from penstock.cli import app
from penstock.service import prune
from penstock.service.models import Models
from penstock.store.command_log import FILE

IDS = [1, 5, 6, 7, 8, 9]
DATUM = Datum(IDS[:-1], {"target_tokens": IDS[1:], "weights": [1.0] * 5})


def step(trainer: Any) -> float:
    done = trainer.forward_backward([DATUM], "cross_entropy")
    trainer.optim_step(AdamParams(learning_rate=3e-2, eps=1e-8)).result()
    return done.result().metrics["loss:sum"]


def run(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(words))
    return result.exit_code, f"{result.output}{result.exception or ''}"


@pytest.mark.slow
def test_a_day_later_a_service_has_forgotten_what_it_answered_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(Models.snapshot.__kwdefaults__, "wait_s", 0.0)  # after every step
    with penstock.Service("demo", folder=tmp_path) as service:
        trainer, twin = (service.create_lora_training_client(rank=2, seed=1) for _ in range(2))
        for _ in range(2):
            assert step(trainer) == step(twin)
        named = trainer.save_state("a").result().path
        trainer.save_state("a").result()  # the new checkpoint of this name
        sampler = trainer.save_weights_and_get_sampling_client()
        sampler.sample(IDS[:3], 1, SamplingParams(max_tokens=2)).result()
        twin.load_state_with_optimizer(named).result()
        service.delete_checkpoint(named)  # a load that may be done again needs its weights
        assert (run("replay", str(tmp_path))[0], run("audit", str(tmp_path))[0]) == (0, 0)
        assert len(list((tmp_path / "checkpoints").glob("*/*"))) == 3
        service._now(service._core._prune)
    # that of the load and that of the sampler; not that whose name was used again
    assert {place.name for place in (tmp_path / "checkpoints").glob("*/*")} == {"6", "7"}

    monkeypatch.setattr(prune, "KEPT_S", -60.0)  # a day later
    with penstock.Service("demo", folder=tmp_path) as service:
        assert not list((tmp_path / "checkpoints").glob("*/*"))
        gone_on = service.resume_training_client(trainer.model_id)
        other = service.resume_training_client(twin.model_id)
        assert step(gone_on) == step(other)
        request = f"{trainer.model_id}#1"
        again = service._call(service._core.answer("local", request, 1.0))
        assert json.loads(again.result)["error"] == "request_id: its answer was kept for a day"
        body = b"{}"
        kind = "forward_backward"
        service._now(service._core.submit, "local", kind, trainer.model_id, 1, body)
    with sqlite3.connect(tmp_path / FILE) as database:
        rows = database.execute("SELECT emptied, length(body), runs FROM commands WHERE line = ? ORDER BY seq", (trainer.model_id,)).fetchall()  # fmt: skip
    assert [(emptied, size == 0) for emptied, size, _ in rows[:4]] == [(1, True)] * 4
    assert all(size and not emptied for emptied, size, _ in rows[-2:])
    assert {runs for *_, runs in rows} == {1}
    code, text = run("audit", str(tmp_path))
    assert (code, "were kept for their time" in text) == (0, True)
    code, text = run("replay", str(tmp_path))
    assert (code, "2 commands done again" in text) == (0, True)
    with sqlite3.connect(tmp_path / FILE) as database:
        database.execute(
            "UPDATE commands SET digest = 'other' WHERE emptied AND kind = 'optim_step'"
        )
    assert run("audit", str(tmp_path))[0] == 1
    assert "its first weights have other bits" in run("replay", str(tmp_path))[1]
