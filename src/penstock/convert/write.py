"""Writes the settings of another system as our TOML, with a comment on every line that changed meaning."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.config.source import load_config, toml_key, toml_value
from penstock.convert.tables import (
    COLOSSALAI_FORMS,
    COLOSSALAI_LOSSES,
    DEFAULTS,
    EVAL,
    SPELLINGS,
    TASK,
    WORDS,
    Rule,
    read,
    trackers,
)
from penstock.convert.words import OF_EVALUATION, FromEnvironment, Unread, read_words
from penstock.errors import UserError


@dataclass(slots=True)
class Conversion:
    """What was read, what it became, and what is left."""

    words: dict[str, Any]
    settings: dict[str, tuple[Any, str]] = field(default_factory=dict)  # key: (value, comment)
    left: list[str] = field(default_factory=list)  # words without a counterpart, and why
    used: set[str] = field(default_factory=set)

    def take(self, word: str, default: Any = None) -> Any:
        """The value of a word that is translated together with others."""
        value = self.words.get(word, default)
        self.used.add(word)
        if isinstance(value, Unread):
            self.left.append(f"{word} = {value}: code, or a variable that is not set")
            return default
        return read(value)

    def put(self, key: str, value: Any, comment: str = "") -> None:
        self.settings[key] = (value, comment)

    def value(self, key: str, default: Any) -> Any:
        return self.settings[key][0] if key in self.settings else default


def write_config(system: str, file: Path, out: Path | None = None) -> Path:
    """Write the TOML for a file of `system` to `out`, which must not exist; return its path."""
    if system not in WORDS:
        raise UserError(f"convert: got {system!r}, allowed: {', '.join(WORDS)}")
    text = convert(system, file)
    path = out or Path(f"{file.stem}.toml")
    try:
        with path.open("x", encoding="utf-8") as written:
            written.write(text)
    except OSError as error:
        raise UserError(f"convert: cannot write {path}: {error.strerror}; give --out") from None
    try:
        load_config(path)
    except UserError as error:  # a value that is not allowed here
        raise UserError(f"{error} (in {path}, which was written: correct it there)") from None
    return path


def convert(system: str, path: Path) -> str:
    """The TOML for a command line or a config file of `system`."""
    spellings = SPELLINGS[system]
    conversion = Conversion({spellings.get(word, word): v for word, v in read_words(path).items()})
    for word, value in conversion.words.items():
        _translate(conversion, word, value, WORDS[system].get(word))
    try:
        TOGETHER[system](conversion)
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise UserError(f"convert: {path}: its numbers cannot be read: {error}") from None
    conversion.left += [
        f"{word} = {_shown(value)}: not known to this conversion"
        for word, value in conversion.words.items()
        if word not in conversion.used
    ]
    for key, value, note in DEFAULTS[system]:
        if key not in conversion.settings and not (
            key == "train.episodes" and "train.steps" in conversion.settings
        ):
            conversion.put(key, value, note)
    _complete(conversion)
    return _text(system, path, conversion)


def _translate(conversion: Conversion, word: str, value: Any, rule: Rule | None) -> None:
    if rule is None:
        if word.removeprefix(OF_EVALUATION) in WORDS["xtuner"] and word.startswith(OF_EVALUATION):
            conversion.used.add(word)  # an evaluation differs only in what has a rule of its own
        elif match := _FURTHER.fullmatch(word):
            _translate_further(conversion, word, value, *match.groups())
        return
    conversion.used.add(word)
    if rule.is_joined:
        return
    if not rule.key:
        shown = "..." if rule.is_secret else _shown(value)
        conversion.left.append(f"{word} = {shown}: {rule.note}")
        return
    if isinstance(value, Unread):
        conversion.left.append(
            f"{word} = {value}: code, or a variable that is not set; set {rule.key}"
        )
        return
    try:
        translated = rule.value(value)
    except (TypeError, ValueError):
        conversion.left.append(f"{word} = {_shown(value)}: cannot be read as {rule.key}")
        return
    if translated is None:
        return
    same_value = translated == read(value) or str(translated) == str(value) or value is True
    said = word if same_value or rule.is_secret else f"{word} = {value}"
    conversion.put(rule.key, translated, f"{said}; {rule.note}" if rule.note else said)


_FURTHER = re.compile(
    rf"((?:{OF_EVALUATION})?)(\d+):([^:]+)"
)  # a word of the second or a later task


def _translate_further(
    conversion: Conversion, word: str, value: Any, prefix: str, number: str, plain: str
) -> None:
    """Translate a word of a further task: into its own table, or its tables sampling and produce."""
    rule = WORDS["xtuner"].get(prefix + plain) or WORDS["xtuner"].get(plain)
    if rule is None:
        return
    conversion.used.add(word)
    named = conversion.words.get(f"{prefix}{number}:TaskSpecConfig.task_name")
    name = _task_name(named) if isinstance(named, str) else f"task{number}"
    table = f"eval.tasks.{name}" if prefix else f"tasks.{name}"
    if rule.key.startswith((f"{TASK}.", f"{EVAL}.")):
        key = f"{table}.{rule.key.removeprefix(f'{EVAL}.').removeprefix(f'{TASK}.')}"
    elif rule.key.startswith(("sampling.", "produce.", "eval.sampling.")):
        key = f"{table}.{rule.key.removeprefix('eval.')}"
    else:
        key = ""
    if prefix and ".produce." in key:
        key = ""
    note = rule.note if key or not rule.key else f"the task that comes first sets {rule.key}"
    if not rule.is_joined and (key or plain != "TaskSpecConfig.task_name"):
        _translate(conversion, word, value, Rule(key, rule.translation, note))


def _shown(value: Any) -> Any:
    """A value for a comment; of an environment variable only the name."""
    return value.source if isinstance(value, FromEnvironment) else value


# ---- words that only mean something together


def _trl(conversion: Conversion) -> None:
    generations = int(conversion.value("sampling.num_generations", 8))
    conversion.settings.setdefault("sampling.num_generations", (generations, "TRL's default"))
    device = int(conversion.take("per_device_train_batch_size", 8))
    samples = device * int(conversion.take("gradient_accumulation_steps", 1))
    samples *= int(conversion.take("num_processes", 1))
    whole = conversion.take("generation_batch_size")
    if whole is not None and int(whole) > samples:
        conversion.put("train.mini_batches", int(whole) // samples, "generation_batch_size")
        samples = int(whole)
    conversion.put(
        "train.groups_per_step",
        max(1, samples // generations),
        f"{samples} responses of all processes / {generations}",
    )
    _trl_loss(conversion)
    _trl_correction(conversion)
    first, second = conversion.take("adam_beta1"), conversion.take("adam_beta2")
    if first is not None or second is not None:
        conversion.put("train.betas", [first or 0.9, second or 0.999])
    weighs = conversion.take("use_bias_correction_kl", True)
    if conversion.value("algorithm.kl_beta", 0) and weighs:
        conversion.put(
            "algorithm.kl_estimator", "k3_weighted", "use_bias_correction_kl, on by default"
        )
    _weigh(conversion, conversion.take("reward_weights"))
    _warm_up(conversion, conversion.take("warmup_ratio"))


_TRL_AGGREGATIONS = {
    "grpo": "sequence",
    "bnpo": "token",
    "dapo": "token",
    "dr_grpo": "constant",
    "cispo": "token",
}
_TRL_SCALES = {True: "group", "group": "group", "batch": "batch_rewards", False: "none"}


def _trl_loss(conversion: Conversion) -> None:
    """Translate TRL's loss, which is not an algorithm: advantages and bounds are chosen beside it."""
    loss = str(conversion.take("loss_type", "dapo"))
    level = conversion.take("importance_sampling_level", "token")
    if loss not in _TRL_AGGREGATIONS:
        allowed = ", ".join(_TRL_AGGREGATIONS)
        conversion.left.append(f"loss_type = {loss}: none of {allowed}, so dapo is written")
        loss = "dapo"
    said = f"loss_type = {loss}" if "loss_type" in conversion.words else "TRL's default loss, dapo"
    if loss == "bnpo":
        said += "; the mean is over an update, not over each micro-batch"
    conversion.put("algorithm.aggregation", _TRL_AGGREGATIONS[loss], said)
    if loss == "cispo":
        conversion.put("algorithm.name", "cispo", said)
        if level == "sequence":
            conversion.left.append("importance_sampling_level = sequence: cispo weighs tokens here")
    elif level == "sequence":
        conversion.put("algorithm.name", "gspo", "importance_sampling_level = sequence")
    _trl_bounds(conversion, conversion.value("algorithm.name", "grpo"))
    if "algorithm.name" in conversion.settings and conversion.value("algorithm.kl_beta", 0):
        conversion.put("algorithm.kl_in", "loss", "beta")
    scale = conversion.take("scale_rewards", "group")
    scale = False if scale is None else scale  # the word "none"
    if scale in _TRL_SCALES:
        conversion.put("algorithm.normalize", _TRL_SCALES[scale], f"scale_rewards = {scale}")
    else:
        conversion.left.append(f"scale_rewards = {scale}: group, batch or none in TRL")


def _trl_bounds(conversion: Conversion, name: str) -> None:
    """Translate epsilon and epsilon_high, which are the bounds of a difference, or CISPO's bound itself."""
    low = float(conversion.take("epsilon", 0.2))
    high = conversion.take("epsilon_high")
    high = low if high is None else float(high)
    if name != "cispo":
        conversion.put("algorithm.clip_low", low, "epsilon")
        conversion.put("algorithm.clip_high", high, "epsilon_high, or epsilon")
    elif high >= 1:
        conversion.put(
            "algorithm.clip_high", round(high - 1, 9), f"the ratio is at most epsilon_high = {high}"
        )
    else:
        conversion.left.append(
            f"epsilon_high = {high} with cispo: the ratio's bound is at least 1 here"
        )


def _trl_correction(conversion: Conversion) -> None:
    """Translate the weight of trainer against vLLM, which TRL applies by default."""
    prefix = "vllm_importance_sampling_"
    on = conversion.take(f"{prefix}correction", True)
    mode = str(conversion.take(f"{prefix}mode", "sequence_mask"))
    cap, floor = conversion.take(f"{prefix}clip_max", 3.0), conversion.take(f"{prefix}clip_min")
    if conversion.value("engine.name", "") != "vllm":
        return
    if not on:
        conversion.put("algorithm.correction.kind", "none", f"{prefix}correction = False")
        conversion.put("algorithm.correction.newest", "trainer", "TRL's ratio begins at 1")
        return
    conversion.put("algorithm.correction.kind", mode, f"{prefix}mode")
    conversion.put(
        "algorithm.correction.cap", 1e6 if cap is None else float(cap), f"{prefix}clip_max"
    )
    if floor is not None and mode.endswith("mask"):
        conversion.put("algorithm.correction.floor", float(floor), f"{prefix}clip_min")
    elif floor is not None:
        conversion.left.append(f"{prefix}clip_min = {floor}: a truncated weight has no floor here")


def _verl(conversion: Conversion) -> None:
    actor = "actor_rollout_ref.actor"
    prompts = int(conversion.value("train.groups_per_step", 1024))
    conversion.settings.setdefault("train.groups_per_step", (prompts, "verl's default"))
    mini = conversion.take(f"{actor}.ppo_mini_batch_size", min(256, prompts))
    if int(mini) < prompts:
        conversion.put("train.mini_batches", prompts // int(mini), f"ppo_mini_batch_size = {mini}")
    in_loss = conversion.take(f"{actor}.use_kl_loss", False)
    in_reward = conversion.take("algorithm.use_kl_in_reward", False)
    if not (in_loss or in_reward):
        conversion.put("algorithm.kl_beta", 0.0, "neither use_kl_loss nor use_kl_in_reward")
        conversion.settings.pop("algorithm.kl_estimator", None)
    elif in_reward:
        conversion.put("algorithm.kl_in", "reward", "use_kl_in_reward")
        conversion.put("algorithm.kl_estimator", "k1", "verl's kl_penalty")
    conversion.settings.setdefault("algorithm.kl_beta", (0.001, "verl's default"))
    _rloo_of_tokens(conversion)
    function = conversion.take("custom_reward_function.path")
    name = conversion.take("custom_reward_function.name", "compute_score")
    if function:
        conversion.put(
            f"{TASK}.rewards", [{"type": f"{function}:{name}"}], "compute_score as it is"
        )
    conversion.settings.setdefault(
        "sampling.num_generations", (8, "verl's default of 1 is no group")
    )
    logger = str(conversion.take("trainer.logger", ""))
    if logger:
        conversion.put("track.trackers", trackers(logger), "trainer.logger")
    nodes, each = conversion.take("trainer.nnodes", 1), conversion.take("trainer.n_gpus_per_node")
    if each is not None:
        conversion.left.append(
            f"trainer.nnodes = {nodes}, n_gpus_per_node = {each}: divide the GPUs between "
            "launch.num_producers and launch.num_consumers, or set launch.colocate = true"
        )


def _openrlhf(conversion: Conversion) -> None:
    generations = int(conversion.value("sampling.num_generations", 8))
    conversion.settings.setdefault("sampling.num_generations", (generations, "1 is no group"))
    prompts = int(conversion.value("train.groups_per_step", 1024))
    conversion.settings.setdefault("train.groups_per_step", (prompts, "OpenRLHF's default"))
    samples = conversion.take("train_batch_size")
    if samples is not None and prompts * generations > int(samples):
        conversion.put(
            "train.mini_batches",
            prompts * generations // int(samples),
            f"rollout_batch_size x n_samples_per_prompt / train_batch_size = {samples}",
        )
    clip = conversion.take("eps_clip")
    bounds = str(conversion.take("eps_clip_low_high", "")).split()
    low, high = bounds if len(bounds) == 2 else (clip, clip)
    if low is not None and high is not None:
        conversion.put("algorithm.clip_low", float(low))
        conversion.put("algorithm.clip_high", float(high))
    betas = str(conversion.take("adam_betas", "")).strip("()").replace(",", " ").split()
    if len(betas) == 2:
        conversion.put("train.betas", [float(beta) for beta in betas])
    _rloo_of_tokens(conversion)
    nodes, each = conversion.take("actor_num_nodes", 1), conversion.take("actor_num_gpus_per_node")
    if each is not None:
        conversion.put("launch.num_consumers", int(nodes) * int(each), "actor nodes x GPUs")
    _warm_up(conversion, conversion.take("lr_warmup_ratio", 0.03))


def _colossalai(conversion: Conversion) -> None:
    algorithm = str(conversion.take("algo", "GRPO")).upper()
    for name, value in COLOSSALAI_LOSSES.get(algorithm, {"name": algorithm.lower()}).items():
        conversion.put(f"algorithm.{name}", value, f"algo = {algorithm}")
    _colossalai_sizes(conversion)
    _colossalai_rewards(conversion)
    _colossalai_sampling(conversion)
    checkpoint = conversion.take("checkpoint_path")
    if checkpoint:
        model = conversion.value("model.path", None)
        if model and "model.tokenizer" not in conversion.settings:
            conversion.put("model.tokenizer", model, "the tokenizer of model")
        conversion.put("model.path", str(checkpoint), "checkpoint_path; the optimizer starts anew")


def _colossalai_sizes(conversion: Conversion) -> None:
    """Translate prompts of one rank and of one producer into those of an update and of a sync period."""
    copies = [int(conversion.value(f"train.parallel.{axis}", 1)) for axis in ("tensor", "pipeline")]
    ranks = max(1, int(conversion.value("launch.num_consumers", 2)) // math.prod(copies))
    each = int(conversion.take("train_batch_size", 32))
    update = each * ranks
    conversion.put("train.groups_per_step", update, f"{each} prompts of each of {ranks} ranks")
    each, producers = (
        int(conversion.take("inference_batch_size", 64)),
        int(conversion.value("launch.num_producers", 2)),
    )
    said = f"{each} prompts of each of {producers} producers"
    conversion.put("sync.every_steps", max(1, each * producers // update), said)
    if each * producers % update:
        conversion.left.append(f"inference_batch_size: {said}, {update} an update: no whole number")


def _colossalai_rewards(conversion: Conversion) -> None:
    servers = str(conversion.take("code_verifier_api_url", "")).replace(",", " ").split()
    name = str(conversion.take("reward_type", "code" if servers else "think_answer_tags"))
    reward: dict[str, Any] = {"type": name, "weight": 10.0}
    if servers and name == "code":
        reward["options"] = {"servers": servers}
    conversion.put(f"{TASK}.rewards", [reward], "reward_type; a right answer is 1 here, 10 there")
    prompt, stop = COLOSSALAI_FORMS.get(name, ("", []))
    if f"{TASK}.system_prompt" not in conversion.settings and prompt:
        conversion.put(f"{TASK}.system_prompt", prompt, f"its default for {name}, in our words")
    if stop:
        conversion.put("sampling.stop", stop, f"its default for {name}")


def _colossalai_sampling(conversion: Conversion) -> None:
    engine, shards = (
        conversion.value("engine.name", "transformers"),
        "producer_tensor_parallel_size",
    )
    limit = conversion.take("top_k")
    if limit is None and engine == "transformers":
        conversion.put("sampling.top_k", 50, "its default with the transformers backend")
    elif limit is not None:
        conversion.put("sampling.top_k", max(0, int(limit)), f"top_k = {limit}")
    if (count := int(conversion.take(shards, 1))) > 1 and engine == "vllm":
        conversion.put("engine.options.tensor_parallel_size", count, shards)
    elif count > 1:
        conversion.left.append(f"{shards} = {count}: engine transformers has one device; use vllm")
    every = int(conversion.take("eval_interval", -1))
    conversion.put("eval.every_steps", max(0, every), f"eval_interval = {every}")
    conversion.put("eval.at_start", every > 0, f"eval_interval = {every}")
    if data := conversion.take("eval_dataset"):
        for name, path in _json_or(data, "heldout").items():
            conversion.put(f"eval.tasks.{_task_name(name)}.data", str(path), "eval_dataset")


def _json_or(text: Any, name: str) -> dict[str, Any]:
    """The table that a text is as JSON; another text is the table's only value, of this name."""
    try:
        table = json.loads(text)
    except (TypeError, ValueError):
        return {name: text}
    return table if isinstance(table, dict) else {name: text}


def _task_name(text: str) -> str:
    """A text as the name of a task, which is a key without dots."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", text) or "task"


def _xtuner(conversion: Conversion) -> None:
    trainer, loss = "Trainer.", "GRPOLossConfig."
    tokenizer = conversion.take(f"{trainer}tokenizer_path")
    if isinstance(tokenizer, str) and tokenizer != conversion.value("model.path", ""):
        conversion.put("model.tokenizer", str(tokenizer), "tokenizer_path")
    every = conversion.take(f"{trainer}evaluate_step", 1)
    if conversion.take(f"{trainer}enable_evaluate", True) is not True:
        conversion.put("eval.every_steps", 0, "enable_evaluate = False")
        conversion.put("eval.at_start", False, "enable_evaluate = False")
    else:
        conversion.put("eval.every_steps", int(every), "evaluate_step")
    beta = conversion.take(f"{loss}kl_loss_coef", 0.001)
    if conversion.take(f"{loss}use_kl_loss", False) is True:
        conversion.put("algorithm.kl_beta", float(beta), "use_kl_loss, kl_loss_coef")
    else:
        conversion.put("algorithm.kl_beta", 0.0, "use_kl_loss = False")
        conversion.settings.pop("algorithm.kl_estimator", None)
    least = conversion.take("LRConfig.lr_min", 1e-6)
    if conversion.value("train.schedule", "constant") != "constant":
        lr = float(conversion.value("train.lr", 1e-5))
        conversion.put("train.min_lr_ratio", min(1.0, float(least) / lr), f"lr_min = {least}")
    _warm_up(conversion, conversion.take("LRConfig.warmup_ratio", 0.03))
    _correct(conversion, f"{loss}rollout_is.rollout_is_")
    _rloo_of_tokens(conversion)
    shards = int(conversion.value("engine.options.tensor_parallel_size", 1))
    whole = conversion.take(f"{trainer}resources.num_workers")
    ranks = conversion.take(f"{trainer}train_resources.num_workers", whole)
    devices = conversion.take(f"{trainer}rollout_resources.num_workers", whole)
    for key, count, each in (
        ("launch.num_consumers", ranks, 1),
        ("launch.num_producers", devices, shards),
    ):
        if isinstance(count, int):
            conversion.put(key, max(1, count // each), f"{count} accelerators")
    if int(conversion.value(f"{TASK}.agent_actors", 0)):
        conversion.put("launch.kind", "ray", "agent_actors need it")
    if "eval:DatasetConfig.anno_path" in conversion.words:
        conversion.settings.setdefault(
            f"{EVAL}.data", ("heldout.jsonl", "SAY HERE where the evaluation data is")
        )
    if conversion.value("produce.strategy", "sync") == "sync":
        conversion.put("sync.on_update", "keep", "nothing runs at an update with the sync strategy")


def _correct(conversion: Conversion, prefix: str) -> None:
    """Translate the importance correction: its level, its mode and its bounds."""
    bounds = conversion.take(f"{prefix}threshold")
    level, mode = (
        conversion.take(f"{prefix}level", "token"),
        conversion.take(f"{prefix}mode", "truncate"),
    )
    if level not in ("token", "sequence") or mode not in ("truncate", "mask"):
        conversion.left.append(f"{prefix}level = {level}, mode = {mode}: algorithm.correction.kind")
    elif not isinstance(bounds, list):
        conversion.put("algorithm.correction.newest", "trainer", "it computes old log-probs again")
    else:
        conversion.put(
            "algorithm.correction.kind", f"{level}_{mode}", f"rollout_is: {level}, {mode}"
        )
        conversion.put("algorithm.correction.cap", float(max(bounds)), "rollout_is_threshold")
        if mode == "mask":
            conversion.put("algorithm.correction.floor", float(min(bounds)), "rollout_is_threshold")


TOGETHER: dict[str, Callable[[Conversion], None]] = {
    "trl": _trl,
    "verl": _verl,
    "openrlhf": _openrlhf,
    "colossalai": _colossalai,
    "xtuner": _xtuner,
}


def _rloo_of_tokens(conversion: Conversion) -> None:
    """Write RLOO's advantages for a loss of token ratios: the method rloo takes those of whole responses."""
    if conversion.value("algorithm.name", "") == "rloo":
        conversion.put("algorithm.name", "grpo", "rloo, with ratios of tokens")
        conversion.put("algorithm.baseline", "leave_one_out", "rloo")
        conversion.put("algorithm.normalize", "none", "rloo")


def _weigh(conversion: Conversion, weights: Any) -> None:
    """Give the rewards their weights."""
    key = f"{TASK}.rewards"
    rewards = conversion.value(key, [])
    numbers = weights if isinstance(weights, list) else str(weights or "").split()
    if len(numbers) == len(rewards):
        for reward, weight in zip(rewards, numbers, strict=True):
            reward["weight"] = float(weight)


def _warm_up(conversion: Conversion, share: Any) -> None:
    if not share:
        return
    steps = conversion.value("train.steps", 0)
    if steps:
        conversion.put(
            "train.warmup_steps", int(float(share) * int(steps)), f"{share} of the steps"
        )
    else:
        conversion.left.append(f"warm-up over {share} of the run: set train.warmup_steps")


_SHARED = ("rewards", "system_prompt", "max_prompt_tokens", "columns.prompt", "columns.gt_answer")


def _complete(conversion: Conversion) -> None:
    """Add what a run needs and the words did not say."""
    if conversion.value("algorithm.kl_beta", None) == 0:
        conversion.settings.pop("algorithm.kl_in", None)
    if "train.steps" in conversion.settings:
        steps = conversion.settings["train.steps"][0]
        conversion.settings.pop("train.steps" if int(steps) <= 0 else "train.episodes", None)
    conversion.settings.setdefault("model.path", ("demo", "SAY HERE which model"))
    conversion.settings.setdefault(f"{TASK}.data", ("train.jsonl", "SAY HERE where the data is"))
    for key in [key for key in conversion.settings if re.fullmatch(r"tasks\.[^.]+\.data", key)]:
        rewards = ([{"type": "boxed"}], "SAY HERE how responses are scored")
        conversion.settings.setdefault(key.removesuffix("data") + "rewards", rewards)
    for key in [key for key in conversion.settings if re.fullmatch(r"eval\.tasks\.\S+\.data", key)]:
        for name in _SHARED:
            if f"{TASK}.{name}" in conversion.settings:
                shared = conversion.settings[f"{TASK}.{name}"][0]
                conversion.settings.setdefault(key.removesuffix("data") + name, (shared, ""))
    if "engine.name" not in conversion.settings and any(
        key.startswith("engine.options.") for key in conversion.settings
    ):
        conversion.put("engine.name", "vllm", "its settings are given")


# ---- the text

_ORDER = ("", "run", "model", "tasks", "sampling", "algorithm", "train", "produce", "engine")


def _text(system: str, path: Path, conversion: Conversion) -> str:
    sections: dict[str, list[str]] = {}
    for key, (value, comment) in conversion.settings.items():
        section, _, name = key.rpartition(".")
        line = f"{toml_key(name)} = {toml_value(value)}"
        sections.setdefault(section, []).append(
            f"{line}  # {_one_line(comment)}" if comment else line
        )
    lines = [
        f"# Made from {path.name} by `penstock convert {system}`. A comment names the word, or says what differs.",
        f"#   penstock check {path.stem}.toml",
    ]

    def place(section: str) -> tuple[int, str]:
        first = section.split(".")[0]
        return (_ORDER.index(first) if first in _ORDER else len(_ORDER), section)

    for section in sorted(sections, key=place):
        lines += ["", *([f"[{section}]"] if section else []), *sections[section]]
    if conversion.left:
        lines += [
            "",
            "# Without a counterpart:",
            *(f"#   {_one_line(line)}" for line in conversion.left),
        ]
    return "\n".join(lines) + "\n"


def _one_line(text: str) -> str:
    return " ".join(text.split())
