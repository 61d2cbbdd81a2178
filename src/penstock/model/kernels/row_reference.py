"""The products of a decode step with few rows in plain torch: the specification of `row_kernels.py` in tests."""

from __future__ import annotations

import torch
from torch.nn import functional

from penstock.model.kernels.decode_reference import rotate_store
from penstock.model.kernels.row_tiles import Tiles


def norm_rows(x_BD: torch.Tensor, norm: tuple[torch.Tensor, float]) -> torch.Tensor:
    """The rows' RMS norm."""
    return functional.rms_norm(x_BD, norm[0].shape, *norm)


def project_and_store(
    x_BD: torch.Tensor,
    norm: tuple[torch.Tensor, float],
    weight_ND: torch.Tensor,
    bias_N: torch.Tensor | None,
    turn: tuple[torch.Tensor, torch.Tensor],
    keys_TGD: torch.Tensor,
    values_TGD: torch.Tensor,
    target_B: torch.Tensor,
    tiles: Tiles,
) -> torch.Tensor:
    """The query heads of the normed rows, turned; store turned keys and values at `target_B`."""
    product_BN = functional.linear(norm_rows(x_BD, norm), weight_ND, bias_N)
    return rotate_store(product_BN, *turn, keys_TGD, values_TGD, target_B)


def gate_product(
    x_BD: torch.Tensor,
    norm: tuple[torch.Tensor, float],
    weight_FD: torch.Tensor,
    tiles: Tiles,
) -> torch.Tensor:
    """silu(gate) * up of the normed rows; the weight holds the gate's rows, then those of up."""
    gate_BF, up_BF = functional.linear(norm_rows(x_BD, norm), weight_FD).chunk(2, dim=1)
    return functional.silu(gate_BF) * up_BF


def add_product(
    total_BD: torch.Tensor,
    x_BK: torch.Tensor,
    weight_DK: torch.Tensor,
    bias_D: torch.Tensor | None,
    tiles: Tiles,
) -> torch.Tensor:
    """Add x times the weight, and the bias, to the total in place; return the total."""
    total_BD.addmm_(x_BK, weight_DK.t())
    return total_BD if bias_D is None else total_BD.add_(bias_D)
