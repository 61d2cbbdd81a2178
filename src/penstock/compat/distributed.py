"""`launch_distributed`: a whole run on a Ray cluster from one Python call.

The parameters have the names and the meaning of ColossalAI's distributed GRPO (`parameters.py`); each
becomes a key of the config, and the run is the same as with `penstock train`. A parameter that has no
place here and is given is named in one line.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.compat.parameters import config_tree, merged, nested
from penstock.config import Config
from penstock.config.source import validate
from penstock.errors import UserError
from penstock.run import entry

_LINKS = {  # what a user asks for with a path, and where a run has it
    "save_dir": "checkpoints",
    "eval_save_dir": "eval",
    "rollout_save_dir": ".",
    "rollout_log_file": "rollouts.jsonl",
}
_NO_PLACE = {
    "master_addr": "Ray places the trainer ranks, and they find each other by themselves",
    "master_port": "the trainer ranks agree on a free port by themselves",
    "train_minibatch_size": "one update trains the whole batch; the gradient is accumulated over micro-batches",
}


def launch_distributed(
    num_producers: int,
    num_consumer_procs: int,
    num_episodes: float,
    train_batch_size: int,
    train_dataset_config: Mapping[str, Any],
    model_config: Mapping[str, Any],
    generate_config: Mapping[str, Any],
    *,
    grpo_config: Mapping[str, Any] | None = None,
    tokenizer_config: Mapping[str, Any] | None = None,
    plugin_config: Mapping[str, Any] | None = None,
    consumer_plugin_config: Mapping[str, Any] | None = None,
    inference_backend: str = "transformers",
    inference_batch_size: int | None = None,
    inference_microbatch_size: int | None = None,
    train_minibatch_size: int | None = None,
    train_microbatch_size: int | None = None,
    num_generations: int = 8,
    n_behind: int = 0,
    lr: float = 1e-6,
    anneal_temperature_to: float | None = None,
    eval_dataset_config: Mapping[str, str | Mapping[str, Any]] | None = None,
    eval_interval: int = 0,
    eval_generation_config: Mapping[str, Any] | None = None,
    eval_save_dir: str = "",
    save_interval: int = 100,
    save_dir: str = "",
    log_rollout_interval: int = 20,
    rollout_save_dir: str = "",
    rollout_log_file: str = "",
    enable_profiling: bool = False,
    project_name: str = "penstock",
    run_dir: str = "runs",
    run_name: str = "",
    wandb_group_name: str = "",
    ray_address: str = "",
    master_addr: str = "",
    master_port: int | None = None,
    gloo_timeout: float | None = None,
    gpus_per_producer: float = 0,
    gpus_per_consumer: float = 0,
    colocate: bool = False,
    seed: int = 0,
    overrides: Mapping[str, Any] | None = None,
) -> Path:
    """Train to the end; return the run folder.

    `train_batch_size` is the number of prompts per update over all consumers, `inference_batch_size` the
    prompts of each producer between two weight syncs; `n_behind` 0 is on-policy. `grpo_config` holds
    `algo`, `reward_fn_type` and fields of [algorithm]; `overrides` is any other part of the config as
    nested tables, e.g. {"track": {"trackers": ["wandb"]}} for W&B.
    """
    arguments = dict(locals())
    config = distributed_config(arguments)
    for name, reason in _NO_PLACE.items():
        if arguments[name]:
            print(f"launch_distributed: {name} has no effect: {reason}", file=sys.stderr)
    links = {Path(arguments[name]): inside for name, inside in _LINKS.items() if arguments[name]}
    for path in links:
        if path.exists() or path.is_symlink():
            raise UserError(
                f"launch_distributed: got {path}, which exists, allowed: a path for a link to the run folder"
            )
    folder = entry.train(config).path
    for path, inside in links.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to((folder / inside).resolve())
    return folder


def distributed_config(arguments: Mapping[str, Any]) -> Config:
    """The config that the arguments of `launch_distributed` stand for."""
    tree = merged(nested("launch.kind", "ray"), config_tree(arguments))
    tree = merged(tree, _sizes(arguments, validate(tree)))
    return validate(merged(tree, arguments["overrides"] or {}))


def _sizes(arguments: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """The settings that batch sizes stand for."""
    tables: dict[str, Any] = {}
    if per_sync := arguments["inference_batch_size"]:
        producers, step = config.launch.num_producers, config.train.groups_per_step
        if per_sync * producers % step:
            raise UserError(
                f"inference_batch_size: got {per_sync} x {producers} producers, "
                f"allowed: a multiple of train_batch_size = {step} together"
            )
        tables["sync"] = {"every_steps": per_sync * producers // step}
    if prompts := arguments["inference_microbatch_size"]:
        tables["engine"] = {"max_slots": prompts * config.sampling.num_generations}
    if sequences := arguments["train_microbatch_size"]:
        longest = config.tasks["train"].max_prompt_tokens + config.sampling.max_tokens
        tables["train"] = {"micro_batch_tokens": sequences * longest}
    return tables
