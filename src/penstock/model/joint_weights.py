"""The engine's products: one for sibling projections, whose weights lie beside each other.

q, k and v are one weight, gate and up another. The parts stay parameters under the checkpoint's names, as views of it,
so digests and weight updates do not change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from penstock.model.decoder_weights import Linear, ModuleProducts


class PlainLinear:
    """Compute x @ weight.T + bias."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight, self.bias = weight.detach(), None if bias is None else bias.detach()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight, self.bias)

    def refresh(self) -> None:
        """Follow an in-place change of the weight."""


class LinearStack(Sequence[Linear]):
    """The products of stacked weights [count, outputs, inputs]."""

    exact = False  # a row has the same bits in any batch

    def __init__(self, weight_EOI: torch.Tensor, bias_EO: torch.Tensor | None) -> None:
        self.weight_EOI = weight_EOI.detach()
        self.bias_EO = None if bias_EO is None else bias_EO.detach()

    def __len__(self) -> int:
        return len(self.weight_EOI)

    def __getitem__(self, index: Any) -> Any:
        bias = None if self.bias_EO is None else self.bias_EO[index]
        return PlainLinear(self.weight_EOI[index], bias)


class JointProducts:
    """Plain products of joint weights; modules of another kind (quantised ones) are called. See `Products`."""

    def joint(self, modules: list[Any]) -> Linear:
        if not can_join(modules):
            return ModuleProducts().joint(modules)
        return self.product(*join_weights(modules))

    def stacked(self, weight_EOI: torch.Tensor, bias_EO: torch.Tensor | None) -> Sequence[Linear]:
        return LinearStack(weight_EOI, bias_EO)

    def product(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PlainLinear:
        return PlainLinear(weight, bias)


def can_join(parts: list[Any]) -> bool:
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
    if len(parts) == 1:
        return parts[0].weight, parts[0].bias
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
