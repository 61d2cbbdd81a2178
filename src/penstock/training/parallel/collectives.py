"""Collectives along an axis of ranks that gradients pass through.

A tensor that is whole on every rank of the axis is `equal`; one of which each rank has a summand is
`partial`; one of which each rank has a slice of the last dimension is `split`. Each function names the
two states it leads between; its backward pass leads the gradient the other way.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.training.parallel.ranks import Axis


def use_equal(tensor: Tensor, axis: Axis) -> Tensor:
    """Return an equal tensor as it is; sum its gradient, of which each rank has a part."""
    result: Tensor = _Use.apply(tensor, axis)
    return result


def sum_partial(tensor: Tensor, axis: Axis) -> Tensor:
    """Return the sum of a partial tensor, equal on every rank; its gradient is equal too."""
    result: Tensor = _Sum.apply(tensor, axis)
    return result


def gather_split(tensor: Tensor, axis: Axis) -> Tensor:
    """Return the whole of a tensor that is split along its last dimension."""
    result: Tensor = _Gather.apply(tensor, axis)
    return result


def split_equal(tensor: Tensor, axis: Axis) -> Tensor:
    """Return this rank's slice of an equal tensor, along its last dimension."""
    result: Tensor = _Split.apply(tensor, axis)
    return result


def all_sum(tensor: Tensor, axis: Axis) -> Tensor:
    """Return the sum over the axis of a tensor that carries no gradient."""
    total = tensor.contiguous().clone()
    if axis.size > 1:
        dist.all_reduce(total, group=axis.group)
    return total


def all_max(tensor: Tensor, axis: Axis) -> Tensor:
    """Return the largest value over the axis, element by element."""
    largest = tensor.contiguous().clone()
    if axis.size > 1:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=axis.group)
    return largest


def all_gather(tensor: Tensor, axis: Axis, dim: int, total: int) -> Tensor:
    """Return the slices of all ranks, joined along `dim` to `total`; the last ones may be shorter."""
    size = -(-total // axis.size)
    own = tensor.contiguous()
    if own.shape[dim] < size:
        shape = list(own.shape)
        shape[dim] = size - own.shape[dim]
        own = torch.cat([own, own.new_zeros(shape)], dim)
    parts = [torch.empty_like(own) for _ in range(axis.size)]
    dist.all_gather(parts, own, group=axis.group)
    return torch.cat(parts, dim).narrow(dim, 0, total)


class _Use(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return all_sum(grads[0], ctx.axis), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Axis) -> Tensor:
        return all_sum(tensor, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Axis) -> Tensor:
        ctx.axis, ctx.size = axis, tensor.shape[-1]
        return all_gather(tensor, axis, tensor.ndim - 1, tensor.shape[-1] * axis.size)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].narrow(-1, ctx.axis.index * ctx.size, ctx.size).contiguous(), None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        size = tensor.shape[-1] // axis.size
        return tensor.narrow(-1, axis.index * size, size).contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0]
        return all_gather(grad, ctx.axis, grad.ndim - 1, grad.shape[-1] * ctx.axis.size), None


def gather_tokens(tensor: Tensor, axis: Axis, dim: int) -> Tensor:
    """Return the slices of all ranks along `dim`; each rank then has a part of the gradient."""
    result: Tensor = _GatherTokens.apply(tensor, axis, dim)
    return result


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim, ctx.size = axis, dim, tensor.shape[dim]
        return all_gather(tensor, axis, dim, tensor.shape[dim] * axis.size)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        whole = all_sum(grads[0], ctx.axis)
        own = whole.narrow(ctx.dim, ctx.axis.index * ctx.size, ctx.size)
        return own.contiguous(), None, None
