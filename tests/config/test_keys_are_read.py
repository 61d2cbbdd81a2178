"""Every key of the config is read by code that acts on it: no setting is accepted and ignored."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel

from penstock.config import Config, EvalTaskConfig, RewardConfig, TaskConfig, TaskDataConfig
from stages.source_code import FILES, SOURCE, nodes

READ_BY_NAME = {  # sections whose fields are copied by name into another record, which is then read
    "produce": "rollout/strategy.py copies the fields into the strategy's own config",
    "algorithm": "training/algo/method.py lays the fields over the method's AlgorithmSettings",
}
READ_BY_THE_TREE = {  # keys that the config itself turns into what the code reads
    "eval.sampling": "Config.eval_sampling makes a SamplingConfig of it",
    "launch.producer_kinds.count": "LaunchConfig.kind_of finds the kind of an engine by it",
    "launch.producer_kinds.engine": "Config.of_engine lays it over [engine]",
    "launch.producer_kinds.ray_options": "LaunchConfig.engine_ray_options lays it over those of all",
}


def leaves(model: type[BaseModel], path: str = "") -> Iterator[tuple[type[BaseModel], str, str]]:
    """Yield (class, section path, field) for every leaf of the tree."""
    for name, field in model.model_fields.items():
        kinds = [
            kind
            for kind in (field.annotation, *get_args(field.annotation))
            if isinstance(kind, type) and issubclass(kind, BaseModel)
        ]
        if kinds:
            yield from leaves(kinds[0], f"{path}{name}.")
        else:
            yield model, path, name


class SourceFile:
    """What one file of the package reads and names."""

    def __init__(self, path: Path) -> None:
        self.reads = {
            node.attr
            for node in nodes(path)
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
        }
        self.names = self.reads | {node.id for node in nodes(path) if isinstance(node, ast.Name)}
        self.names |= {node.arg for node in nodes(path) if isinstance(node, ast.arg)}


@functools.cache
def source_files() -> list[SourceFile]:
    """Return the files of the package but those of config and preflight."""
    return [
        SourceFile(path)
        for path in FILES
        if "config" not in path.relative_to(SOURCE).parts and path != SOURCE / "preflight.py"
    ]


LEAVES = list(leaves(Config))


@pytest.mark.parametrize(
    ("model", "path", "name"), LEAVES, ids=[f"{path}{name}" for _, path, name in LEAVES]
)
def test_a_key_is_read_where_its_section_is_used(
    model: type[BaseModel], path: str, name: str
) -> None:
    section = path.rstrip(".").rsplit(".", 1)[-1] or "config"
    classes = {kind.__name__ for kind in model.__mro__ if name in getattr(kind, "model_fields", {})}
    files = source_files()
    if section not in READ_BY_NAME:
        files = [file for file in files if file.names & {section, *classes}]
    if f"{path}{name}" not in READ_BY_THE_TREE:
        assert any(name in file.reads for file in files), "no code outside config/ reads this key"


def test_a_section_has_one_place_in_the_tree() -> None:
    """A class at two places would let one of them be ignored unseen; tasks share a base instead."""
    places: dict[type[BaseModel], set[str]] = {}
    for model, path, _ in LEAVES:
        places.setdefault(model, set()).add(path)
    assert [places.pop(model) for model in (RewardConfig,)] == [
        {"tasks.rewards.", "eval.tasks.rewards."}  # build_reward reads both
    ]
    assert all(len(paths) == 1 for paths in places.values()), places
    shared = TaskConfig.model_fields.keys() & EvalTaskConfig.model_fields.keys()
    assert shared == TaskDataConfig.model_fields.keys()
