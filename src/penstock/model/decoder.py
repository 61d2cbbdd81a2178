"""One decoder: the forward pass of every family in `families.py`, as functions of its row and its weights.

It runs over rows, one per token, from any mix of sequences; a `Step` stores keys and values and attends.
What a layer computes is the entry of an `Ops` table. Engine and trainer call it.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from penstock.model.attention import Step
from penstock.model.decoder_weights import LayerWeights, Weights
from penstock.model.families import Family, Rope
from penstock.model.ops import Ops, Table

Tables = dict[str | None, Table]


def hidden_states(
    ops: Ops,
    family: Family,
    weights: Weights,
    step: Step,
    ids_R: Tensor,
    position_R: Tensor,
    kept_K: Tensor | None = None,
    *,
    checkpoints: bool = False,
) -> Tensor:
    """The normalised hidden states [rows, size] of the kept rows; None: of all. All rows are stored.

    `checkpoints`: keep only the inputs of each layer for the backward pass.
    """
    x_RD = ops.embed(family, weights, ids_R)
    tables = rotations(family, position_R, x_RD.dtype)
    return run_layers(ops, family, weights, step, tables, x_RD, kept_K, checkpoints=checkpoints)


def run_layers(
    ops: Ops,
    family: Family,
    weights: Weights,
    step: Step,
    tables: Tables,
    x_RD: Tensor,
    kept_K: Tensor | None = None,
    *,
    checkpoints: bool = False,
) -> Tensor:
    """The same from the inputs of the first layer, which may be overwritten."""
    last = len(weights.layers) - 1
    for index, layer in enumerate(weights.layers):
        kept = kept_K if index == last else None
        run = functools.partial(run_layer, ops, family, index, step, tables, kept, layer)
        if checkpoints and torch.is_grad_enabled():
            x_RD = checkpoint(run, x_RD, use_reentrant=False)
        else:
            x_RD = run(x_RD)
    return ops.norm(family, x_RD, weights.norm)


def run_layer(
    ops: Ops,
    family: Family,
    index: int,
    step: Step,
    tables: Tables,
    kept_K: Tensor | None,
    weights: LayerWeights,
    x_RD: Tensor,
) -> Tensor:
    """One layer: attention and a gated mlp, each with a residual; of the kept rows, None: of all."""
    table = tables[family.layers[index].rope]
    mixed_RN = ops.attend(family, weights, index, step, table, x_RD)
    if kept_K is not None:
        x_RD, mixed_RN = ops.take(x_RD, kept_K), ops.take(mixed_RN, kept_K)
    x_RD = ops.add_product(family, x_RD, mixed_RN, weights.out, weights.norms[1])
    return ops.mlp(family, weights, functools.partial(step.choose, index, kept_K), x_RD)


def logits(family: Family, weights: Weights, hidden_KD: Tensor) -> Tensor:
    """The logits of normalised hidden states."""
    return scaled_logits(weights.head(hidden_KD), family.logit_scale, family.logit_cap)


def scaled_logits(logits_KV: Tensor, scale: float, cap: float | None) -> Tensor:
    """Logits from the product of the head."""
    if scale != 1.0:
        logits_KV = logits_KV * scale
    if cap is not None:
        logits_KV = torch.tanh(logits_KV / cap) * cap
    return logits_KV


def rotations(family: Family, position_R: Tensor, dtype: torch.dtype) -> Tables:
    """Cosines and signed sines [rows, 1, turned size] of each rotation; None: no rotation."""
    tables: Tables = {None: None}
    for name, rope in family.ropes.items():
        tables[name] = _table(rope, position_R, torch.float32 if family.turns_in_float32 else dtype)
    return tables


def _table(rope: Rope, position_R: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    angle_RN = position_R[:, None].float() * _frequencies(rope, position_R.device)
    cos, sin = angle_RN.cos(), angle_RN.sin()
    if rope.factor != 1.0:
        cos, sin = cos * rope.factor, sin * rope.factor
    # the first half of the sines is negated instead of the heads
    return (
        torch.cat([cos, cos], -1)[:, None].to(dtype),
        torch.cat([-sin, sin], -1)[:, None].to(dtype),
    )


@functools.cache
def _frequencies(rope: Rope, device: torch.device) -> Tensor:
    """The frequencies on a device. Kept: to copy them, the host waits for all work of the GPU."""
    return rope.frequencies.to(device)
