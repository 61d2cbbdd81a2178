"""Collectives along an axis of ranks that gradients pass through.

A tensor that is whole on every rank of the axis is `equal`; one of which each rank has a summand is
`partial`; one of which each rank has a slice of the last dimension is `split`. Each function names the
two states it leads between; its backward pass leads the gradient the other way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.training.parallel.ranks import Axis


def use_equal(tensor: Tensor, axis: Axis) -> Tensor:
    """A tensor that is equal on all ranks, unchanged; its gradient is summed over the ranks' parts."""
    return _custom_gradient(
        tensor, lambda whole: whole.view_as(whole), lambda grad: all_sum(grad, axis)
    )


def sum_partial(tensor: Tensor, axis: Axis) -> Tensor:
    """The sum of a partial tensor, equal on every rank; its gradient is equal too."""
    return _custom_gradient(tensor, lambda part: all_sum(part, axis), lambda grad: grad)


def gather_split(tensor: Tensor, axis: Axis) -> Tensor:
    """The whole of a tensor that is split along its last dimension."""
    return _custom_gradient(
        tensor, lambda part: _joined(part, axis, -1), lambda grad: _part_of(grad, axis, -1)
    )


def split_equal(tensor: Tensor, axis: Axis) -> Tensor:
    """This rank's slice of an equal tensor, along its last dimension."""
    return _custom_gradient(
        tensor, lambda whole: _part_of(whole, axis, -1), lambda grad: _joined(grad, axis, -1)
    )


def gather_tokens(tensor: Tensor, axis: Axis, dim: int) -> Tensor:
    """The slices of all ranks along `dim`; each rank then has a part of the gradient."""
    return _custom_gradient(
        tensor,
        lambda part: _joined(part, axis, dim),
        lambda grad: _part_of(all_sum(grad, axis), axis, dim),
    )


def all_sum(tensor: Tensor, axis: Axis) -> Tensor:
    """The sum over the axis of a tensor that carries no gradient."""
    total = tensor.contiguous().clone()
    if axis.size > 1:
        dist.all_reduce(total, group=axis.group)
    return total


def all_max(tensor: Tensor, axis: Axis) -> Tensor:
    """The largest value over the axis, element by element."""
    largest = tensor.contiguous().clone()
    if axis.size > 1:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=axis.group)
    return largest


def all_gather(tensor: Tensor, axis: Axis, dim: int, total: int) -> Tensor:
    """The slices of all ranks, joined along `dim` to `total`; the last ones may be shorter."""
    size = -(-total // axis.size)
    part = tensor.contiguous()
    if part.shape[dim] < size:
        shape = list(part.shape)
        shape[dim] = size - part.shape[dim]
        part = torch.cat([part, part.new_zeros(shape)], dim)
    parts = [torch.empty_like(part) for _ in range(axis.size)]
    dist.all_gather(parts, part, group=axis.group)
    return torch.cat(parts, dim).narrow(dim, 0, total)


def _joined(tensor: Tensor, axis: Axis, dim: int) -> Tensor:
    """Join slices of one size."""
    return all_gather(tensor, axis, dim % tensor.ndim, tensor.shape[dim] * axis.size)


def _part_of(tensor: Tensor, axis: Axis, dim: int) -> Tensor:
    """Cut this rank's slice out of a tensor."""
    size = tensor.shape[dim] // axis.size
    return tensor.narrow(dim, axis.index * size, size).contiguous()


def _custom_gradient(
    tensor: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]
) -> Tensor:
    result: Tensor = _CustomGradient.apply(tensor, forward, backward)
    return result


class _CustomGradient(torch.autograd.Function):
    """Applies one function to a tensor, and another to its gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, forward: Any, backward: Any) -> Tensor:
        ctx.lead_back = backward
        result: Tensor = forward(tensor)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.lead_back(grads[0]), None, None
