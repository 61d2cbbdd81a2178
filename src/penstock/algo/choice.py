"""Which algorithm a config names, with what settings, and the checks before a run starts.

The [algorithm] table names a method and may override any of its parts; `resolve` lays those fields
over the method's own defaults. Imports no torch: the control plane asks too.
"""

from __future__ import annotations

from dataclasses import fields, replace

from penstock import plugins
from penstock.algo import ALGORITHMS
from penstock.algo.method import Algorithm
from penstock.algo.settings import AlgorithmSettings, CorrectionKind
from penstock.config import AlgorithmConfig, Config
from penstock.errors import UserError

_OVERRIDES = frozenset(field.name for field in fields(AlgorithmSettings)) & frozenset(
    AlgorithmConfig.model_fields
) - {"name", "decoupled", "correction"}


def resolve(config: AlgorithmConfig) -> AlgorithmSettings:
    """The named algorithm's defaults with the config's own fields over them."""
    method = method_class(config.name)
    given = {
        name: value for name in _OVERRIDES if (value := getattr(config, name, None)) is not None
    }
    # A correction weighs the trainer's policy against the behaviour policy, so the ratio that is
    # left to clip is that of the update alone: every correction is a decoupled objective.
    kind: CorrectionKind = config.correction.kind
    decoupled = config.decoupled or kind != "none"
    return replace(
        method.defaults,
        name=config.name,
        decoupled=decoupled,
        correction="token" if decoupled and kind == "none" else kind,
        correction_cap=config.correction.cap,
        correction_floor=config.correction.floor,
        **given,
    )


def method_class(name: str) -> type[Algorithm]:
    """The class behind an algorithm's name."""
    method = plugins.load("algorithm.name", name, ALGORITHMS)
    if not isinstance(getattr(method, "defaults", None), AlgorithmSettings):
        raise UserError(
            f"algorithm.name: got {name!r}, allowed: a class with `defaults` (AlgorithmSettings), "
            "see penstock.algo.method.Algorithm"
        )
    return method


def check(config: Config) -> None:
    """Refuse what cannot be trained, before any weight is loaded."""
    settings = resolve(config.algorithm)
    for task in config.tasks:
        generations = config.task_sampling(task).num_generations
        if settings.group_relative and generations < 2:
            raise UserError(
                f"tasks.{task}: sampling.num_generations got {generations} with algorithm "
                f"{settings.name}, allowed: at least 2 (it compares the rollouts of one prompt)"
            )
    _check_kl(config, settings)
    _check_splits(config)


def _check_kl(config: Config, settings: AlgorithmSettings) -> None:
    if settings.kl_beta > 0 and settings.kl_in == "none":
        raise UserError(
            f"algorithm.kl_beta: got {settings.kl_beta} with kl_in none, "
            "allowed: 0, or kl_in loss | reward"
        )
    if config.train.reference and not settings.needs_reference:
        raise UserError(
            f"train.reference: got {config.train.reference!r}, allowed: empty unless "
            f"algorithm.kl_beta > 0 (it is {settings.kl_beta} for {settings.name})"
        )


def _check_splits(config: Config) -> None:
    train, ranks = config.train, config.launch.num_consumers
    if train.groups_per_step % (train.mini_batches * ranks):
        raise UserError(
            f"train.mini_batches x launch.num_consumers: got {train.mini_batches} x {ranks}, "
            f"allowed: a divisor of train.groups_per_step = {train.groups_per_step}"
        )
    if train.schedule != "constant" and not (train.steps or train.episodes):
        raise UserError(
            f"train.schedule: got {train.schedule!r} without train.steps or train.episodes, "
            "allowed: constant, or a run with an end"
        )
