"""From the dictionaries of ColossalAI's entry points to tables of a config; a key without a place is refused.

Keys of our own tables are accepted beside theirs, so that any setting can be given in the same call.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.config import Config, SamplingConfig
from penstock.config.source import validate
from penstock.errors import UserError

_SAMPLING = {"max_new_tokens": "max_tokens"}
_DATA = {"path": "data", "max_length": "max_prompt_tokens"}
_MODEL = {"pretrained": "path", "torch_dtype": "dtype"}
_TOKENIZER = {"path": "tokenizer", "trust_remote_code": "trust_remote_code"}
_PRECISION = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_AXES = {"tp_size": "tensor", "pp_size": "pipeline", "sp_size": "context", "zero_stage": "zero"}


def producer_config(
    train_dataset_config: Mapping[str, Any],
    model_config: Mapping[str, Any],
    generate_config: Mapping[str, Any],
    *,
    tokenizer_config: Mapping[str, Any] | None = None,
    backend: str = "transformers",
    num_generations: int = 8,
    grpo_config: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> Config:
    """Return the producing half of a config from the dictionaries that a producer is given."""
    algorithm = dict(grpo_config or {})
    reward: dict[str, Any] = {"type": algorithm.pop("reward_fn_type", "think_answer_tags")}
    if url := algorithm.pop("code_verifier_api_url", None):
        reward["options"] = {"servers": [url]}
    tree: dict[str, Any] = {
        "seed": seed,
        "model": {**_renamed(model_config, _MODEL), **_tokenizer(tokenizer_config or {})},
        "tasks": {"train": {**_renamed(train_dataset_config, _DATA), "rewards": [reward]}},
        "sampling": {**sampling_table(generate_config), "num_generations": num_generations},
        "engine": {"name": backend},
        "algorithm": algorithm,
    }
    return validate(tree)


def sampling_table(given: Mapping[str, Any], key: str = "generate_config") -> dict[str, Any]:
    """Return fields of [sampling]; a key that is none of them is refused."""
    table = _renamed(given, _SAMPLING)
    for name in table.keys() - SamplingConfig.model_fields.keys():
        allowed = ", ".join([*_SAMPLING, *SamplingConfig.model_fields])
        raise UserError(f"{key}: got {name!r}, allowed: {allowed}")
    if table.get("top_k") in (-1, None):
        table.pop("top_k", None)
    return table


def eval_tables(
    given: Mapping[str, str | Mapping[str, Any]] | None,
    train: Mapping[str, Any],
    sampling: Mapping[str, Any] | None = None,
) -> dict[str, dict[str, Any]]:
    """Return tables of [eval.tasks] from {task: path} or {task: {path, max_length, system_prompt}}.

    What a task does not give, it takes from the training table: rewards, system prompt, longest prompt.
    """
    shared = {
        key: train[key]
        for key in ("rewards", "system_prompt", "max_prompt_tokens", "chat_template_kwargs")
        if key in train
    }
    own = {"sampling": sampling_table(sampling, "eval_generation_config")} if sampling else {}
    tables = {}
    for name, source in (given or {}).items():
        fields = {"path": source} if isinstance(source, str) else source
        if not isinstance(fields, Mapping) or not {"path", "data"} & set(fields):
            raise UserError(
                f"eval_dataset_config: {name} got {source!r}, allowed: a path, or a table with a path"
            )
        tables[name] = {**shared, **own, **_renamed(fields, _DATA)}
    return tables


def plugin_tables(given: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return what a trainer plugin's settings are in a config."""
    tables: dict[str, dict[str, Any]] = {}
    for key, value in given.items():
        if key in _AXES:
            if value:  # zero_stage 0 leaves the default
                train = tables.setdefault("train", {})
                train.setdefault("parallel", {})[_AXES[key]] = value
        elif key == "precision":
            tables["model"] = {"dtype": _PRECISION.get(value, value)}
        elif key == "max_norm":
            tables.setdefault("train", {})["max_grad_norm"] = value
        else:
            allowed = ", ".join([*_AXES, "precision", "max_norm"])
            raise UserError(f"plugin_config: got {key!r}, allowed: {allowed}")
    return tables


def _tokenizer(given: Mapping[str, Any]) -> dict[str, Any]:
    for name in given.keys() - _TOKENIZER.keys():
        raise UserError(f"tokenizer_config: got {name!r}, allowed: {', '.join(_TOKENIZER)}")
    return _renamed(given, _TOKENIZER)


def _renamed(given: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {names.get(key, key): value for key, value in given.items()}
