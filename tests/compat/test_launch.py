"""`launch_distributed` with the arguments that ColossalAI's example gives it, unchanged but for sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import BaseModel

from penstock.compat import launch_distributed
from penstock.compat.distributed import RULES, arguments_of, distributed_config
from penstock.config import Config
from penstock.config.demo import context_length
from penstock.errors import UserError
from penstock.store.run_folder import RunFolder

TAGS = {
    "think_start": {"text": "<think>", "num_occur": 1},
    "think_end": {"text": "</think>", "num_occur": 1},
    "answer_start": {"text": "<answer>", "num_occur": 1},
    "answer_end": {"text": "</answer>", "num_occur": 1},
}
LOSS = {"lr": 1e-6, "train_microbatch_size": 2, "max_length": 40, "max_new_tokens": 8}
DAPO = LOSS | {
    "filter_range": [0.01, 0.99],
    "dynamic_batching": True,
    "clip_eps_low": 0.2,
    "clip_eps_high": 0.28,
    "skip_threshold": 20.0,
    "beta": 0,
    "loss_variation": "token_level",
    "soft_over_length_punishment": True,
    "cache_length": 2,
    "filter_truncated_response": True,
    "reward_fn_type": "boxed",
    "response_format_tags": None,
}
INLINE = {"launch": {"kind": "inline"}, "track": {"trackers": []}}


def call(folder: Path, **more: Any) -> dict[str, Any]:
    """The call of the example, with a small model, small sizes and one rank."""
    data = str(folder / "data.jsonl")
    rows = [{"messages": {"role": "user", "content": "1+1"}, "gt_answer": "2"}] * 4
    Path(data).write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset = {"path": data, "max_length": 32, "system_prompt": "1+1"}
    return {
        "num_producers": 1,
        "num_proc_per_producer": 1,
        "num_consumer_procs": 1,
        "num_episodes": 1,
        "inference_batch_size": 2,
        "inference_microbatch_size": 2,
        "train_batch_size": 2,
        "train_minibatch_size": 1,
        "train_dataset_config": dataset,
        "dataloaders_config": {},
        "inference_model_config": {
            "path": "demo",
            "checkpoint_path": None,
            "use_flash_attention_2": True,
            "torch_dtype": torch.float32,
        },
        "generate_config": {
            "top_k": 50,
            "top_p": 1.0,
            "temperature": 1.0,
            "max_length": 40,
            "do_sample": True,
            "max_new_tokens": None,
            "early_stopping": False,
            "stop_strings": ["</answer>"],
        },
        "num_generations": 2,
        "train_model_config": {
            "path": "demo",
            "use_flash_attention_2": False,
            "use_cache": False,
            "attn_implementation": "eager",
        },
        "grpo_config": LOSS
        | {
            "beta": 0.01,
            "loss_variation": "sample_level",
            "reward_fn_type": "think_answer_tags",
            "response_format_tags": TAGS,
        },
        "agentic_config": None,
        "plugin_config": {
            "tp_size": 1,
            "pp_size": 1,
            "microbatch_size": 2,
            "zero_stage": 0,
            "max_norm": 1.0,
            "enable_flash_attention": True,
            "sp_size": 1,
            "enable_sequence_parallelism": True,
            "sequence_parallelism_mode": "split_gather",
        },
        "inference_backend": "transformers",
        "master_addr": "localhost",
        "master_port": 29506,
        "core_algo": "GRPO",
        "project_name": "GRPO",
        "save_interval": 100,
        "save_dir": str(folder / "model" / "GRPO"),
        "eval_dataset_config": {"math": dataset},
        "eval_interval": 100,
        "eval_save_dir": str(folder / "eval" / "GRPO"),
        "eval_generation_config": {"temperature": 0.6},
        "log_rollout_interval": 20,
        "rollout_save_dir": str(folder / "rollouts"),
        "enable_profiling": False,
        "n_behind": 0,
        **more,
    }


def config_of(arguments: dict[str, Any]) -> Config:
    return distributed_config(arguments_of("launch_distributed", "launch", (), arguments))


def test_the_call_of_the_example_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = call(tmp_path, run_dir=str(tmp_path / "runs"), overrides=INLINE)
    folder = RunFolder(launch_distributed(**arguments))
    assert len(folder.metrics.read_text().splitlines()) == 2
    assert list((tmp_path / "model" / "GRPO").glob("step-*"))
    assert (tmp_path / "eval" / "GRPO" / "summary.jsonl").exists()
    assert "train_minibatch_size has no effect" in capsys.readouterr().err
    with pytest.raises(UserError, match=f"continue that run with: penstock resume {folder.path}"):
        launch_distributed(**arguments)


def test_the_arguments_mean_what_they_mean_there(tmp_path: Path) -> None:
    config = config_of(call(tmp_path))
    algorithm = config.algorithm
    assert (algorithm.aggregation, algorithm.kl_beta, algorithm.dual_clip) == ("sequence", 0.01, 0)
    assert (config.train.schedule, config.train.min_lr_ratio) == ("cosine", 0.1)
    assert (config.train.weight_decay, config.train.lr) == (0.01, 1e-6)
    assert (config.sampling.max_tokens, config.sampling.stop) == (8, ["</answer>"])
    assert (config.sampling.anneal.end, config.sampling.anneal.episodes) == (0.9, 1.0)
    assert (config.model.dtype, config.train.micro_batch_tokens) == ("float32", 2 * 40)
    assert config.tasks["train"].rewards[0].weight == 10
    assert config.launch.kind == "ray"
    assert config.eval.tasks["math"].max_prompt_tokens == 32


def test_a_batch_is_that_of_each_rank_with_prompts_of_its_own(tmp_path: Path) -> None:
    plugin = {"tp_size": 2, "pp_size": 1}
    more = {"num_consumer_procs": 4, "plugin_config": plugin, "inference_batch_size": 4}
    config = config_of(call(tmp_path, **more))
    assert (config.train.groups_per_step, config.sync.every_steps) == (4, 1)
    plugin |= {"sp_size": 2, "sequence_parallelism_mode": "split_gather"}
    assert config_of(call(tmp_path, **more)).train.parallel.copies == 2
    plugin |= {"sequence_parallelism_mode": "all_to_all"}
    assert config_of(call(tmp_path, **more)).train.parallel.copies == 4


def test_a_default_that_does_not_fit_the_model_is_lowered_and_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    generation = {"temperature": 1.0}
    config = config_of(call(tmp_path, generate_config=generation))
    context = context_length("demo")
    assert context is not None
    assert config.sampling.max_tokens == context // 2
    assert config.train.micro_batch_tokens == 2 * (32 + context // 2)
    assert f"note: sampling.max_tokens = {context // 2}, lowered from" in capsys.readouterr().err
    longer = config_of(call(tmp_path, generate_config=generation | {"max_new_tokens": 900}))
    assert (
        longer.sampling.max_tokens == 900
    )  # the caller's own: refused by its name when the run starts


def test_a_secret_in_the_call_is_refused(tmp_path: Path) -> None:
    overrides = {"launch": {"environment": {"WANDB_API_KEY": "x" * 40}}}
    with pytest.raises(UserError, match="got a secret"):
        config_of(call(tmp_path, overrides=overrides))


def test_dapo_of_the_example(tmp_path: Path) -> None:
    algorithm = config_of(call(tmp_path, grpo_config=DAPO, core_algo="DAPO")).algorithm
    assert (algorithm.name, algorithm.aggregation, algorithm.kl_beta) == ("dapo", "token", 0)
    assert (algorithm.filter_groups, algorithm.filter_range) == (True, (0.01, 0.99))
    assert (algorithm.overlong_penalty, algorithm.overlong_window) == (10, 2)
    assert (algorithm.clip_low, algorithm.clip_high, algorithm.mask_truncated) == (0.2, 0.28, True)


def test_vllm_of_the_example(tmp_path: Path) -> None:
    model = {
        "path": "demo",
        "gpu_memory_utilization": 0.7,
        "enforce_eager": True,
        "enable_chunked_prefill": True,
        "max_model_len": 40,
        "tensor_parallel_size": 2,
    }
    generation = {"top_k": -1, "top_p": 1.0, "temperature": 1.0, "max_tokens": 8}
    generation |= {"ignore_eos": True, "include_stop_str_in_output": True, "stop": ["</answer>"]}
    config = config_of(
        call(
            tmp_path,
            inference_backend="vllm",
            inference_model_config=model,
            generate_config=generation,
            num_proc_per_producer=2,
        )
    )
    assert (config.engine.name, config.sampling.top_k) == ("vllm", 0)
    assert config.engine.options["tensor_parallel_size"] == 2
    assert (config.sampling.max_tokens, config.sampling.stop) == (8, ["</answer>"])


def test_all_that_has_no_place_is_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(UserError) as refused:
        launch_distributed(**call(tmp_path, beams=4, best_of=2))
    assert "got 'beams', which it does not take, got 'best_of'" in str(refused.value)
    generation = {"temperature": 1.0, "beams": 4, "best_of": 2}
    with pytest.raises(UserError) as refused:
        launch_distributed(
            **call(tmp_path, generate_config=generation, plugin_config={"zero": 2, "tp_size": 1})
        )
    assert "generate_config: got 'beams', 'best_of', allowed: " in str(refused.value)
    assert "plugin_config: got 'zero', allowed: tp_size" in str(refused.value)
    assert not (tmp_path / "model" / "GRPO").is_symlink()


def test_links_exist_while_the_run_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(config: Config) -> None:
        folder = Path(config.run.dir, config.run.name)
        assert (tmp_path / "model" / "GRPO").readlink() == folder.resolve() / "checkpoints"
        assert (tmp_path / "rollouts").readlink() == folder.resolve()
        raise UserError("it cannot start")

    monkeypatch.setattr("penstock.run.entry.train", stop)
    with pytest.raises(UserError, match="it cannot start"):
        launch_distributed(**call(tmp_path, overrides=INLINE))
    assert not (tmp_path / "rollouts").is_symlink()  # no link to a run that never began


def test_every_key_of_the_table_is_one_of_the_config() -> None:
    for word, rule in RULES.items():
        section: Any = Config()
        for name in rule.key.split(".") if rule.key else ():
            if not isinstance(section, BaseModel):
                break  # a table of the user's names
            assert name in type(section).model_fields, word
            section = getattr(section, name)
