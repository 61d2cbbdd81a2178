"""`launch_distributed`: a whole run on a Ray cluster from one Python call.

The parameters have the names and the meaning of ColossalAI's distributed GRPO; each becomes a key of the
config, and the run is the same as with `penstock train`. A parameter that has no place here and is given
is named in one line.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.compat.settings import (
    eval_tables,
    plugin_tables,
    producer_config,
)
from penstock.config import Config
from penstock.config.source import validate
from penstock.errors import UserError
from penstock.run import entry

ALGORITHMS = {
    "GRPO": "grpo",
    "DAPO": "dapo",
    "RLOO": "rloo",
    "REINFORCE_PPB": "reinforce_pp_baseline",
}
_OWN_PLACES = {  # what a user asks for with a path, and where a run has it
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
    given = dict(locals())
    config = distributed_config(given)
    for name, reason in _NO_PLACE.items():
        if given[name]:
            print(f"launch_distributed: {name} has no effect: {reason}", file=sys.stderr)
    places = {Path(given[name]): inside for name, inside in _OWN_PLACES.items() if given[name]}
    for path in places:
        if path.exists() or path.is_symlink():
            raise UserError(
                f"launch_distributed: got {path}, which exists, allowed: a path for a link to the run folder"
            )
    folder = entry.train(config).path
    for path, inside in places.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to((folder / inside).resolve())
    return folder


def distributed_config(given: Mapping[str, Any]) -> Config:
    """Return the config that the arguments of `launch_distributed` stand for."""
    algorithm = dict(given["grpo_config"] or {})
    algo = algorithm.pop("algo", "GRPO")
    algorithm["name"] = ALGORITHMS.get(algo, algo)
    base = producer_config(
        given["train_dataset_config"],
        given["model_config"],
        given["generate_config"],
        tokenizer_config=given["tokenizer_config"],
        backend=given["inference_backend"],
        num_generations=given["num_generations"],
        grpo_config=algorithm,
        seed=given["seed"],
    ).model_dump(exclude_unset=True)
    tree = _merged(base, _tables(given, base["tasks"]["train"]))
    for plugin in (given["plugin_config"], given["consumer_plugin_config"]):
        tree = _merged(tree, plugin_tables(plugin or {}))
    tree = _merged(tree, _sizes(given, validate(tree)))
    return validate(_merged(tree, given["overrides"] or {}))


def _tables(given: Mapping[str, Any], train: Mapping[str, Any]) -> dict[str, Any]:
    anneal = given["anneal_temperature_to"]
    return {
        "run": {
            "dir": given["run_dir"],
            "name": given["run_name"],
            "group": given["wandb_group_name"],
        },
        "sampling": {} if anneal is None else {"anneal": {"end": anneal, "episodes": 1.0}},
        "produce": {"max_staleness": given["n_behind"]},
        "train": {
            "episodes": given["num_episodes"],
            "groups_per_step": given["train_batch_size"],
            "lr": given["lr"],
        },
        "checkpoint": {"every_steps": given["save_interval"]},
        "track": {
            "project": given["project_name"],
            "rollouts_every_steps": given["log_rollout_interval"],
        },
        "eval": {
            "every_steps": max(0, given["eval_interval"]),
            "tasks": eval_tables(
                given["eval_dataset_config"], train, given["eval_generation_config"]
            ),
        },
        "launch": {
            "kind": "ray",
            "address": given["ray_address"],
            "num_producers": given["num_producers"],
            "num_consumers": given["num_consumer_procs"],
            "producers": {"gpus": given["gpus_per_producer"]},
            "consumers": {"gpus": given["gpus_per_consumer"]},
            "colocate": given["colocate"],
        },
    }


def _sizes(given: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """Return the settings that batch sizes and time-outs stand for."""
    tables: dict[str, Any] = {}
    if per_sync := given["inference_batch_size"]:
        prompts, step = per_sync * given["num_producers"], given["train_batch_size"]
        if prompts % step:
            raise UserError(
                f"inference_batch_size: got {per_sync} x {given['num_producers']} producers, "
                f"allowed: a multiple of train_batch_size = {step} together"
            )
        tables["sync"] = {"every_steps": prompts // step}
    if prompts := given["inference_microbatch_size"]:
        tables["engine"] = {"max_slots": prompts * given["num_generations"]}
    if sequences := given["train_microbatch_size"]:
        longest = config.tasks["train"].max_prompt_tokens + config.sampling.max_tokens
        tables["train"] = {"micro_batch_tokens": sequences * longest}
    if seconds := given["gloo_timeout"]:
        tables["watchdog"] = {"stall_s": seconds}
    return tables


def _merged(tree: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(tree)
    for key, value in above.items():
        own = result.get(key)
        both = isinstance(own, Mapping) and isinstance(value, Mapping)
        result[key] = _merged(own, value) if both else value  # type: ignore[arg-type]
    return result
