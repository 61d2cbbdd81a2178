"""Matrix products with weights laid out ahead of time for the CPU's matrix library (MKL).

Packed weights are a second copy, in the library's own order: products of few rows, as in decoding, take
up to half the time, and from two rows on a row has the same bits in any batch. They are packed again
after each update. Without MKL, with other number formats or too little memory the plain product serves.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch import nn

PACKED_FOR_ROWS = 32  # what the layout is chosen for; any number of rows may be multiplied
LEAST_BYTES = 16 * 2**20  # of all weights together: what fits a cache gains nothing
MEMORY_SHARE = 0.25  # of this machine's memory, at most, for packed copies


class Product:
    """x times the weight's transpose, plus the bias."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight, self._bias = weight.detach(), None if bias is None else bias.detach()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self._weight, self._bias)

    def refresh(self) -> None:
        """The weight has changed in its place."""


class PackedProduct(Product):
    """The same from a packed copy."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__(weight, bias)
        self.refresh()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.numel() // x.shape[-1]
        return torch.ops.mkl._mkl_linear(x, self._packed, self._weight, self._bias, rows)

    def refresh(self) -> None:
        self._packed = torch.ops.mkl._mkl_reorder_linear_weight(self._weight, PACKED_FOR_ROWS)


MakeProduct = Callable[[torch.Tensor, torch.Tensor | None], Product]


class Products:
    """Those of one model, so that all can be refreshed."""

    def __init__(self, kind: type[Product]) -> None:
        self.kind = kind
        self._all: list[Product] = []

    def make(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
        self._all.append(self.kind(weight, bias))
        return self._all[-1]

    def take_linears(self, model: nn.Module) -> None:
        """Every linear layer that still computes for itself; the others are fused already."""
        for module in model.modules():
            if type(module) is nn.Linear and "forward" not in vars(module):
                module.forward = self.make(module.weight, module.bias)

    def refresh(self) -> None:
        for product in self._all:
            product.refresh()


def product_kind(model: nn.Module) -> type[Product]:
    """Packed where the library can, the model is worth it and the memory suffices."""
    weights = [m.weight for m in model.modules() if isinstance(m, nn.Linear)]
    can = torch.backends.mkl.is_available() and hasattr(torch.ops.mkl, "_mkl_linear")
    plain = all(w.dtype is torch.float32 and w.device.type == "cpu" for w in weights)
    needed = sum(weight.numel() * weight.element_size() for weight in weights)
    most = MEMORY_SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return PackedProduct if can and plain and LEAST_BYTES <= needed <= most else Product
