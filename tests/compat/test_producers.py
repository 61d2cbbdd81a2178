"""Producers driven from plain Python: named tensors, new weights, episodes and a whole run."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch

from penstock.compat.producers import SimpleProducer
from penstock.config.demo import context_length
from penstock.errors import UserError
from stages.simple_producer import ARGUMENTS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("producer")


@pytest.fixture(scope="module")
def producer(folder: Path) -> SimpleProducer:
    made = SimpleProducer(
        **ARGUMENTS,
        eval_dataset_config={"heldout": {"path": "addition:heldout", "data_options": {"size": 40}}},
        eval_save_dir=str(folder / "eval"),
        log_rollout_interval=1,
        enable_profiling=True,
        log_dir=str(folder),
        rollout_log_file=str(folder / "rollouts.jsonl"),
    )
    yield made
    made.close()


def test_rollout_gives_the_named_tensors(producer: SimpleProducer) -> None:
    prompts = [producer._dataset[0], producer._dataset[1]]
    width = max(len(prompt.token_ids) for prompt in prompts) + 1
    ids = torch.zeros((2, width), dtype=torch.long)
    mask = torch.zeros((2, width), dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt.token_ids) :] = torch.from_numpy(prompt.token_ids)
        mask[row, width - len(prompt.token_ids) :] = 1
    answers = [prompt.gt_answer for prompt in prompts]
    made = producer.rollout(ids, mask, gt_answer=answers)
    length = made["input_ids"].shape[2]
    actions = made["action_mask"].shape[2]
    assert made["input_ids"].shape == made["attention_mask"].shape == (2, 3, length)
    assert made["action_log_probs"].shape == (2, 3, actions)
    for name in ("reward", "format_acc", "ans_acc", "temperature", "advantages"):
        assert made[name].shape == (2, 3, 1), name
    assert torch.all(made["temperature"] == torch.tensor(0.7))
    for p, prompt in enumerate(prompts):
        for g in range(3):
            start, end = made["response_idx"][p, g].tolist()
            size = end - start + 1
            assert made["action_mask"][p, g].sum() == size
            seen = made["input_ids"][p, g][made["attention_mask"][p, g].bool()]
            assert seen[:-size].tolist() == prompt.token_ids.tolist()
            assert torch.all(made["action_log_probs"][p, g, :size] <= 0)
    assert torch.allclose(made["advantages"].sum(dim=1), torch.zeros(2, 1), atol=1e-4)


def test_wrong_fields_are_refused(producer: SimpleProducer) -> None:
    ids = torch.ones((2, 3), dtype=torch.long)
    with pytest.raises(UserError, match="gt_answer got 1 entries, allowed: 2"):
        producer.rollout(ids, ids, gt_answer=["1"])
    with pytest.raises(UserError, match="producer_idx: got 2, allowed: 0 to 1"):
        SimpleProducer(**{**ARGUMENTS, "producer_idx": 2})


def test_new_weights_are_loaded_and_told_by_their_digest(producer: SimpleProducer) -> None:
    from penstock.config.demo import policy_path
    from penstock.training.policy import load_policy

    model = load_policy(str(policy_path()), producer.config.model, torch.float32)
    state = {name: p.detach() * 0.5 for name, p in model.named_parameters()}
    before = producer.policy_version
    digest = producer.load_state_dict(state)
    stats = producer._wait(producer._engine.stats())
    assert (stats.policy_version, stats.digest) == (before + 1, digest)


def test_loop_goes_over_its_own_share_of_every_episode(
    producer: SimpleProducer, folder: Path
) -> None:
    own = len(range(0, len(producer._dataset), 2))
    producer.delivered.clear()
    assert producer.loop() == 2 * own
    assert sum(len(made["reward"]) for made in producer.delivered) == 2 * own
    lines = [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]
    assert len(lines) == 2 * own * 3
    assert {"response", "reward", "versions"} <= set(lines[0])
    assert lines[0]["gt_answer"]
    assert "+" in lines[0]["prompt"][-1]["content"]


def test_the_temperature_goes_to_its_end_over_an_episode(
    capsys: pytest.CaptureFixture[str],
) -> None:
    generation = {**ARGUMENTS["generate_config"], "temperature": 1.0, "max_new_tokens": 2}
    generation |= {"anneal": {"end": 0.6, "episodes": 1.0}}
    made = SimpleProducer(
        **{**ARGUMENTS, "generate_config": generation},
        consumer_plugin_config={"tp_size": 2},
        shared_sync_data_actor="actor",
        shared_signal_actor="actor",
    )
    try:
        made.loop()
    finally:
        made.close()
    temperatures = [float(tensors["temperature"].mean()) for tensors in made.delivered]
    assert temperatures == pytest.approx([1.0, 0.8, 0.6, 0.6])  # 4 prompts an episode, 2 at a time
    told = capsys.readouterr().err
    assert "shared_sync_data_actor has no effect: `deliver` takes" in told
    assert "shared_signal_actor has no effect: `new_weights`" in told


def test_a_group_is_waited_for_as_long_as_its_timeout_says(producer: SimpleProducer) -> None:
    with pytest.raises(Exception, match=r"(?i)tim"):
        producer.init_collective_group(
            2, 1, group_name="alone", init_method="tcp://127.0.0.1:1", gloo_timeout=200
        )


def test_a_class_of_producers_has_the_options_of_ray() -> None:
    pytest.importorskip("ray")
    actor = SimpleProducer.options(num_cpus=1)
    assert callable(actor.remote)
    with pytest.raises(UserError, match="got 'beams', which it does not take, got no producer_idx"):
        SimpleProducer(beams=3)


def test_figures_go_to_trackers_by_the_names_that_were_given(
    producer: SimpleProducer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let W&B write to disk."""
    pytest.importorskip("wandb")
    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "elsewhere"))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    track = producer.config.track.model_copy(
        update={"trackers": ["wandb"], "wandb": {"project": "sums", "group": "pair"}}
    )
    run = producer.config.run.model_copy(update={"name": "first"})
    other = copy.copy(producer)
    other.config = producer.config.model_copy(update={"track": track, "run": run})
    other._write_down(tmp_path, None, profile=False)
    other._log_microbatch(other._wait(other._generate([other._new_group(other._dataset[0])])))
    run = other._tracker._trackers["wandb"]._run  # type: ignore[attr-defined]
    assert (run.project, run.name, run.group) == ("sums", "first", "pair")
    other._tracker.close()
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    wanted = {"rollout/reward", "rollout/format_acc", "rollout/ans_acc", "rollout/response_length"}
    assert wanted <= set(json.loads(line))


@pytest.mark.usefixtures("producer")
def test_a_profile_is_a_timeline(folder: Path) -> None:
    from penstock.inspection.timeline import read_events
    from penstock.store.run_folder import find

    events = read_events(find(folder))
    kinds = {event.what for event in events if event.lane == "producer-0"}
    assert {"generate", "send", "wait", "sync"} <= kinds
    assert any(event.what == "reward" for event in events)


def test_an_evaluation_is_one_exact_pass(producer: SimpleProducer) -> None:
    (result,) = producer.evaluate(step=1)
    assert result.problems == result.samples > 0
    path = producer._eval_folder / "heldout-step-1.jsonl"
    assert len(path.read_text().splitlines()) == result.samples


def test_a_default_that_does_not_fit_the_model_is_lowered_and_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = SimpleProducer(**{**ARGUMENTS, "generate_config": {"temperature": 0.7}})
    made.close()
    context = context_length("demo")
    assert context is not None
    assert made.config.sampling.max_tokens == context // 2
    assert f"note: sampling.max_tokens = {context // 2}, lowered" in capsys.readouterr().err
