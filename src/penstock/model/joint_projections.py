"""One matrix product for the queries, keys and values of a layer that trains, forward and backward.

The weights stay parameters of their own and are joined for each pass, which costs little beside the
product of many tokens. The first of the layers that runs computes the product; the others return their part of it.
"""

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_NAMES = ("q_proj", "k_proj", "v_proj")


@dataclass(slots=True, eq=False)
class _Product:
    """The product of layers that have the same input; kept until the last has taken its part."""

    parts: tuple[nn.Linear, ...]
    inputs: torch.Tensor | None = None
    outputs: tuple[torch.Tensor, ...] = ()

    def part(self, place: int, x: torch.Tensor) -> torch.Tensor:
        if x is not self.inputs:
            weight = torch.cat([part.weight for part in self.parts])
            biases = [part.bias for part in self.parts if part.bias is not None]
            product = nn.functional.linear(x, weight, torch.cat(biases) if biases else None)
            sizes = [part.out_features for part in self.parts]
            self.inputs, self.outputs = x, product.split(sizes, dim=-1)
        output = self.outputs[place]
        if place == len(self.parts) - 1:
            self.inputs, self.outputs = None, ()
        return output


def join_projections(attention: Any) -> bool:
    """Compute q, k and v of an attention layer as one product, if they are plain linear layers."""
    parts: tuple[Any, ...] = tuple(getattr(attention, name, None) for name in _NAMES)
    if not all(type(part) is nn.Linear for part in parts):
        return False
    kinds = {
        (part.in_features, part.weight.dtype, part.weight.requires_grad, part.bias is None)
        for part in parts
    }
    if len(kinds) > 1:
        return False
    product = _Product(parts)
    for place, part in enumerate(parts):
        part.joint_product, part.joint_place = product, place
        part.forward = types.MethodType(_forward, part)  # follows a copy of the model
    return True


def separate_projections(part: Any) -> None:
    """Undo `join_projections` for one of its layers."""
    if getattr(part.__dict__.get("forward"), "__func__", None) is _forward:
        del part.forward, part.joint_product, part.joint_place


def _forward(part: Any, x: torch.Tensor) -> torch.Tensor:
    output: torch.Tensor = part.joint_product.part(part.joint_place, x)
    return output
