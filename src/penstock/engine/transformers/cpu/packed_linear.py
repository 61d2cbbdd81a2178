"""Matrix products with weights in the layout of the CPU's matrix library: MKL on x86, oneDNN on ARM.

Packed weights are a second copy in the library's own order. Products of few rows, as in decoding, take
up to half the time, and from two rows on a row has the same bits in any batch with MKL. Weights are
packed again after each update. The weights of a small model gain nothing by it; on ARM they are transposed
for another library. Without such a library, with other number formats or too little memory, the plain
product is used.
"""

from __future__ import annotations

import os
import platform

import torch
from torch import nn

from penstock.model.decoder_weights import Linear
from penstock.model.joint_weights import JointProducts, PlainLinear

PACKED_FOR_ROWS = 32  # the row count that the layout is chosen for; any count may be multiplied
LEAST_BYTES = 16 * 2**20  # least size of all packed weights; smaller ones fit a cache
MEMORY_SHARE = 0.25  # largest share of this machine's memory for packed copies


class MklLinear(PlainLinear):
    """Compute the same product as `PlainLinear`, from a packed copy of the weight."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__(weight, bias)
        self.refresh()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.numel() // x.shape[-1]
        return torch.ops.mkl._mkl_linear(x, self._packed, self.weight, self.bias, rows)

    def refresh(self) -> None:
        self._packed = torch.ops.mkl._mkl_reorder_linear_weight(
            self.weight.contiguous(), PACKED_FOR_ROWS
        )


class DnnlLinear(PlainLinear):
    """Compute the same product as `PlainLinear` on an ARM CPU, from a packed copy of the weight."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__(weight, bias)
        self.refresh()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.numel() == x.shape[-1]:  # one row: the plain product is several times as fast
            return super().__call__(x)
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")

    def refresh(self) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(
            self.weight.contiguous(), PACKED_FOR_ROWS
        )


class BlasLinear(PlainLinear):
    """Compute the same product as `PlainLinear` on an ARM CPU, from a transposed copy of the weight.

    torch passes x @ weight.T to oneDNN, whose call costs as much as the product of 64 rows and a weight of
    128 x 128, and x @ copy to OpenBLAS, whose call costs little.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__(weight, bias)
        self._transposed = self.weight.t().contiguous()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.bias is None:
            return torch.matmul(x, self._transposed)
        rows_RD = x.reshape(-1, x.shape[-1])
        return torch.addmm(self.bias, rows_RD, self._transposed).view(*x.shape[:-1], -1)

    def refresh(self) -> None:
        self._transposed.copy_(self.weight.t())


class ModelLinears(JointProducts):
    """The matrix products of one model, all of one kind, so that an update can refresh them."""

    def __init__(self, kind: type[PlainLinear]) -> None:
        self.kind = kind
        self.sizes: set[tuple[int, int]] = set()  # inputs and outputs
        self._all: list[PlainLinear] = []

    def stacked(self, weight_EOI: torch.Tensor, bias_EO: torch.Tensor | None) -> list[Linear]:
        biases = [None] * len(weight_EOI) if bias_EO is None else bias_EO.detach().unbind()
        weights = weight_EOI.detach().unbind()
        return [self.product(weight, bias) for weight, bias in zip(weights, biases, strict=True)]

    def product(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PlainLinear:
        outputs, inputs = weight.shape
        self.sizes.add((inputs, outputs))
        self._all.append(self.kind(weight, bias))
        return self._all[-1]

    def refresh(self) -> None:
        for linear in self._all:
            linear.refresh()


def choose_linear(model: nn.Module) -> type[PlainLinear]:
    """This CPU's packed product if the model is large enough and the memory suffices."""
    weights = [m.weight for m in model.modules() if isinstance(m, nn.Linear)]
    weights += [p for p in model.parameters() if p.ndim == 3]  # experts
    can_pack = all(w.dtype is torch.float32 and w.device.type == "cpu" for w in weights)
    needed = sum(weight.numel() * weight.element_size() for weight in weights)
    most = MEMORY_SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if not can_pack or needed > most:
        return PlainLinear
    return packed_kind() if needed >= LEAST_BYTES else small_kind()


def packed_kind() -> type[PlainLinear]:
    """The packed product of this CPU, or the plain one if it has none."""
    if torch.backends.mkl.is_available() and hasattr(torch.ops.mkl, "_mkl_linear"):
        return MklLinear
    return DnnlLinear if _has_arm_onednn() else PlainLinear


def small_kind() -> type[PlainLinear]:
    """The product of this CPU for weights that fit its caches."""
    return BlasLinear if _has_arm_onednn() else PlainLinear


def _has_arm_onednn() -> bool:
    arm = platform.machine() in ("aarch64", "arm64") and torch.backends.mkldnn.is_available()
    return arm and hasattr(torch.ops.mkldnn, "_linear_pointwise")
