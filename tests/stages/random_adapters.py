"""Random adapters for the linear layers of a model, as an engine holds them, and the model with them merged."""

from __future__ import annotations

import copy
from typing import Any

import torch

from penstock.types import WeightHandle
from penstock.weights.digest import digest_of

Adapter = dict[str, torch.Tensor]


def random_adapter(model: Any, rank: int, seed: int, parts: str = "") -> Adapter:
    """An adapter of every linear layer but the head whose name holds `parts`."""
    generator, head, made = torch.Generator().manual_seed(seed), model.get_output_embeddings(), {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and module is not head and parts in name:
            made[f"{name}.low"] = torch.randn(rank, module.in_features, generator=generator) * 0.1
            made[f"{name}.high"] = torch.randn(module.out_features, rank, generator=generator) * 0.1
    return made


def merged(model: Any, adapter: Adapter) -> Any:
    """A copy of the model whose weights hold what the adapter adds."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for name, module in model.named_modules():
            if f"{name}.low" in adapter:
                module.weight += adapter[f"{name}.high"] @ adapter[f"{name}.low"]
    return model


def handle_of(name: str, adapter: Adapter) -> WeightHandle:
    digest = digest_of(adapter.items())
    return WeightHandle(version=0, digest=digest, kind="test", location=name)
