"""The service in this process: a user's loop, what is left of it, and the commands that check its folder."""

from __future__ import annotations

import asyncio
import sqlite3
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import penstock
from penstock import AdamParams, Datum, SamplingParams
from penstock.cli import app
from penstock.service.client import SamplingClient, TrainingClient
from penstock.service.core import Busy, ServiceCore
from penstock.store.command_log import FILE, Command
from stages import either_loop

IDS = [1, 5, 6, 7, 8, 9]
DATUM = Datum(IDS[:-1], {"target_tokens": IDS[1:], "weights": [1.0] * 5})
STEP = AdamParams(learning_rate=3e-3, eps=1e-8)


def run(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(words))
    return result.exit_code, f"{result.output}{result.exception or ''}"


@pytest.mark.slow
def test_a_loop_of_a_user_goes_on_in_another_process_and_its_folder_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "loop"
    with penstock.Service("demo", folder=folder) as service:
        trainer = service.create_lora_training_client(rank=2, seed=3)
        losses = []
        for _ in range(3):
            done = trainer.forward_backward([DATUM, DATUM], "cross_entropy")
            assert trainer.optim_step(STEP).result().metrics["grad_norm"] > 0
            output = done.result()
            losses.append(output.metrics["loss:sum"])
            total = -sum(part["logprobs"].sum() for part in output.loss_fn_outputs)
            assert losses[-1] == pytest.approx(total, rel=1e-5)
        assert losses[-1] < losses[0]

        sampler = trainer.save_weights_and_get_sampling_client()
        params = SamplingParams(max_tokens=4, seed=1, stop=[])
        first, again = (sampler.sample(IDS[:3], 2, params).result() for _ in range(2))
        assert first == again
        sequence = first.sequences[0]
        whole = sampler.compute_logprobs(IDS[:3] + sequence.tokens).result()
        assert whole[0] is None
        np.testing.assert_allclose(whole[3:], sequence.logprobs, atol=1e-4)

        with pytest.raises(penstock.UserError, match="loss_fn: got 'nonsense'"):
            trainer.forward_backward([DATUM], "nonsense").result()
        path = trainer.save_state("a").result().path
        assert service.list_checkpoints() == [path]
        with pytest.raises(penstock.UserError, match="process"):
            ServiceCore(service._core.config, folder)  # one service writes a folder

    with penstock.Service("demo", folder=folder) as service:
        gone_on = service.resume_training_client(trainer.model_id)
        twin = service.create_lora_training_client(rank=2)
        twin.load_state_with_optimizer(path).result()
        outputs = [c.forward([DATUM], "cross_entropy").result() for c in (gone_on, twin)]
        assert outputs[0].metrics == outputs[1].metrics
        service.delete_checkpoint(path)
        assert service.list_checkpoints() == []

    with pytest.raises(penstock.UserError, match="model: got 'demo' with these settings"):
        penstock.Service("demo", folder=folder, settings={"seed": 5})
    monkeypatch.chdir(tmp_path)
    code, text = run("audit", str(folder))
    assert (code, "every command is what was written" in text) == (0, True)
    with sqlite3.connect(folder / FILE) as database:
        database.execute("UPDATE commands SET result = x'00' WHERE kind = 'forward_backward'")
    code, text = run("audit", str(folder), "--json")
    assert (code, "is not what was written" in text) == (1, True)


def test_replay_does_every_command_again_and_names_the_first_difference(tmp_path: Path) -> None:
    with penstock.Service("demo", folder=tmp_path) as service:
        trainer = service.create_lora_training_client(rank=2)
        trainer.forward_backward([DATUM], "cross_entropy")
        trainer.optim_step(STEP).result()
    code, text = run("replay", str(tmp_path))
    assert (code, "2 commands done again: every answer is the logged one" in text) == (0, True)
    with sqlite3.connect(tmp_path / FILE) as database:
        database.execute("UPDATE commands SET digest = 'other' WHERE kind = 'optim_step'")
    code, text = run("replay", str(tmp_path))
    assert (code != 0, "command 2 (optim_step) gave other bits" in text) == (True, True)


def test_losses_of_ones_own_have_the_gradient_of_torch(tmp_path: Path) -> None:
    with penstock.Service("demo", folder=tmp_path) as service:
        clients = [service.create_lora_training_client(rank=2, seed=3) for _ in range(2)]

        def doubled(data: object, logprobs: list) -> tuple:
            return -2 * sum(lp.sum() for lp in logprobs), {"mine": 1.0}

        own = clients[0].forward_backward_custom([DATUM, DATUM], doubled).result()
        twice = Datum(DATUM.model_input, {**DATUM.loss_fn_inputs, "weights": [2.0] * 5})
        theirs = clients[1].forward_backward([twice, twice], "cross_entropy").result()
        assert own.metrics["mine"] == 1.0
        assert own.metrics["loss:sum"] == pytest.approx(theirs.metrics["loss:sum"], rel=1e-5)
        norms = [client.optim_step(STEP).result().metrics["grad_norm"] for client in clients]
        assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_a_full_queue_takes_no_more_from_its_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.service.core.MOST_WAITING", 0)
    with penstock.Service("demo", folder=tmp_path) as service:
        with pytest.raises(Busy, match="allowed: no more now"):
            service.create_lora_training_client(rank=2)
        monkeypatch.setattr("penstock.service.core.MOST_WAITING", 9)
        trainer = service.create_lora_training_client(rank=2)  # nothing was half logged
        monkeypatch.setattr("penstock.service.core.MOST_WAITING", 0)
        with pytest.raises(Busy):
            trainer.forward([DATUM], "cross_entropy")
        monkeypatch.setattr("penstock.service.core.MOST_WAITING", 9)
        assert trainer.forward([DATUM], "cross_entropy").result(60).metrics  # its number is used


def test_who_waits_for_an_answer_hears_that_the_service_was_closed(tmp_path: Path) -> None:
    with penstock.Service("demo", folder=tmp_path) as service:
        made = service.create_lora_training_client(rank=2)
        later = TrainingClient(service, made.model_id, last_seq=1)
        waiting = later.forward([DATUM], "cross_entropy")  # for a command that does not come
    with pytest.raises(penstock.RunError, match="closed before this command had its answer"):
        waiting.result(60)
    with pytest.raises(penstock.UserError, match="got a call after close"):
        made.forward([DATUM], "cross_entropy")


def test_threads_may_share_a_client() -> None:
    """Two requests with one number would have one answer."""
    seqs: list[int] = []
    service: Any = SimpleNamespace(create_sampling_client=None, get_tokenizer=None)
    service._submit = lambda read, kind, line, seq, body: seqs.append(seq)
    sampler, trainer = SamplingClient(service, "sampler"), TrainingClient(service, "model")
    for call in (
        lambda: sampler.sample([1], 1, SamplingParams()),
        lambda: trainer.optim_step(STEP),
    ):
        seqs.clear()

        def work(call: Any = call) -> None:
            for _ in range(300):
                call()

        threads = [threading.Thread(target=work) for _ in range(8)]
        before = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(before)
        assert sorted(seqs) == list(range(1, 2401))


def in_memory(service: penstock.Service) -> list[str]:
    """The models in memory, when no more are put away."""
    models, until = service._core.models._trained, time.monotonic() + 5
    while models and time.monotonic() < until:
        time.sleep(0.02)
    return list(models)


@pytest.mark.parametrize("end", ["silence", "a last word"])
def test_a_client_that_has_gone_leaves_the_memory_when_its_commands_are_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """Its commands take longer than its silence is waited for, and its models keep their state."""
    if end == "silence":
        monkeypatch.setattr("penstock.service.core.SILENT_S", 0.05)
    with penstock.Service("demo", folder=tmp_path) as service:
        trainer = service.create_lora_training_client(rank=2)
        for _ in range(8):
            trainer.forward_backward([DATUM] * 16, "cross_entropy")
            last = trainer.optim_step(STEP)
        if end != "silence":
            service._now(service._core.finish_session, "local", service._session)
        last.result()
        assert in_memory(service) == []
    with penstock.Service("demo", folder=tmp_path) as service:
        service.resume_training_client(trainer.model_id).forward([DATUM], "cross_entropy").result()


def test_a_client_that_went_before_a_restart_leaves_the_memory_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with penstock.Service("demo", folder=tmp_path) as service:
        trainer = service.create_lora_training_client(rank=2)
        monkeypatch.setattr("penstock.service.models.Models.run", lambda *values: time.sleep(1))
        trainer.optim_step(STEP)
    monkeypatch.undo()
    monkeypatch.setattr("penstock.service.core.SILENT_S", 0.05)
    with penstock.Service("demo", folder=tmp_path) as service:
        answer = service._core.answer("local", f"{trainer.model_id}#1", 60.0)
        assert service._call(answer).outcome == "done"
        assert in_memory(service) == []


def test_a_sampler_whose_checkpoint_was_deleted_says_so_whether_or_not_an_engine_holds_it(
    tmp_path: Path,
) -> None:
    params = SamplingParams(max_tokens=2)
    with penstock.Service("demo", folder=tmp_path) as service:
        path = (
            service.create_lora_training_client(rank=2).save_weights_for_sampler("a").result().path
        )
        held, unused = (service.create_sampling_client(path) for _ in range(2))
        held.sample(IDS[:3], 1, params).result()
        service.delete_checkpoint(path)
        for sampler in (held, unused):
            with pytest.raises(penstock.UserError, match="whose checkpoint was deleted, allowed"):
                sampler.sample(IDS[:3], 1, params).result()


def test_a_loop_by_the_sdks_methods_runs_in_process(tmp_path: Path) -> None:
    with penstock.Service("demo", folder=tmp_path) as service:
        told = asyncio.run(either_loop.train(service, penstock, list))
    assert told[6] < told[3] < told[0]  # losses
    assert told[-2:] == ["demo", 256]


@pytest.mark.parametrize(("fill", "begun"), [(1.0, 5), (0.25, 20)])
def test_engines_get_more_requests_when_few_samples_of_each_run_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fill: float, begun: int
) -> None:
    calls: list[str] = []

    async def sample(command: Command, *values: object) -> bytes:
        calls.append(command.request_id)
        return await asyncio.Future()  # for ever

    settings = {"engine.max_slots": 8}
    with penstock.Service("demo", folder=tmp_path, settings=settings) as service:
        monkeypatch.setattr(service._core.samplers, "sample", sample)
        service._core.seats.fill = fill
        sampler = service.create_sampling_client()
        for _ in range(40):
            sampler.sample(IDS, 2, SamplingParams(max_tokens=2))
        service._call(asyncio.sleep(0.1))
        assert len(calls) == begun


def test_samples_whose_log_probs_wait_for_the_trainer_leave_the_engines_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_score = threading.Event()
    with penstock.Service("demo", folder=tmp_path, settings={"engine.max_slots": 4}) as service:
        score = service._core.samplers._add_scores

        def wait_and_score(*values: Any) -> None:
            may_score.wait()
            score(*values)

        monkeypatch.setattr(service._core.samplers, "_add_scores", wait_and_score)
        sampler = service.create_sampling_client()
        scored = [sampler.compute_logprobs(IDS) for _ in range(10)]
        try:
            sampled = sampler.sample(IDS, 1, SamplingParams(max_tokens=2, stop=[])).result(60)
        finally:
            may_score.set()
        assert len(sampled.sequences[0].tokens) == 2
        assert all(len(future.result(60)) == len(IDS) for future in scored)


@pytest.mark.slow
def test_a_large_request_leaves_the_engines_to_others_part_by_part(tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=4, stop=[], seed=7)
    with penstock.Service("demo", folder=tmp_path, settings={"engine.max_slots": 4}) as service:
        greedy, modest = (service.create_sampling_client() for _ in range(2))
        large = greedy.sample(IDS, 1024, params)
        few = modest.sample(IDS, 2, params).result(60).sequences
        assert not large._waiting.done()
        many = large.result(300).sequences
    assert len(many) == 1024
    assert [sequence.tokens for sequence in many[:2]] == [sequence.tokens for sequence in few]


def test_a_command_that_could_not_be_logged_leaves_no_gap(tmp_path: Path) -> None:
    """The commands behind a number that never came would wait for ever."""
    with penstock.Service("demo", folder=tmp_path) as service:
        trainer = service.create_lora_training_client(rank=2)
        log = service._core.log
        ((pages,),) = service._now(log.query, "PRAGMA page_count")
        service._now(log.query, f"PRAGMA max_page_count = {pages}")
        with pytest.raises(penstock.RunError, match=r"commands\.db: cannot be used: .* is full"):
            trainer.forward([DATUM] * 200, "cross_entropy")
        service._now(log.query, f"PRAGMA max_page_count = {1 << 20}")
        assert trainer.forward([DATUM], "cross_entropy").result(60).metrics
