"""Fewer operations for the same layers: one matrix product for sibling projections.

q, k, v become one product, gate and up another. The weights stay parameters under their own names, as
views of one array, so digests and weight updates do not change. The first sibling that runs computes the
product; the others return their part of it. Kernels for a GPU's layers are in `penstock.model.kernels.layer_kernels`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class PlainLinear:
    """Compute x @ weight.T + bias."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight, self._bias = weight.detach(), None if bias is None else bias.detach()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self._weight, self._bias)

    def refresh(self) -> None:
        """Follow an in-place change of the weight."""


def fuse_projections(model: nn.Module) -> list[FusedLinear]:
    """Fuse siblings that are plain linear layers of one input; return the products."""
    fused = []
    for parent in model.modules():
        for names in SIBLINGS:
            parts: list[Any] = [getattr(parent, name, None) for name in names]
            if can_fuse(parts):
                fused.append(FusedLinear(parts))
    return fused


def can_fuse(parts: list[Any]) -> bool:
    """Whether these are plain linear layers that one product can compute."""
    first = parts[0]
    return all(
        type(part) is nn.Linear
        and part.in_features == first.in_features
        and part.weight.dtype == first.weight.dtype
        and (part.bias is None) == (first.bias is None)
        for part in parts
    )


def join_weights(parts: list[nn.Linear]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One weight and bias of several layers, whose own become views of them."""
    weight, bias = torch.cat([part.weight.detach() for part in parts]), None
    if parts[0].bias is not None:
        bias = torch.cat([part.bias.detach() for part in parts])
    first = 0
    for part in parts:
        rows = slice(first, first + part.out_features)
        part.weight = nn.Parameter(weight[rows], requires_grad=False)
        if bias is not None:
            part.bias = nn.Parameter(bias[rows], requires_grad=False)
        first = rows.stop
    return weight, bias


class FusedLinear:
    """One product for several layers; keeps its result until the last layer has taken its part."""

    def __init__(self, parts: list[nn.Linear]) -> None:
        self.sizes = [part.out_features for part in parts]
        self.linear = PlainLinear(*join_weights(parts))
        self._input: torch.Tensor | None = None
        self._outputs: tuple[torch.Tensor, ...] = ()
        for index, part in enumerate(parts):
            part.forward = self._part(index)

    def _part(self, index: int) -> Callable[[torch.Tensor], torch.Tensor]:
        last = len(self.sizes) - 1

        def forward(x: torch.Tensor) -> torch.Tensor:
            if x is not self._input:
                self._input, self._outputs = x, self.linear(x).split(self.sizes, dim=-1)
            output = self._outputs[index]
            if index == last:
                self._input, self._outputs = None, ()
            return output

        return forward
