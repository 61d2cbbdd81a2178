"""Gradients of head and embedding, the largest matrices, straight into those of their masters.

By itself each would get a gradient in half precision of the size of the whole matrix, for every pack, that is then
added to the other's (a tied weight) and to the master's. Here the head's product is added to the master's gradient
in float32, and of the embedding's gradient there are only the rows of the pack's tokens.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from penstock.model.kernels.layer_pass import Joint


class _Rows:
    """Where the gradient of an embedding goes. A copy of the model has no such place and runs the plain code."""

    def __init__(self, joint: Joint) -> None:
        self.joint = joint

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """None: the masters are not the copy's own."""


class _EmbeddingFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weight_VD: Tensor, ids: Tensor, padding: int | None, rows: _Rows
    ) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.padding, ctx.rows = padding, rows
        return nn.functional.embedding(ids, weight_VD)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None, None]:
        (ids,) = ctx.saved_tensors
        ids_T, grad_TD = ids.reshape(-1), grads[0].reshape(ids.numel(), -1)
        if ctx.padding is not None:  # a token that is not trained
            grad_TD = grad_TD.masked_fill((ids_T == ctx.padding)[:, None], 0)
        ctx.rows.joint.add(functools.partial(_add_rows, ctx.rows.joint), ids_T, grad_TD)
        return None, None, None, None


def _add_rows(joint: Joint, total_VD: Tensor | None, ids_T: Tensor, grad_TD: Tensor) -> Tensor:
    if total_VD is None:
        exact = torch.promote_types(grad_TD.dtype, torch.float32)
        total_VD = torch.zeros_like(joint.values(), dtype=exact)
    return total_VD.index_add_(0, ids_T, grad_TD.to(total_VD.dtype))


def install(
    model: Any, masters: Mapping[int, nn.Parameter], steps: Any
) -> Callable[[Tensor, Tensor], None] | None:
    """Install `_forward` in the embedding; return a function that adds left^T right to the head's gradient."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if type(embedding) is nn.Embedding and id(embedding.weight) in masters:
        embedding.rows = _Rows(Joint([embedding.weight], masters))
        embedding.forward = types.MethodType(_forward, embedding)
    if id(head.weight) not in masters:
        return None
    return functools.partial(Joint([head.weight], masters).add, steps.add_product)


def restore(model: Any) -> None:
    """Undo `install` in the embedding."""
    embedding = model.get_input_embeddings()
    if getattr(embedding.__dict__.get("forward"), "__func__", None) is _forward:
        del embedding.forward, embedding.rows


def _forward(module: Any, ids: Tensor) -> Tensor:
    if module.rows is None or module.max_norm is not None or module.scale_grad_by_freq:
        plain: Tensor = type(module).forward(module, ids)
        return plain
    output: Tensor = _EmbeddingFunction.apply(module.weight, ids, module.padding_idx, module.rows)
    return output
