"""Settings of an algorithm that are legal but probably a mistake: one line for each, told when a run starts.

What cannot be trained is refused by `check_algorithm`; the other sections' doubts are in `config/doubts.py`.
"""

from __future__ import annotations

from penstock.config import AlgorithmConfig, Config, Section
from penstock.training.algo import ALGORITHMS
from penstock.training.algo.method import (
    CISPO,
    DPPO,
    SAPO,
    Reinforce,
    algorithm_class,
    run_settings,
    task_algorithms,
)
from penstock.training.algo.settings import AlgorithmSettings

_CLIPS = ("clip_low", "clip_high", "dual_clip")


def algorithm_doubts(config: Config) -> list[str]:
    """A line for each setting that has no effect, and for each pair that biases the gradient.

    None for an algorithm of the user's own: `penstock config` may show a stranger's file, and runs no code of it.
    """
    lines = []
    names = {config.task_algorithm(task).name for task in config.tasks}
    all_methods = set(task_algorithms(config).values()) if names <= ALGORITHMS.keys() else set()
    for task in config.tasks:
        algorithm = config.task_algorithm(task)
        if algorithm.name in ALGORITHMS:
            settings = run_settings(config, task)
            said = [*_biases(config, settings), *_without_effect(config, algorithm, settings)]
            if len(all_methods) == 1 and "weight" in _keys_set(algorithm):
                said.append("algorithm.weight has no effect with one algorithm for all tasks")
            is_own = algorithm != config.algorithm
            lines += [f"tasks.{task}: {line}" if is_own else line for line in said]
    if all_methods and not any(method.settings.has_critic for method in all_methods):
        unread = sorted(_keys_set(config.train) & {"critic_lr", "critic_warmup_steps"})
        lines += [f"train.{key} has no effect without a value model" for key in unread]
    return list(dict.fromkeys(lines))


def _biases(config: Config, settings: AlgorithmSettings) -> list[str]:
    lines = []
    if settings.correction.startswith("sequence") and any(map(config.hides_cuts, config.tasks)):
        lines.append(
            f"algorithm.correction.kind {settings.correction} with top_k or top_p: the weight of a response falls "
            "with each of its tokens, and long responses get none: use token_truncate"
        )
    if _method_is(settings, Reinforce) and not settings.imitates:
        staleness = max(config.task_produce(task).staleness_bound for task in config.tasks)
        updates = config.train.mini_batches * config.train.num_epochs
        if staleness and settings.correction == "none":
            lines.append(
                f"algorithm {settings.name} has no ratio: samples of older weights count like fresh ones; set "
                "produce.max_staleness=0 or algorithm.correction.kind=token_truncate"
            )
        if updates > 1:
            lines.append(
                f"algorithm {settings.name} has no ratio: the {updates} updates of a batch all count its samples as "
                "fresh ones; set train.mini_batches=1 and train.num_epochs=1"
            )
    if settings.kl_in_loss and settings.kl_estimator == "k1":
        lines.append(
            "algorithm.kl_estimator k1 in the loss: its gradient is zero in the mean, so it holds nothing; "
            "use k2 or k3_weighted, or kl_in=reward"
        )
    return lines


def _without_effect(
    config: Config, algorithm: AlgorithmConfig, settings: AlgorithmSettings
) -> list[str]:
    """A line for each key of an algorithm's table that is set and that this run does not read."""
    unread: dict[str, str] = {}
    updates = config.train.mini_batches * config.train.num_epochs
    if not settings.needs_reference:
        unread |= dict.fromkeys(("kl_in", "kl_estimator"), "kl_beta 0")
    if not settings.needs_teacher:
        unread["divergence"] = "no teacher"
    if settings.distills:
        of_rewards = ("baseline", "normalize", "overlong_penalty", "overlong_window", *_CLIPS)
        unread |= dict.fromkeys(of_rewards, f"{settings.name}: rewards do not count")
        if not (settings.kl_in_loss and settings.kl_estimator == "k3_weighted"):
            unread |= _unread_weights(settings, updates)
    if not settings.has_critic:
        unread |= dict.fromkeys(("gamma", "gae_lambda", "value_clip"), "no value model")
    if not settings.filter_groups:
        unread["filter_range"] = "filter_groups false"
    if not settings.overlong_penalty:
        unread["overlong_window"] = "overlong_penalty 0"
    if updates == 1 and settings.has_critic:
        unread["value_clip"] = "one update per batch: no value has moved"
    clips = _CLIPS
    if settings.decoupled and updates == 1:
        why = f"correction {settings.correction} and one update per batch: the ratio to clip is 1"
        unread |= dict.fromkeys(clips, why)
    if _method_is(settings, Reinforce):
        unread |= dict.fromkeys(clips, f"{settings.name}: no ratio")
    if _method_is(settings, SAPO):
        unread |= dict.fromkeys(clips, f"{settings.name}: a smooth gate in their place")
    if any(_method_is(settings, method) for method in (CISPO, DPPO)):
        unread["dual_clip"] = f"{settings.name}: its ratio has a bound of its own"
    if settings.normalizes_each_reward:
        unread["baseline"] = f"{settings.name}: each reward is centred in its group"
    if algorithm.correction.kind != "none" and settings.correction != "none":
        alone = algorithm.model_copy(update={"decoupled": False})
        if run_settings(config.model_copy(update={"algorithm": alone})) == settings:
            unread["decoupled"] = f"correction {settings.correction}, which decouples by itself"
    if settings.normalize == "batch" and settings.baseline == "batch_mean":
        unread["baseline"] = "normalize batch, which subtracts the mean by itself"
    baselines = {settings.baseline, algorithm_class(settings.name).defaults.baseline}
    if settings.normalize == "batch" and baselines == {"group_mean", "leave_one_out"}:
        unread["baseline"] = (
            "normalize batch: group_mean and leave_one_out give the same advantages"
        )
    keys, correction = _keys_set(algorithm), _keys_set(algorithm.correction)
    lines = [
        f"algorithm.{key} has no effect with {why}" for key, why in unread.items() if key in keys
    ]
    if "cap" in correction and settings.correction in ("none", "token"):
        lines.append("algorithm.correction.cap has no effect with correction none")
    if "floor" in correction and not settings.correction.endswith("mask"):
        lines.append(
            f"algorithm.correction.floor has no effect with correction {settings.correction}: only a mask has a floor"
        )
    return lines


def _unread_weights(settings: AlgorithmSettings, updates: int) -> dict[str, str]:
    """Why the weights of samples change nothing where a teacher alone teaches."""
    if settings.compares_vocabulary:
        why = f"divergence {settings.divergence}: it weighs no sample"
        return dict.fromkeys(("decoupled", "correction"), why)
    if settings.correction == "token_truncate" and updates == 1:
        return {"decoupled": f"{settings.name}: its samples are weighed in the same way without"}
    return {}


def _keys_set(section: Section) -> set[str]:
    """The keys of a table that differ from their defaults."""
    fields = type(section).model_fields
    return {key for key, value in section if value != fields[key].default}


def _method_is(settings: AlgorithmSettings, method: type) -> bool:
    return issubclass(algorithm_class(settings.name), method)
