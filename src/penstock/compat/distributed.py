"""`launch_distributed`: a whole run on a Ray cluster from one Python call.

The parameters have the names and the meaning of ColossalAI's distributed GRPO (`arguments_of`); each
becomes a key of the config, and the run is the same as with `penstock train`. A parameter that has no
place here and is given is named in one line.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from penstock.config import AlgorithmConfig, Config, ModelConfig, SamplingConfig, TaskConfig
from penstock.config.changes import flat
from penstock.config.mistakes import rows
from penstock.config.sections import Section
from penstock.config.source import config_of, tree_of
from penstock.config.tree import leaves
from penstock.convert.tables import COLOSSALAI_LOSSES, DEFAULTS, colossalai_reward, rules
from penstock.errors import UserError
from penstock.files import pasted, say
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
        target = path.resolve()
        runs = [folder for folder in (target, *target.parents) if (folder / CONFIG).exists()]
        if path.is_symlink() and runs:
            raise UserError(
                f"launch_distributed: got {path}, which leads into the run {runs[0]}; allowed: another path, or "
                f"continue that run with: penstock resume {pasted(runs[0])}"
            )
        if path.exists():
            raise UserError(
                f"launch_distributed: got {path}, which exists, allowed: a path for a link to the run folder"
            )
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


def distributed_config(arguments: Mapping[str, Any]) -> Config:
    """The config that the arguments of `launch_distributed` stand for."""
    if not any(arguments[name] for name in ("model_config", "inference_model_config")):
        raise UserError("launch_distributed: got no model_config, allowed: a path in it")
    settings = {"launch.kind": "ray"} | settings_of("launch_distributed", arguments)
    copies = math.prod(_plugin(arguments).values())
    ranks = max(1, int(arguments["num_consumer_procs"]) // copies)  # that train different prompts
    settings["train.groups_per_step"] = arguments["train_batch_size"] * ranks
    config = config_of(settings).config
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
    overrides = flat(arguments["overrides"] or {})
    if "train.steps" in overrides:
        del settings["train.episodes"]
    return checked_config(settings | overrides)


def checked_config(settings: Mapping[str, Any]) -> Config:
    """The config of a call's settings; tell what was lowered to fit the model."""
    loaded = config_of(settings)
    for note in loaded.notes:
        say(f"note: {note}", error=True)
    return loaded.config


# -- the parameters of ColossalAI's calls -------------------------------------------------------


_REQUIRED = "required"
RULES = rules("colossalai_calls")
# Parameters that are dictionaries: the rows of the table, our section and its fields.
_DICTIONARIES: dict[str, tuple[str, str, type[Section] | None]] = {
    "train_dataset_config": ("train_dataset_config", "tasks.train", TaskConfig),
    "model_config": ("model_config", "model", ModelConfig),
    "inference_model_config": ("model_config", "model", ModelConfig),
    "train_model_config": ("model_config", "model", ModelConfig),
    "generate_config": ("generate_config", "sampling", SamplingConfig),
    "eval_generation_config": ("generate_config", "eval.sampling", SamplingConfig),
    "tokenizer_config": ("tokenizer_config", "", None),
    "grpo_config": ("grpo_config", "algorithm", AlgorithmConfig),
    "plugin_config": ("plugin_config", "", None),
    "consumer_plugin_config": ("plugin_config", "", None),
}
_IN_TP_GROUP = ("split_gather", "ring")  # sequence parallelism of the tensor-parallel ranks
_INHERITED = ("rewards", "system_prompt", "max_prompt_tokens", "chat_template_kwargs")


def arguments_of(
    call: str, column: str, positional: tuple[Any, ...], named: Mapping[str, Any]
) -> dict[str, Any]:
    """The value of every parameter of a call; a wrong call names all that is wrong with it.

    `column` of the table has the default of each parameter as JSON, or the word required.
    """
    table = {row["word"]: row[column] for row in rows("colossalai_calls") if row[column]}
    given = {**dict(zip(table, positional, strict=False)), **named}
    wrong = [f"got {name!r}, which it does not take" for name in given if name not in table]
    wrong += [f"got no {name}" for name in table if table[name] == _REQUIRED and name not in given]
    if len(positional) > len(table) or wrong:
        raise UserError(f"{call}: {', '.join(wrong)}; allowed: {', '.join(table)}")
    return {
        name: given[name] if name in given else json.loads(default)
        for name, default in table.items()
    }


def settings_of(call: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that the arguments of a call stand for, by their keys; None sets nothing."""
    grpo = arguments.get("grpo_config") or {}
    settings, unknown = _defaults(arguments, grpo), list[str]()
    for name, value in arguments.items():
        words, _, section = _DICTIONARIES.get(name, (name, "", None))
        theirs = [word.partition(".")[2] for word in RULES if word.startswith(f"{words}.")]
        allowed = dict.fromkeys([*theirs, *(section.model_fields if section else ())])
        fields = value if name in _DICTIONARIES and value is not None else {}
        if others := [field for field in fields if field not in allowed]:
            got = ", ".join(map(repr, others))
            unknown.append(f"{name}: got {got}, allowed: {', '.join(allowed)}")
        for word, key, inner in _words(name, value):
            if key:
                settings |= leaves(inner, key)
            elif word and inner:
                print(f"{call}: {word} has no effect: {RULES[word].note}", file=sys.stderr)
    if unknown:
        raise UserError("; ".join(unknown))
    generation, data = arguments["generate_config"], arguments["train_dataset_config"]
    longest = generation.get("max_length")
    if longest and not (generation.get("max_new_tokens") or generation.get("max_tokens")):
        settings["sampling.max_tokens"] = longest - data.get("max_length", 0)
    if grpo.get("filter_range") is not None:
        settings["algorithm.filter_groups"] = True
    if arguments.get("anneal_temperature_to") is not None:
        settings["sampling.anneal.episodes"] = 1.0
    plugin = _plugin(arguments)
    if plugin["sp_size"] > 1:
        settings["train.parallel.context"] = plugin["sp_size"]
    shards = arguments.get("num_proc_per_producer") or 1
    if shards > 1 and "vllm" in str(arguments.get("inference_backend")):
        settings["engine.options.tensor_parallel_size"] = shards
    return settings | {"eval.tasks": _eval_tasks(arguments, settings)}


def _defaults(arguments: Mapping[str, Any], grpo: Mapping[str, Any]) -> dict[str, Any]:
    """What a call means without saying it: the loss of its algorithm, the optimizer, the reward."""
    settings = {
        key: value
        for key, value, _ in DEFAULTS["colossalai"]
        if key.startswith(("algorithm.", "train.")) and key != "train.episodes"
    }
    algorithm = str(grpo.get("algo") or arguments.get("core_algo") or "GRPO")
    loss = COLOSSALAI_LOSSES.get(algorithm.upper(), {"name": algorithm})
    named = grpo.get("reward_fn_type") or arguments.get("evaluation_function_type")
    url = grpo.get("code_verifier_api_url")
    reward = colossalai_reward(str(named or "think_answer_tags"), [url] if url else [])
    return settings | dict(leaves(loss, "algorithm")) | {"tasks.train.rewards": [reward]}


def _words(name: str, value: Any) -> Iterator[tuple[str, str, Any]]:
    """Yield (word, key, value) of a parameter; without a key: a word that has no effect."""
    if name not in _DICTIONARIES:
        fields, words, section = {"": value}, name, ""
    else:
        fields, (words, section, _) = value or {}, _DICTIONARIES[name]
    for field, inner in fields.items():
        word = f"{words}.{field}" if field else words
        rule = RULES.get(word)
        if inner is None or (rule is None and not section) or (rule and rule.is_joined):
            continue
        if rule is None:
            yield word, f"{section}.{field}", inner
        elif rule.key:
            key = rule.key.replace("sampling.", "eval.sampling.") if "eval" in section else rule.key
            if (translated := rule.value(inner)) is not None:
                yield word, key, translated
        elif rule.note:
            yield word, "", inner


def _plugin(arguments: Mapping[str, Any]) -> dict[str, int]:
    """The ranks along each axis of the plugin's mesh; sequence parallelism may use the tensor-parallel ones."""
    plugin = arguments.get("plugin_config") or arguments.get("consumer_plugin_config") or {}
    sizes = {axis: plugin.get(axis) or 1 for axis in ("tp_size", "pp_size", "sp_size")}
    if plugin.get("sequence_parallelism_mode") in _IN_TP_GROUP:
        sizes["sp_size"] = 1
    return sizes


def _eval_tasks(
    arguments: Mapping[str, Any], settings: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Tables of [eval.tasks] from {task: path} or {task: {path, max_length, system_prompt}}.

    What a task does not give, it takes from the training table: rewards, system prompt, longest prompt.
    """
    train = tree_of(settings)["tasks"]["train"]
    shared = {name: train[name] for name in _INHERITED if name in train}
    tables = {}
    for task, source in (arguments["eval_dataset_config"] or {}).items():
        fields = {"path": source} if isinstance(source, str) else source
        if not isinstance(fields, Mapping) or not {"path", "data"} & set(fields):
            raise UserError(
                f"eval_dataset_config: {task} got {source!r}, allowed: a path, or a table with a path"
            )
        words = _words("train_dataset_config", fields)
        tables[task] = {**shared, **{key.rpartition(".")[2]: value for _, key, value in words}}
    return tables
