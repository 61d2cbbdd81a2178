"""`launch_distributed`: a whole run on a Ray cluster from one Python call.

The parameters have the names and the meaning of ColossalAI's distributed GRPO; each becomes a key of the
config, and the run is the same as with `penstock train`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock import preflight
from penstock.compat.producers import producer_config, validated
from penstock.session import train_new

ALGORITHMS = {
    "GRPO": "grpo",
    "DAPO": "dapo",
    "RLOO": "rloo",
    "REINFORCE_PPB": "reinforce_pp_baseline",
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
    inference_backend: str = "transformers",
    num_generations: int = 8,
    n_behind: int = 0,
    lr: float = 1e-6,
    eval_dataset_config: Mapping[str, str] | None = None,
    eval_interval: int = 0,
    save_interval: int = 100,
    log_rollout_interval: int = 20,
    project_name: str = "penstock",
    run_dir: str = "runs",
    run_name: str = "",
    wandb_group_name: str = "",
    ray_address: str = "",
    gpus_per_producer: float = 0,
    gpus_per_consumer: float = 0,
    colocate: bool = False,
    seed: int = 0,
    overrides: Mapping[str, Any] | None = None,
) -> Path:
    """Train to the end; return the run folder.

    `train_batch_size` is the number of prompts per update over all consumers; `n_behind` 0 is on-policy.
    `grpo_config` holds `algo`, `reward_fn_type` and fields of [algorithm]; `overrides` is any other part
    of the config as nested tables, e.g. {"track": {"trackers": ["wandb"]}} for W&B.
    """
    algorithm = dict(grpo_config or {})
    algo = algorithm.pop("algo", "GRPO")
    algorithm["name"] = ALGORITHMS.get(algo, algo)
    base = producer_config(
        train_dataset_config,
        model_config,
        generate_config,
        tokenizer_config=tokenizer_config,
        backend=inference_backend,
        num_generations=num_generations,
        grpo_config=algorithm,
        seed=seed,
    ).model_dump(exclude_unset=True)
    rewards = base["tasks"]["train"]["rewards"]
    tree = {
        **base,
        "run": {"dir": run_dir, "name": run_name, "group": wandb_group_name},
        "produce": {"max_staleness": n_behind},
        "train": {"episodes": num_episodes, "groups_per_step": train_batch_size, "lr": lr},
        "checkpoint": {"every_steps": save_interval},
        "track": {"project": project_name, "rollouts_every_steps": log_rollout_interval},
        "eval": {
            "every_steps": max(0, eval_interval),
            "tasks": {
                name: {"data": path, "rewards": rewards}
                for name, path in (eval_dataset_config or {}).items()
            },
        },
        "launch": {
            "kind": "ray",
            "address": ray_address,
            "num_producers": num_producers,
            "num_consumers": num_consumer_procs,
            "gpus_per_producer": gpus_per_producer,
            "gpus_per_consumer": gpus_per_consumer,
            "colocate": colocate,
        },
    }
    config = validated(_merged(tree, overrides or {}))
    preflight.check(config)
    return train_new(config).path


def _merged(tree: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(tree)
    for key, value in above.items():
        own = result.get(key)
        both = isinstance(own, Mapping) and isinstance(value, Mapping)
        result[key] = _merged(own, value) if both else value  # type: ignore[arg-type]
    return result
