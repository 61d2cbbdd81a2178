"""The steps of a decoder layer between its matrix products, forward and backward, in plain torch.

`layer_pass.py` puts them together; `layer_step_kernels.py` has the same functions as kernels for a GPU, and tests
compare the two. A step's backward function takes what its forward function returned.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu

from penstock.model.packed_attention import PackLayout, packed_attention


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """The heads of an attention layer; a row of its joint product has queries, keys and values."""

    queries: int
    keys: int  # and as many values
    size: int
    scale: float

    @property
    def rotated(self) -> int:
        """Columns of queries and keys."""
        return (self.queries + self.keys) * self.size

    def split(self, joint_TC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Views of queries, keys and values, each [rows, heads, size]."""
        first, second = self.queries * self.size, self.rotated
        return (
            joint_TC[:, :first].unflatten(1, (self.queries, self.size)),
            joint_TC[:, first:second].unflatten(1, (self.keys, self.size)),
            joint_TC[:, second:].unflatten(1, (self.keys, self.size)),
        )


def norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The RMS norm of each row, and 1 / root mean square."""
    exact_TD = x_TD.to(torch.promote_types(x_TD.dtype, torch.float32))
    inverse_T1 = torch.rsqrt(exact_TD.square().mean(-1, keepdim=True) + eps)
    return (exact_TD * inverse_T1 * weight_D).to(x_TD.dtype), inverse_T1


def add_norm(
    x_TD: Tensor, added_TD: Tensor, weight_D: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """x + added, its norm, and 1 / root mean square of each row."""
    total_TD = x_TD + added_TD
    return total_TD, *norm(total_TD, weight_D, eps)


def norm_back(
    grad_TD: Tensor,
    x_TD: Tensor,
    weight_D: Tensor,
    inverse_T1: Tensor,
    added_TD: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The gradients of the input, plus `added`, and of the weight."""
    exact = inverse_T1.dtype
    grad_TD, normed_TD = grad_TD.to(exact), x_TD.to(exact) * inverse_T1.view(-1, 1)
    weight_grad_D = (grad_TD * normed_TD).sum(0)
    grad_TD = grad_TD * weight_D
    mean_T1 = (grad_TD * normed_TD).mean(-1, keepdim=True)
    x_grad_TD = (grad_TD - normed_TD * mean_T1) * inverse_T1.view(-1, 1)
    x_grad_TD = x_grad_TD if added_TD is None else x_grad_TD + added_TD
    return x_grad_TD.to(x_TD.dtype), weight_grad_D


def rotate_(joint_TC: Tensor, cos: Tensor, sin: Tensor, heads: Heads) -> None:
    """Rotate queries and keys in place; cos and sin are [1, rows, size]."""
    rotated_THD = joint_TC[:, : heads.rotated].unflatten(1, (-1, heads.size))
    low, high = rotated_THD.chunk(2, -1)
    turned_THD = torch.cat([-high, low], -1)
    rotated_THD.copy_(rotated_THD * cos[0, :, None] + turned_THD * sin[0, :, None])


def attend(joint_TC: Tensor, layout: PackLayout, heads: Heads) -> tuple[Tensor, ...]:
    """The attention output [rows, queries x size], and what backward needs."""
    query, key, value = (part.transpose(0, 1)[None] for part in heads.split(joint_TC))
    output, _ = packed_attention(
        torch.nn.Identity(), query, key, value, None, pack_layout=layout, scaling=heads.scale
    )
    return (output.reshape(len(joint_TC), -1),)


def attend_back(
    grad_TC: Tensor,
    joint_TC: Tensor,
    attended: tuple[Tensor, ...],
    layout: PackLayout,
    heads: Heads,
    cos: Tensor,
    sin: Tensor,
) -> Tensor:
    """The gradient of the joint product before its rotation."""
    with torch.enable_grad():
        leaf_TC = joint_TC.detach().requires_grad_()
        (output_TC,) = attend(leaf_TC, layout, heads)
        (joint_grad_TC,) = torch.autograd.grad(output_TC, leaf_TC, grad_TC)
    # The transposed rotation: that of the halves in exchanged order by the sines with opposite sign.
    rotated_THD = joint_grad_TC[:, : heads.rotated].unflatten(1, (-1, heads.size))
    low, high = (rotated_THD * sin[0, :, None]).chunk(2, -1)
    rotated_THD.copy_(rotated_THD * cos[0, :, None] + torch.cat([high, -low], -1))
    return joint_grad_TC


def gate(both_TF: Tensor) -> Tensor:
    """silu(gate) * up of rows that have the gate first."""
    gate_TF, up_TF = both_TF.chunk(2, -1)
    return silu(gate_TF) * up_TF


def gate_back(grad_TF: Tensor, both_TF: Tensor) -> tuple[Tensor, Tensor]:
    """(gradient of the input of `gate`, its output). The output is computed again; `grad_TF` may be overwritten.

    The forward pass does not keep the output, which would add a third to what a layer keeps.
    """
    gate_TF, up_TF = both_TF.chunk(2, -1)
    share_TF = torch.sigmoid(gate_TF)
    slope_TF = share_TF * (1 + gate_TF * (1 - share_TF))
    grads_TF = torch.cat([grad_TF * up_TF * slope_TF, grad_TF * gate_TF * share_TF], -1)
    return grads_TF, gate(both_TF)


def add_product(total: Tensor | None, left_TO: Tensor, right_TI: Tensor) -> Tensor:
    """Total + left^T right, in float32 at least; the total changes in place."""
    exact = torch.promote_types(left_TO.dtype, torch.float32)
    left_OT, right_TI = left_TO.t().to(exact), right_TI.to(exact)
    return left_OT @ right_TI if total is None else total.addmm_(left_OT, right_TI)
