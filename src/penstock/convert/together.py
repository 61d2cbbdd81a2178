"""Words of a system that only mean something together: sizes, losses, schedules, places.

Each function takes what the tables left (rows marked joined) and puts the settings that it means.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

from penstock.convert.tables import (
    COLOSSALAI_FORMS,
    COLOSSALAI_LOSSES,
    EVAL,
    TASK,
    Conversion,
    Rule,
    colossalai_reward,
    task_name,
    trackers,
    words_of,
)


def _trl(conversion: Conversion) -> None:
    generations = int(conversion.value("sampling.num_generations"))
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
    weights, rewards = conversion.take("reward_weights"), conversion.value(f"{TASK}.rewards", [])
    numbers = weights if isinstance(weights, list) else str(weights or "").split()
    if len(numbers) == len(rewards):
        for reward, weight in zip(rewards, numbers, strict=True):
            reward["weight"] = float(weight)
    _warm_up(conversion, conversion.take("warmup_ratio"))


_TRL_AGGREGATIONS = {
    "grpo": "sequence",
    "bnpo": "token",
    "dapo": "token",
    "dr_grpo": "constant",
    "cispo": "token",
    "sapo": "sequence",
}
_TRL_SCALES = {True: "group", "group": "group", "batch": "batch_rewards", False: "none"}


def _trl_loss(conversion: Conversion) -> None:
    """Translate TRL's loss, which is not an algorithm: advantages and bounds are chosen beside it."""
    loss = str(conversion.take("loss_type", "dapo"))
    level = conversion.take("importance_sampling_level", "token")
    said = f"loss_type = {loss}" if "loss_type" in conversion.words else "TRL's default loss, dapo"
    if loss not in _TRL_AGGREGATIONS:
        said += f": none of {', '.join(_TRL_AGGREGATIONS)}, so dapo is written"
        conversion.left.append(said)
        loss = "dapo"
    if loss == "bnpo":
        said += "; the mean is over an update, not over each micro-batch"
    conversion.put("algorithm.aggregation", _TRL_AGGREGATIONS[loss], said)
    if loss in ("cispo", "sapo"):
        conversion.put("algorithm.name", loss, said)
        if level == "sequence":
            conversion.left.append(
                f"importance_sampling_level = sequence: {loss} weighs tokens here"
            )
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
    if name == "sapo":
        return
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
    if on:
        _correct(conversion, mode, (floor, 1e6 if cap is None else cap), prefix)
    else:
        conversion.put("algorithm.correction.kind", "none", f"{prefix}correction = False")
        conversion.put("algorithm.correction.newest", "trainer", "TRL's ratio begins at 1")


def _correct(conversion: Conversion, kind: str, bounds: Any, said: str) -> None:
    """Weigh the trainer's policy against the engine's, between bounds of which only a mask has the lower one."""
    low, high = bounds
    conversion.put("algorithm.correction.kind", kind, said)
    conversion.put("algorithm.correction.cap", float(high), said)
    conversion.put("algorithm.correction.newest", "engine", "whose log-probs the weight needs")
    if kind.endswith("mask"):
        conversion.put("algorithm.correction.floor", float(low or 0), said)
    elif low:
        conversion.left.append(f"{said}: {low} at least; a truncated weight has no floor here")


def _verl(conversion: Conversion) -> None:
    actor = "actor_rollout_ref.actor"
    prompts = int(conversion.value("train.groups_per_step"))
    mini = conversion.take(f"{actor}.ppo_mini_batch_size", min(256, prompts))
    if int(mini) < prompts:
        conversion.put("train.mini_batches", prompts // int(mini), f"ppo_mini_batch_size = {mini}")
    in_reward = conversion.take("algorithm.use_kl_in_reward", False)
    beta = conversion.take("algorithm.kl_ctrl.kl_coef", 0.001)
    penalty = conversion.take("algorithm.kl_penalty", "kl")
    kind = Rule("", "low_var_kl>k3 kl>k1 mse>k2 abs>k2").value(penalty)
    if bool(conversion.take(f"{actor}.use_kl_loss", False)):
        conversion.settings.setdefault("algorithm.kl_beta", (0.001, "verl's default"))
        conversion.put("algorithm.kl_in", "loss", "use_kl_loss")
        if in_reward:
            conversion.left.append("use_kl_in_reward beside use_kl_loss: one place at a time")
    elif in_reward:
        conversion.put("algorithm.kl_beta", beta, "kl_ctrl.kl_coef")
        conversion.put("algorithm.kl_in", "reward", "use_kl_in_reward")
        conversion.put("algorithm.kl_estimator", kind, "verl's kl_penalty")
    else:
        conversion.put("algorithm.kl_beta", 0.0, "neither use_kl_loss nor use_kl_in_reward")
        conversion.settings.pop("algorithm.kl_estimator", None)
    loss = str(conversion.take(f"{actor}.policy_loss.loss_mode", "vanilla"))
    if loss in _VERL_LOSSES:
        conversion.put("algorithm.name", _VERL_LOSSES[loss], f"loss_mode = {loss}")
        _bounds_of_tokens(conversion)
        if loss != "cispo":  # whatever loss_agg_mode says
            conversion.put("algorithm.aggregation", "sequence", f"loss_mode = {loss}")
    elif loss != "vanilla":
        conversion.left.append(f"policy_loss.loss_mode = {loss}: write your own algorithm")
    _rloo_of_tokens(conversion)
    _value_model(conversion, 1e-5)
    correction = "algorithm.rollout_correction.rollout_is"
    level, cap = conversion.take(correction), conversion.take(f"{correction}_threshold", 2.0)
    if level in ("token", "sequence"):
        _correct(conversion, f"{level}_truncate", (0, cap), f"rollout_is = {level}")
    if conversion.value("train.schedule", "constant") != "constant":
        conversion.settings.setdefault("train.min_lr_ratio", (0.0, "verl's default"))
    _warm_up(conversion, conversion.take(f"{actor}.optim.lr_warmup_steps_ratio"))
    for word, key in (("data.train_files", f"{TASK}.data"), ("data.val_files", f"{EVAL}.data")):
        first, *others = words_of(conversion.take(word) or "") or [""]
        if first:
            conversion.put(key, first, word)
        conversion.left += [
            f"{word}: {other}: a task of its own, tasks.NAME.data" for other in others
        ]
    function = conversion.take("custom_reward_function.path")
    name = conversion.take("custom_reward_function.name", "compute_score")
    if function:
        conversion.put(
            f"{TASK}.rewards", [{"type": f"{function}:{name}"}], "compute_score as it is"
        )
    logger = str(conversion.take("trainer.logger", ""))
    if logger:
        conversion.put("track.trackers", trackers(logger), "trainer.logger")
    overlong = "reward_model.reward_kwargs.overlong_buffer_cfg"
    if conversion.take(f"{overlong}.enable", False):
        _overlong(conversion, f"{overlong}.len", f"{overlong}.penalty_factor")
    nodes, each = conversion.take("trainer.nnodes", 1), conversion.take("trainer.n_gpus_per_node")
    if each is not None:
        conversion.put("launch.colocate", True, "actor and rollout have the same GPUs")
        _place(conversion, int(nodes) * int(each), int(nodes) * int(each))
    parallel = "train.parallel"
    if min(conversion.value(f"{parallel}.{axis}", 1) for axis in ("pipeline", "context")) > 1:
        shared = conversion.settings.pop(f"{parallel}.context")[0]
        conversion.left.append(f"context_parallel_size = {shared}: not with pipeline ranks here")


_VERL_LOSSES = {"gspo": "gspo", "cispo": "cispo", "sapo": "sapo", "geo_mean": "gmpo"}


def _openrlhf(conversion: Conversion) -> None:
    generations = int(conversion.value("sampling.num_generations"))
    prompts = int(conversion.value("train.groups_per_step"))
    samples = int(conversion.take("train_batch_size", 128))
    if prompts * generations > samples:
        said = f"rollout_batch_size x n_samples_per_prompt / train_batch_size = {samples}"
        conversion.put("train.mini_batches", prompts * generations // samples, said)
    length = int(conversion.take("max_len", 2048))
    said = f"max_len = {length}, there of prompt and response"
    conversion.settings.setdefault("sampling.max_tokens", (length, said))
    clip = conversion.take("eps_clip")
    bounds = str(conversion.take("eps_clip_low_high", "")).split()
    low, high = bounds if len(bounds) == 2 else (clip, clip)
    if low is not None and high is not None:
        conversion.put("algorithm.clip_low", float(low))
        conversion.put("algorithm.clip_high", float(high))
    if conversion.take("policy_loss_type", "ppo") == "gspo":
        conversion.put("algorithm.name", "gspo", "policy_loss_type = gspo")
        conversion.put("algorithm.aggregation", "sequence", "policy_loss_type = gspo")
        _bounds_of_tokens(conversion)
    _openrlhf_correction(conversion)
    _overlong(conversion, "overlong_buffer_len", "overlong_penalty_factor")
    in_reward = conversion.value("algorithm.kl_in") == "reward"
    has_group = conversion.value("algorithm.name") != "ppo"
    if in_reward and has_group and conversion.value("algorithm.kl_beta"):
        conversion.left.append(
            "KL in the reward: there each token pays it after the group is compared; here with a group baseline "
            "a rollout pays its whole KL before; algorithm.kl_beta = 0, or kl_in = 'loss', means the same in both"
        )
    _rloo_of_tokens(conversion)
    _value_model(conversion, 9e-6)
    nodes, each = conversion.take("actor_num_nodes", 1), conversion.take("actor_num_gpus_per_node")
    if each is not None:
        conversion.put("launch.num_consumers", int(nodes) * int(each), "actor nodes x GPUs")
    queue = int(conversion.take("async_queue_size", 1))
    if conversion.value("produce.strategy", "sync") == "async":
        conversion.put("produce.max_staleness", queue, f"async_queue_size = {queue}")
    _warm_up(conversion, conversion.take("lr_warmup_ratio", 0.03))


def _openrlhf_correction(conversion: Conversion) -> None:
    kind = str(conversion.take("algo.advantage.is_correction_type", "tis"))
    bounds = str(conversion.take("vllm_is_truncated_threshold", "0.5 5.0")).split()
    if not conversion.take("enable_vllm_is_correction", False):
        return
    if conversion.value("algorithm.name") == "gspo":
        said = "is_correction with gspo: the ratio is to the engine's log-probs, without a weight"
        conversion.put("algorithm.correction.newest", "engine", said)
        return
    ours = "token_mask" if kind == "icepop" else "token_truncate"
    _correct(conversion, ours, [float(bound) for bound in bounds], f"is_correction: {kind}")
    if kind not in ("tis", "icepop"):
        conversion.left.append(f"is_correction_type = {kind}: it masks responses too; as tis here")


def _colossalai(conversion: Conversion) -> None:
    algorithm = str(conversion.take("algo", "GRPO")).upper()
    for name, value in COLOSSALAI_LOSSES.get(algorithm, {"name": algorithm.lower()}).items():
        conversion.put(f"algorithm.{name}", value, f"algo = {algorithm}")
    zero_bubble = conversion.take("zero_bubble", False)
    if zero_bubble:
        said = "rl_example_zero_bubble.py generates while it trains"
        conversion.put("produce.max_staleness", 1, said)
        if algorithm == "DAPO":
            conversion.put("algorithm.filter_range", [0.01, 0.7], "rl_example_zero_bubble.py")
    conversion.words.setdefault("eval_interval", 100 if zero_bubble else -1)
    # prompts of one rank and of one producer become those of an update and of a sync period
    copies = [int(conversion.value(f"train.parallel.{axis}", 1)) for axis in ("tensor", "pipeline")]
    ranks = max(1, int(conversion.value("launch.num_consumers")) // math.prod(copies))
    each = int(conversion.take("train_batch_size", 32))
    update = each * ranks
    conversion.put("train.groups_per_step", update, f"{each} prompts of each of {ranks} ranks")
    each = int(conversion.take("inference_batch_size", 64))
    producers = int(conversion.value("launch.num_producers"))
    said = f"{each} prompts of each of {producers} producers"
    conversion.put("sync.every_steps", max(1, each * producers // update), said)
    if each * producers % update:
        conversion.left.append(f"inference_batch_size: {said}, {update} an update: no whole number")
    servers = str(conversion.take("code_verifier_api_url", "")).replace(",", " ").split()
    name = str(conversion.take("reward_type", "code" if servers else "think_answer_tags"))
    said = "reward_type; a right answer is 1 here, 10 there"
    conversion.put(f"{TASK}.rewards", [colossalai_reward(name, servers)], said)
    prompt, stop = COLOSSALAI_FORMS.get(name, ("", []))
    if f"{TASK}.system_prompt" not in conversion.settings and prompt:
        conversion.put(f"{TASK}.system_prompt", prompt, f"its default for {name}, in our words")
    if stop:
        conversion.put("sampling.stop", stop, f"its default for {name}")
    _colossalai_sampling(conversion)
    checkpoint = conversion.take("checkpoint_path")
    if checkpoint:
        model = conversion.value("model.path", None)
        if model and "model.tokenizer" not in conversion.settings:
            conversion.put("model.tokenizer", model, "the tokenizer of model")
        conversion.put("model.path", str(checkpoint), "checkpoint_path; the optimizer starts anew")


def _colossalai_sampling(conversion: Conversion) -> None:
    engine = conversion.value("engine.name", "transformers")
    shards = "producer_tensor_parallel_size"
    limit = conversion.take("top_k")
    if limit is None and engine == "transformers":
        conversion.put("sampling.top_k", 50, "its default with the transformers backend")
    elif limit is not None:
        conversion.put("sampling.top_k", max(0, int(limit)), f"top_k = {limit}")
    if (count := int(conversion.take(shards, 1))) > 1 and engine == "vllm":
        conversion.put("engine.options.tensor_parallel_size", count, shards)
    elif count > 1:
        conversion.left.append(f"{shards} = {count}: engine transformers has one device; use vllm")
    every = int(conversion.take("eval_interval"))
    conversion.put("eval.every_steps", max(0, every), f"eval_interval = {every}")
    conversion.put("eval.at_start", every > 0, f"eval_interval = {every}")
    if data := conversion.take("eval_dataset"):
        try:
            table = json.loads(data)
        except (TypeError, ValueError):
            table = None
        tasks = table if isinstance(table, dict) else {"heldout": data}
        for name, path in tasks.items():
            conversion.put(f"eval.tasks.{task_name(name)}.data", str(path), "eval_dataset")


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
        lr = float(conversion.value("train.lr"))
        conversion.put("train.min_lr_ratio", min(1.0, float(least) / lr), f"lr_min = {least}")
    _warm_up(conversion, conversion.take("LRConfig.warmup_ratio", 0.03))
    prefix = f"{loss}rollout_is.rollout_is_"
    bounds = conversion.take(f"{prefix}threshold")
    level = conversion.take(f"{prefix}level", "token")
    mode = conversion.take(f"{prefix}mode", "truncate")
    if level not in ("token", "sequence") or mode not in ("truncate", "mask"):
        conversion.left.append(f"{prefix}level = {level}, mode = {mode}: algorithm.correction.kind")
    elif isinstance(bounds, list):
        _correct(conversion, f"{level}_{mode}", sorted(bounds), f"rollout_is: {level}, {mode}")
    else:
        conversion.put("algorithm.correction.newest", "trainer", "it computes old log-probs again")
    _rloo_of_tokens(conversion)
    whole = conversion.take(f"{trainer}resources.num_workers")
    ranks = conversion.take(f"{trainer}train_resources.num_workers", whole)
    devices = conversion.take(f"{trainer}rollout_resources.num_workers", whole)
    _place(conversion, ranks, devices)
    if int(conversion.value(f"{TASK}.agent_actors", 0)):
        conversion.put("launch.kind", "ray", "agent_actors need it")
    if "eval:DatasetConfig.anno_path" in conversion.words:
        conversion.settings.setdefault(
            f"{EVAL}.data", ("heldout.jsonl", "SAY HERE where the evaluation data is")
        )
    if conversion.value("produce.strategy") == "sync":
        conversion.put("sync.on_update", "keep", "nothing runs at an update with the sync strategy")


TOGETHER: dict[str, Callable[[Conversion], None]] = {
    "trl": _trl,
    "verl": _verl,
    "openrlhf": _openrlhf,
    "colossalai": _colossalai,
    "xtuner": _xtuner,
}


def _place(conversion: Conversion, ranks: Any, devices: Any) -> None:
    """Write how many ranks train, and how many engines fit on the devices for rollouts."""
    shards = int(conversion.value("engine.options.tensor_parallel_size", 1))
    counts = {"launch.num_consumers": (ranks, 1), "launch.num_producers": (devices, shards)}
    for key, (count, each) in counts.items():
        if isinstance(count, int):
            conversion.put(key, max(1, count // each), f"{count} accelerators")


def _overlong(conversion: Conversion, window: str, factor: str) -> None:
    """Write the penalty that grows along the last tokens of the longest response."""
    length, penalty = conversion.take(window), conversion.take(factor, 1)
    if length:
        conversion.put("algorithm.overlong_window", int(length), window)
        conversion.put("algorithm.overlong_penalty", float(penalty), factor)


def _rloo_of_tokens(conversion: Conversion) -> None:
    """Write RLOO's advantages for a loss of token ratios: the method rloo takes those of whole responses."""
    if conversion.value("algorithm.name", "") == "rloo":
        conversion.put("algorithm.name", "grpo", "rloo, with ratios of tokens")
        conversion.put("algorithm.baseline", "leave_one_out", "rloo")
        conversion.put("algorithm.normalize", "none", "rloo")


def _value_model(conversion: Conversion, rate: float) -> None:
    """Leave out the words of a value model where there is none; where there is one, write its default rate."""
    if conversion.value("algorithm.name") == "ppo":
        conversion.settings.setdefault("train.critic_lr", (rate, "its default"))
        conversion.settings.pop("algorithm.normalize", None)  # of groups
        return
    for key in ("gamma", "gae_lambda", "value_clip"):
        conversion.settings.pop(f"algorithm.{key}", None)
    for key in ("critic_lr", "critic_warmup_steps"):
        conversion.settings.pop(f"train.{key}", None)


def _bounds_of_tokens(conversion: Conversion) -> None:
    """Bound the ratio by 0.2 unless the words say otherwise: these methods have other bounds here, sapo has none."""
    for bound in ("algorithm.clip_low", "algorithm.clip_high"):
        conversion.settings.setdefault(bound, (0.2, "its default"))
        if conversion.value("algorithm.name") == "sapo":
            del conversion.settings[bound]


def _warm_up(conversion: Conversion, share: Any) -> None:
    steps = int(conversion.value("train.steps", 0))
    if share and steps:
        conversion.put("train.warmup_steps", int(float(share) * steps), f"{share} of the steps")
    elif share:
        conversion.left.append(f"warm-up over {share} of the run: set train.warmup_steps")
