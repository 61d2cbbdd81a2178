"""The models that score a batch and are not trained: the reference and the teachers."""

from __future__ import annotations

from typing import Any

import torch

from penstock.config import Config
from penstock.training.algo.method import task_algorithms
from penstock.training.policy import load_policy


def load_scorers(config: Config, dtype: torch.dtype) -> tuple[Any | None, dict[str, Any]]:
    """(the reference, the teachers by name), frozen. None: there is no reference, or the policy can be it.

    With adapters the policy is its own reference without them; one that moves is an average of its weights.
    """

    def load(path: str) -> Any:
        return load_policy(path, config.model, dtype).requires_grad_(False)

    train = config.train
    is_policy = train.reference_moves or (config.model.lora.rank > 0 and not train.reference)
    algorithms = task_algorithms(config).values()
    needs_reference = any(algorithm.settings.needs_reference for algorithm in algorithms)
    reference = None
    if needs_reference and not is_policy:
        reference = load(train.reference or config.model.path)
    return reference, {name: load(teacher.path) for name, teacher in config.teachers.items()}
