"""Fewer operations for the same layers: sibling projections and norms.

q, k, v and gate, up become one matrix product each, an RMS norm one call. The weights stay parameters under their own names, as views of one array, so that digests and weight
updates see nothing of it. The first sibling computes for all; the others hand out their part.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from penstock.engine.transformers.cpu.mkl import MakeProduct, Product

FAMILIES = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def fuse_projections(model: nn.Module, make: MakeProduct = Product) -> list[tuple[int, int]]:
    """Fuse every family whose members are plain linear layers of one input; returns their sizes."""
    sizes = []
    for parent in model.modules():
        for names in FAMILIES:
            parts: list[Any] = [getattr(parent, name, None) for name in names]
            if _fusible(parts):
                _Fused(parts, make)
                sizes.append((parts[0].in_features, sum(part.out_features for part in parts)))
    return sizes


def fuse_with_kernels(model: nn.Module) -> dict[str, int]:
    """The Triton kernels where Triton is installed; returns how many layers of each kind."""
    if importlib.util.find_spec("triton") is None:
        return {}
    from penstock.engine.transformers.cuda.fuse_layers import fuse_layers

    return fuse_layers(model)


def fuse_norms(model: nn.Module) -> int:
    """One call for every RMS norm that computes what `rms_norm` does; returns how many.

    A norm is known by its class name and proven by its output, so that a variant (an offset of one,
    another order of rounding that matters) keeps its own code.
    """
    count = 0
    for module in model.modules():
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        weight = getattr(module, "weight", None)
        if type(module).__name__.endswith("RMSNorm") and weight is not None and eps is not None:
            count += _fuse_norm(module, weight, float(eps))
    return count


def _fuse_norm(module: nn.Module, weight: torch.Tensor, eps: float) -> bool:
    shape = tuple(weight.shape)

    def forward(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.rms_norm(x, shape, weight, eps)

    probe = torch.linspace(-3, 5, 4 * weight.numel(), device=weight.device, dtype=weight.dtype)
    probe = probe.view(4, *shape)
    tolerance = 1e-5 if weight.dtype is torch.float32 else 2e-2
    same = torch.allclose(forward(probe), module(probe), rtol=tolerance, atol=tolerance)
    if same:
        module.forward = forward
    return same


def _fusible(parts: list[Any]) -> bool:
    first = parts[0]
    return all(
        type(part) is nn.Linear
        and part.in_features == first.in_features
        and part.weight.dtype == first.weight.dtype
        and (part.bias is None) == (first.bias is None)
        for part in parts
    )


class _Fused:
    """One product for several layers. Holds its result only until the last layer took its part."""

    def __init__(self, parts: list[nn.Linear], make: MakeProduct) -> None:
        self._sizes = [part.out_features for part in parts]
        weight, bias = torch.cat([part.weight.detach() for part in parts]), None
        if parts[0].bias is not None:
            bias = torch.cat([part.bias.detach() for part in parts])
        self._product = make(weight, bias)
        self._input: torch.Tensor | None = None
        self._outputs: tuple[torch.Tensor, ...] = ()
        first = 0
        for index, part in enumerate(parts):
            rows = slice(first, first + part.out_features)
            part.weight = nn.Parameter(weight[rows], requires_grad=False)
            if bias is not None:
                part.bias = nn.Parameter(bias[rows], requires_grad=False)
            part.forward = self._part(index)
            first = rows.stop

    def _part(self, index: int) -> Callable[[torch.Tensor], torch.Tensor]:
        last = len(self._sizes) - 1

        def forward(x: torch.Tensor) -> torch.Tensor:
            if x is not self._input:
                self._input, self._outputs = x, self._product(x).split(self._sizes, dim=-1)
            output = self._outputs[index]
            if index == last:
                self._input, self._outputs = None, ()
            return output

        return forward
