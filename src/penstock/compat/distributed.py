"""`launch_distributed`: a whole run on a Ray cluster from one Python call.

The parameters have the names and the meaning of ColossalAI's distributed GRPO (`parameters.py`); each
becomes a key of the config, and the run is the same as with `penstock train`. A parameter that has no
place here and is given is named in one line.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from penstock.compat.parameters import arguments_of, data_ranks, settings_of
from penstock.config import Config
from penstock.config.changes import flat
from penstock.config.source import tree_of, validate
from penstock.errors import UserError
from penstock.run import entry
from penstock.store.run_folder import CONFIG

_LINKS = {  # what a user asks for with a path, and where a run has it
    "save_dir": "checkpoints",
    "eval_save_dir": "eval",
    "rollout_save_dir": ".",
    "rollout_log_file": "rollouts.jsonl",
}


def launch_distributed(**parameters: Any) -> Path:
    """Train to the end; return the run folder.

    The parameters are those that ColossalAI's example gives (the column launch of
    `config/systems/colossalai_calls.csv`); `overrides` is any other part of the config, e.g. {"track":
    {"trackers": ["wandb"]}} for W&B. The folders that are asked for (save_dir, ...) are links into the run
    folder from the start.
    """
    arguments = arguments_of("launch_distributed", "launch", (), parameters)
    links = {Path(arguments[name]): inside for name, inside in _LINKS.items() if arguments[name]}
    for path in links:
        _refuse_taken(path)
    if links and not arguments["run_name"]:
        arguments["run_name"] = f"distributed-{datetime.now():%Y%m%d-%H%M%S-%f}"
    config = distributed_config(arguments)
    folder = Path(config.run.dir, config.run.name).resolve()
    for path, inside in links.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # a link to a run that never began
        path.symlink_to(folder / inside)
    try:
        return entry.train(config).path
    finally:
        if links and not folder.exists():
            for path in links:
                path.unlink()


def _refuse_taken(path: Path) -> None:
    target = path.resolve()
    run = next((folder for folder in (target, *target.parents) if (folder / CONFIG).exists()), None)
    if path.is_symlink() and run is not None:
        raise UserError(
            f"launch_distributed: got {path}, which leads into the run {run}; allowed: another path, or "
            f"continue that run with: penstock resume {run}"
        )
    if path.exists():
        raise UserError(
            f"launch_distributed: got {path}, which exists, allowed: a path for a link to the run folder"
        )


def distributed_config(arguments: Mapping[str, Any]) -> Config:
    """The config that the arguments of `launch_distributed` stand for."""
    if not any(arguments[name] for name in ("model_config", "inference_model_config")):
        raise UserError("launch_distributed: got no model_config, allowed: a path in it")
    settings = {"launch.kind": "ray"} | settings_of("launch_distributed", arguments)
    settings["train.groups_per_step"] = arguments["train_batch_size"] * data_ranks(arguments)
    settings |= _sizes(arguments, validate(tree_of(settings)))
    overrides = flat(arguments["overrides"] or {})
    if "train.steps" in overrides:
        del settings["train.episodes"]
    return validate(tree_of(settings | overrides))


def _sizes(arguments: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """The settings that batch sizes stand for."""
    settings: dict[str, Any] = {}
    if per_sync := arguments["inference_batch_size"]:
        producers, step = config.launch.num_producers, config.train.groups_per_step
        if per_sync * producers % step:
            raise UserError(
                f"inference_batch_size: got {per_sync} x {producers} producers, "
                f"allowed: a multiple of train_batch_size = {step} together"
            )
        settings["sync.every_steps"] = per_sync * producers // step
    if prompts := arguments["inference_microbatch_size"]:
        settings["engine.max_slots"] = prompts * config.sampling.num_generations
    grpo = arguments["grpo_config"] or {}
    if sequences := arguments["train_microbatch_size"] or grpo.get("train_microbatch_size"):
        longest = config.tasks["train"].max_prompt_tokens + config.sampling.max_tokens
        settings["train.micro_batch_tokens"] = sequences * longest
    return settings
