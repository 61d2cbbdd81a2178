"""`launch_distributed` and `SimpleProducer` with every argument that ColossalAI's users give."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from penstock.compat import SimpleProducer, launch_distributed
from penstock.errors import UserError
from penstock.store.run_folder import RunFolder
from stages.rewards import ODD_REWARD
from stages.simple_producer import ARGUMENTS
from stages.tiny_run import TINY

SUMS = next(word.partition("=")[2] for word in TINY if word.startswith("tasks.train.data="))
INLINE = {"launch": {"kind": "inline"}, "track": {"trackers": []}, "eval": {"at_start": False}}


def arguments(**more: Any) -> dict[str, Any]:
    return {
        "num_producers": 1,
        "num_consumer_procs": 1,
        "num_episodes": 0.2,
        "train_batch_size": 2,
        "train_dataset_config": {"path": SUMS, "max_length": 20, "system_prompt": "1+1"},
        "model_config": {"pretrained": "demo"},
        "generate_config": {"temperature": 1.0, "top_k": -1, "max_new_tokens": 6},
        "num_generations": 2,
        "grpo_config": {"algo": "GRPO", "reward_fn_type": ODD_REWARD},
        "overrides": INLINE,
        **more,
    }


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunFolder, Path]:
    here = tmp_path_factory.mktemp("colossalai")
    folder = launch_distributed(
        **arguments(
            tokenizer_config={"path": "demo", "trust_remote_code": False},
            plugin_config={"tp_size": 1, "pp_size": 1, "zero_stage": 0, "max_norm": 0.5},
            consumer_plugin_config={"precision": "fp32"},
            inference_batch_size=4,
            inference_microbatch_size=2,
            train_microbatch_size=2,
            eval_dataset_config={"plain": SUMS, "table": {"path": SUMS, "max_length": 30}},
            eval_generation_config={"max_new_tokens": 4, "temperature": 0.6},
            eval_interval=100,
            anneal_temperature_to=0.9,
            gloo_timeout=120.0,
            save_dir=str(here / "model"),
            eval_save_dir=str(here / "evaluations"),
            rollout_save_dir=str(here / "rollout"),
            rollout_log_file=str(here / "logs" / "rollouts.jsonl"),
            log_rollout_interval=1,
            master_addr="localhost",
            run_dir=str(here / "runs"),
            run_name="run",
        )
    )
    return RunFolder(folder), here


def test_a_run_trains_with_every_argument(run: tuple[RunFolder, Path]) -> None:
    config = run[0].config()
    assert (config.model.path, config.model.tokenizer, config.model.dtype) == (
        "demo",
        "demo",
        "float32",
    )
    assert config.sync.every_steps == 2  # 4 prompts between syncs, 2 per update
    assert config.engine.max_slots == 4  # 2 prompts with 2 responses
    assert config.train.micro_batch_tokens == 2 * (20 + 6)
    assert config.train.mini_batches == 1  # sizes of forwards never change the optimizer steps
    assert config.train.max_grad_norm == 0.5
    assert config.watchdog.stall_s == 120.0
    prompts = len(Path(SUMS).read_text().splitlines())
    assert len(run[0].metrics.read_text().splitlines()) == math.ceil(0.2 * prompts / 2)


def test_evaluation_tasks_keep_the_system_prompt_and_the_longest_prompt(
    run: tuple[RunFolder, Path],
) -> None:
    tasks = run[0].config().eval.tasks
    assert [task.system_prompt for task in tasks.values()] == ["1+1", "1+1"]
    assert [task.max_prompt_tokens for task in tasks.values()] == [20, 30]
    sampling = run[0].config().eval_sampling("plain")
    assert (sampling.max_tokens, sampling.temperature) == (4, 0.6)


def test_folders_that_were_asked_for_lead_into_the_run(run: tuple[RunFolder, Path]) -> None:
    folder, here = run
    assert list((here / "model").glob("step-*"))
    assert (here / "evaluations" / "summary.jsonl").exists()
    assert (here / "rollout").resolve() == folder.path.resolve()
    lines = (here / "logs" / "rollouts.jsonl").read_text().splitlines()
    assert {"reward", "versions"} <= set(json.loads(lines[0]))


def test_the_temperature_is_annealed_over_the_first_episode(run: tuple[RunFolder, Path]) -> None:
    assert run[0].config().sampling.anneal.episodes == 1.0
    lines = [json.loads(line) for line in run[0].metrics.read_text().splitlines()]
    assert lines[0]["tasks/train/temperature"] == 1.0


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"tokenizer_config": {"padding_side": "left"}}, "tokenizer_config: got 'padding_side'"),
        (
            {"eval_dataset_config": {"held": {}}},
            "eval_dataset_config: held got {}, allowed: a path",
        ),
        (
            {"eval_dataset_config": {"held": SUMS}, "eval_generation_config": {"beams": 4}},
            "eval_generation_config: got 'beams'",
        ),
        ({"generate_config": {"beams": 4}}, "generate_config: got 'beams'"),
        (
            {"plugin_config": {"tp_size": 2, "zero_stage": 2}},
            "train.parallel: got 2 ranks for one copy of the model with launch.num_consumers = 1",
        ),
        ({"plugin_config": {"zero": 2}}, "plugin_config: got 'zero'"),
        ({"inference_batch_size": 3}, "allowed: a multiple of train_batch_size = 2"),
        ({"save_dir": "."}, "got ., which exists"),
    ],
)
def test_what_has_no_place_is_refused_in_one_line(more: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as refused:
        launch_distributed(**arguments(**more))
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_parameter_without_effect_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="data"):
        launch_distributed(
            **arguments(
                train_dataset_config={"path": str(tmp_path / "nowhere.jsonl")},
                master_port=29500,
                train_minibatch_size=1,
            )
        )
    told = capsys.readouterr().err
    assert "master_port has no effect" in told
    assert "train_minibatch_size has no effect" in told


class Counting(SimpleProducer):
    """Replaces `rollout`, as a user's own producer does."""

    calls = 0

    def rollout(self, input_ids: Any, attention_mask: Any, **fields: Any) -> dict[str, Any]:
        self.calls += 1
        assert input_ids.shape == attention_mask.shape
        assert len(fields["gt_answer"]) == len(fields["prompts"]) == len(input_ids)
        return {**super().rollout(input_ids, attention_mask, **fields), "mine": self.calls}


@pytest.mark.slow
def test_loop_calls_the_rollout_of_a_subclass(tmp_path: Path) -> None:
    """8 prompts for two producers, two a microbatch, two episodes."""
    producer = Counting(
        **ARGUMENTS,
        eval_dataset_config={"held": {"path": "addition:heldout", "max_length": 16}},
        eval_generation_config={"max_new_tokens": 2},
        eval_save_dir=str(tmp_path),
    )
    try:
        done = producer.loop()
        assert producer.calls == done // 2 > 0
        assert producer.delivered[-1]["mine"] == producer.calls
        (result,) = producer.evaluate(1)
        assert result.response_length <= 2
    finally:
        producer.close()
