"""The parameters of ColossalAI's entry points: the key of the config that each sets, and how.

Values that are dictionaries may hold fields of our own table beside theirs, so that any setting can be
given in the same call; a key without a place is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.config import SamplingConfig
from penstock.errors import UserError

_ALGORITHMS = {
    "GRPO": "grpo",
    "DAPO": "dapo",
    "RLOO": "rloo",
    "REINFORCE_PPB": "reinforce_pp_baseline",
}
_REWARD = "think_answer_tags"
_SAMPLING = {"max_new_tokens": "max_tokens"}
_DATA = {"path": "data", "max_length": "max_prompt_tokens"}
_MODEL = {"pretrained": "path", "torch_dtype": "dtype"}
_TOKENIZER = {"path": "tokenizer", "trust_remote_code": "trust_remote_code"}
_PRECISION = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_PLUGIN = {
    "tp_size": "train.parallel.tensor",
    "pp_size": "train.parallel.pipeline",
    "sp_size": "train.parallel.context",
    "zero_stage": "train.parallel.zero",
    "precision": "model.dtype",
    "max_norm": "train.max_grad_norm",
}


# ---- dictionaries as tables of a config


def _renamed(names: Mapping[str, str]) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    return lambda fields: {names.get(name, name): value for name, value in fields.items()}


def _sampling(parameter: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of [sampling]; a key that is none of them is refused."""
    table = _renamed(_SAMPLING)(fields)
    _refuse_others(parameter, table, [*_SAMPLING, *SamplingConfig.model_fields])
    if table.get("top_k") in (-1, None):
        table.pop("top_k", None)
    return table


def _tokenizer(fields: Mapping[str, Any]) -> dict[str, Any]:
    _refuse_others("tokenizer_config", fields, _TOKENIZER)
    return _renamed(_TOKENIZER)(fields)


def _algorithm(fields: Mapping[str, Any]) -> dict[str, Any]:
    """[algorithm], and the reward that stands in the same dictionary there."""
    algorithm = dict(fields)
    if name := algorithm.pop("algo", None):
        algorithm["name"] = _ALGORITHMS.get(name, name)
    reward: dict[str, Any] = {"type": algorithm.pop("reward_fn_type", _REWARD)}
    if url := algorithm.pop("code_verifier_api_url", None):
        reward["options"] = {"servers": [url]}
    return {"algorithm": algorithm, "tasks": {"train": {"rewards": [reward]}}}


def _plugin(fields: Mapping[str, Any]) -> dict[str, Any]:
    _refuse_others("plugin_config", fields, _PLUGIN)
    tree: dict[str, Any] = {}
    for name, value in fields.items():
        if value:  # zero_stage 0 leaves the default
            tree = merged(tree, nested(_PLUGIN[name], _PRECISION.get(value, value)))
    return tree


def _refuse_others(
    parameter: str, fields: Mapping[str, Any], allowed: Sequence[str] | Mapping[str, Any]
) -> None:
    for name in fields:
        if name not in allowed:
            raise UserError(f"{parameter}: got {name!r}, allowed: {', '.join(allowed)}")


def _eval_tasks(
    arguments: Mapping[str, Any], train: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Tables of [eval.tasks] from {task: path} or {task: {path, max_length, system_prompt}}.

    What a task does not give, it takes from the training table: rewards, system prompt, longest prompt.
    """
    names = ("rewards", "system_prompt", "max_prompt_tokens", "chat_template_kwargs")
    shared = {name: train[name] for name in names if name in train}
    tables = {}
    for task, source in (arguments["eval_dataset_config"] or {}).items():
        fields = {"path": source} if isinstance(source, str) else source
        if not isinstance(fields, Mapping) or not {"path", "data"} & set(fields):
            raise UserError(
                f"eval_dataset_config: {task} got {source!r}, allowed: a path, or a table with a path"
            )
        tables[task] = {**shared, **_renamed(_DATA)(fields)}
    return tables


# ---- the parameters


# Parameters that set a key to their own value.
KEYS = {
    "num_producers": "launch.num_producers",
    "num_consumer_procs": "launch.num_consumers",
    "num_episodes": "train.episodes",
    "train_batch_size": "train.groups_per_step",
    "backend": "engine.name",
    "inference_backend": "engine.name",
    "num_generations": "sampling.num_generations",
    "n_behind": "produce.max_staleness",
    "lr": "train.lr",
    "save_interval": "checkpoint.every_steps",
    "log_rollout_interval": "track.rollouts_every_steps",
    "project_name": "track.wandb.project",
    "run_dir": "run.dir",
    "run_name": "run.name",
    "ray_address": "launch.address",
    "gloo_timeout": "watchdog.stall_s",
    "gpus_per_producer": "launch.ray_options.producers.num_gpus",
    "gpus_per_consumer": "launch.ray_options.consumers.num_gpus",
    "colocate": "launch.colocate",
    "seed": "seed",
}
# Parameters whose value is translated first; without a key, it becomes a tree of settings.
TRANSLATED: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "train_dataset_config": ("tasks.train", _renamed(_DATA)),
    "model_config": ("model", _renamed(_MODEL)),
    "generate_config": ("sampling", lambda fields: _sampling("generate_config", fields)),
    "tokenizer_config": ("model", _tokenizer),
    "grpo_config": ("", _algorithm),
    "plugin_config": ("", _plugin),
    "consumer_plugin_config": ("", _plugin),
    "anneal_temperature_to": ("sampling.anneal", lambda end: {"end": end, "episodes": 1.0}),
    "eval_generation_config": (
        "eval.sampling",
        lambda fields: _sampling("eval_generation_config", fields),
    ),
    "eval_interval": ("eval.every_steps", lambda steps: max(0, steps)),
    "wandb_group_name": ("track.wandb.group", lambda name: name or None),
}


def config_tree(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that the arguments of a call stand for; None sets nothing."""
    tree = nested("tasks.train.rewards", [{"type": _REWARD}])
    for name, (key, translate) in TRANSLATED.items():
        if (value := arguments.get(name)) is not None:
            tree = merged(tree, nested(key, translate(value)))
    for name, key in KEYS.items():
        if (value := arguments.get(name)) is not None:
            tree = merged(tree, nested(key, value))
    return merged(tree, nested("eval.tasks", _eval_tasks(arguments, tree["tasks"]["train"])))


def nested(key: str, value: Any) -> dict[str, Any]:
    """The tree in which `key` has this value; without a key the value is the tree."""
    for name in reversed(key.split(".") if key else []):
        value = {name: value}
    return dict(value)


def merged(tree: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(tree)
    for key, value in above.items():
        below = result.get(key)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            result[key] = merged(below, value)
        else:
            result[key] = value
    return result
