"""Settings that are legal but probably a mistake: one line for each, shown when a run starts.

What cannot work at all is refused in `tree.py` and in the checks before a run.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce

from penstock.config import Config, LaunchConfig, ProduceConfig, Section


def doubts(config: Config) -> list[str]:
    """A line for each setting that is legal but probably a mistake."""
    lines = []
    for task in config.tasks:
        produce, sampling = config.task_produce(task), config.task_sampling(task)
        if config.hides_cuts(task):
            lines.append(
                f"tasks.{task}: top_k {sampling.top_k} and top_p {sampling.top_p} cut tokens that the trainer "
                "counts, as only engine transformers says which: leave both off, or watch mismatch/kl"
            )
        lines += [f"tasks.{task}: {line}" for line in _without_effect(config, produce)]
    lines += _behind_a_switch(config)
    produces = [config.task_produce(task) for task in config.tasks]
    runs_ahead = any(p.staleness_bound > 0 or p.over_sample_threshold > 0 for p in produces)
    if config.sync.on_update != "keep" and not runs_ahead:
        lines.append(
            f"sync.on_update {config.sync.on_update} has no effect without run-ahead and oversampling: no response "
            "is being generated when new weights arrive"
        )
    if config.launch.colocate and config.launch.kind == "inline":
        lines.append(
            "launch.colocate has no effect with launch.kind inline: one process holds both sides"
        )
    if config.launch.kind != "ray":
        lines += [
            f"{key} has no effect with launch.kind {config.launch.kind}: only a Ray cluster has "
            "nodes to choose from"
            for key in _places(config.launch)
        ]
    if config.model.arithmetic == "fast" and config.model.device != "cpu":
        lines.append(
            "model.arithmetic fast: on a GPU redone steps may have other bits, and replay cannot compare them"
        )
    lines += unrepeatable_samples(config)
    if config.eval.tasks and not config.eval.every_steps:
        rules = [rule for rule in config.train.stop_when if rule.split("/")[0] in config.eval.tasks]
        settings = {"checkpoint.keep_best": config.checkpoint.keep_best, "train.stop_when": rules}
        lines += [
            f"{key} has no effect with eval.every_steps 0: only the start and the end are evaluated; "
            "set eval.every_steps"
            for key, value in settings.items()
            if value
        ]
    trained = [name for name, task in config.tasks.items() if task.system_prompt]
    lines += [
        f"eval.tasks.{name}: evaluated without a system prompt, but trained with that of "
        f"tasks.{trained[0]}: set eval.tasks.{name}.system_prompt"
        for name, task in config.eval.tasks.items()
        if trained and not task.system_prompt
    ]
    return lines


_SWITCHES = (  # (table, the key that turns it on, its value when off, keys that only then have an effect)
    ("model.lora", "rank", 0, ("alpha", "target_modules")),
    ("train.ptx", "coefficient", 0.0, ("data", "sequences_per_step")),
    ("train", "schedule", "constant", ("min_lr_ratio",)),
    ("sampling.anneal", "end", None, ("steps", "episodes")),
)


def _behind_a_switch(config: Config) -> Iterator[str]:
    """Yield a line for each key that is set while the key that turns it on is off."""
    for table, switch, off, keys in _SWITCHES:
        section: Section = reduce(getattr, table.split("."), config)
        default = type(section)()
        for key in keys if getattr(section, switch) == off else ():
            if getattr(section, key) != getattr(default, key):
                yield f"{table}.{key} has no effect with {table}.{switch} {off}"


def _places(launch: LaunchConfig) -> Iterator[str]:
    """Yield the keys that only a Ray cluster reads and that are set."""
    default = LaunchConfig()
    for key in ("ray_options", "address", "wait_for_nodes_s"):
        if getattr(launch, key) != getattr(default, key):
            yield f"launch.{key}"
    for number, kind in enumerate(launch.producer_kinds):
        if kind.ray_options:
            yield f"launch.producer_kinds[{number}].ray_options"


def _without_effect(config: Config, produce: ProduceConfig) -> list[str]:
    """A line for each switch of [produce] that does nothing in this run."""
    aborts, lines = config.sync.on_update == "abort", []
    if produce.enable_partial_rollout and not aborts:
        lines.append(
            f"enable_partial_rollout has no effect with sync.on_update {config.sync.on_update}: only abort stops a "
            "response before its end"
        )
    elif (
        produce.enable_partial_rollout
        and produce.max_staleness == 0
        and config.sync.every_steps == 1
    ):
        lines.append(
            "enable_partial_rollout has no effect with max_staleness 0 and sync.every_steps 1: every partial "
            "response has expired before it can continue"
        )
    if produce.tail_batch_trigger_size and not produce.over_sample_threshold and not aborts:
        lines.append(
            f"tail_batch_trigger_size has no effect with over_sample_threshold 0 and sync.on_update "
            f"{config.sync.on_update}: steps wait for every group, so none expires"
        )
    if produce.pause_timeout_s != ProduceConfig().pause_timeout_s and not aborts:
        lines.append(
            f"pause_timeout_s has no effect with sync.on_update {config.sync.on_update}: nothing is aborted"
        )
    return lines


def unrepeatable_samples(config: Config) -> list[str]:
    """A line for each engine of others, whose samples cannot be repeated."""
    names = sorted({engine.name for engine in config.engine_kinds()} & {"vllm", "openai"})
    return [
        f"engine {name}: the same run again may sample other responses; redo and replay train on the "
        "journalled ones"
        for name in names
    ]
