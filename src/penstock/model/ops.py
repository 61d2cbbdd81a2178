"""What a decoder layer computes, in plain torch: the reference, with gradients, for every family.

`Ops` is the table that `decoder.py` runs over. Another entry may compute the same in fewer launches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.model.attention import AttentionCall, Step
from penstock.model.decoder_weights import ExpertWeights, LayerWeights, Linear, Weights
from penstock.model.families import Experts, Family

Table = (
    tuple[Tensor, Tensor] | None
)  # cosines and signed sines [rows, 1, turned size]; None: no rotation


Choose = Callable[[Tensor], Tensor]  # the experts that rows take, from those that the router chose


class Ops(Protocol):
    """The parts of a layer, each with the products of its weights."""

    def embed(self, family: Family, weights: Weights, ids_R: Tensor) -> Tensor:
        """The inputs of the first layer."""

    def attend(
        self,
        family: Family,
        weights: LayerWeights,
        index: int,
        step: Step,
        table: Table,
        x_RD: Tensor,
    ) -> Tensor:
        """The heads' outputs side by side, from the layer's input: norm, product, rotation, attention."""

    def take(self, rows_RN: Tensor, number_K: Tensor) -> Tensor:
        """The rows of these numbers, which may repeat."""

    def add_product(
        self, family: Family, x_RD: Tensor, rows_RN: Tensor, linear: Linear, norm: Tensor | None
    ) -> Tensor:
        """x plus the normed product of other rows."""

    def mlp(self, family: Family, weights: LayerWeights, choose: Choose, x_RD: Tensor) -> Tensor:
        """x plus what the gated mlp, or the experts, make of its norm."""

    def norm(self, family: Family, x: Tensor, weight: Tensor | None) -> Tensor:
        """An RMS norm; None: none."""


@dataclass(slots=True, frozen=True)
class TorchOps:
    """The entry for a CPU, and for whatever no kernel computes.

    The rows of an expert are padded to `row_multiple`.
    """

    row_multiple: int = 1

    def embed(self, family: Family, weights: Weights, ids_R: Tensor) -> Tensor:
        return scaled(family, functional.embedding(ids_R, weights.embedding, weights.padding_id))

    def attend(
        self,
        family: Family,
        weights: LayerWeights,
        index: int,
        step: Step,
        table: Table,
        x_RD: Tensor,
    ) -> Tensor:
        row, size, queries = family.layers[index], family.head_size, family.heads
        turned = (family.heads + family.kv_heads) * size
        product_RN = weights.heads(_norm(family, x_RD, weights.norms[0]))
        both_RN, value_RN = product_RN[:, :turned], product_RN[:, turned:]
        both_RHS = both_RN.view(len(x_RD), -1, size)
        if weights.head_norms is not None:
            both_RHS = _head_norms(family, both_RHS, *weights.head_norms)
        both_RHS = _turn(both_RHS, table)
        query = both_RHS[:, :queries].transpose(0, 1)[None]
        key = both_RHS[:, queries:].transpose(0, 1)[None]
        value = value_RN.view(len(x_RD), -1, size).transpose(0, 1)[None]
        step.store(index, key, value)
        call = AttentionCall(
            query, key, value, family.scale, row.window, family.softcap, weights.sinks
        )
        return step.attend(index, call).reshape(len(x_RD), -1)

    def take(self, rows_RN: Tensor, number_K: Tensor) -> Tensor:
        return rows_RN.index_select(0, number_K)

    def add_product(
        self, family: Family, x_RD: Tensor, rows_RN: Tensor, linear: Linear, norm: Tensor | None
    ) -> Tensor:
        return _add(family, x_RD, _norm(family, linear(rows_RN), norm))

    def mlp(self, family: Family, weights: LayerWeights, choose: Choose, x_RD: Tensor) -> Tensor:
        *_, before, after = weights.norms
        normed_RD = _norm(family, x_RD, before)
        if isinstance(weights.mlp, ExpertWeights):
            output_RD = mix_experts(family, weights.mlp, choose, normed_RD, self.row_multiple)
        else:
            gates, down = weights.mlp
            gate, up = gates(normed_RD).chunk(2, -1)
            output_RD = down(activation(family.activation)(gate) * up)
        return _add(family, x_RD, _norm(family, output_RD, after))

    def norm(self, family: Family, x: Tensor, weight: Tensor | None) -> Tensor:
        return _norm(family, x, weight)


def embedding_scale(family: Family, dtype: torch.dtype) -> float:
    """The factor of a family's embeddings in this format."""
    scale = 1.0 if family.embedding_scale is None else family.embedding_scale
    return float(torch.tensor(scale, dtype=dtype)) if family.embedding_scale_rounds else scale


def scaled(family: Family, x_RD: Tensor) -> Tensor:
    """Embeddings as the first layer gets them."""
    if family.embedding_scale is None:
        return x_RD
    return x_RD * embedding_scale(family, x_RD.dtype)


def _add(family: Family, x_RD: Tensor, branch_RD: Tensor) -> Tensor:
    if family.residual_scale != 1.0:
        branch_RD = branch_RD * family.residual_scale
    return branch_RD.add_(x_RD)  # no operation keeps its output for the backward pass


def _norm(family: Family, x: Tensor, weight: Tensor | None) -> Tensor:
    """An RMS norm, rounded where the family rounds; None: none."""
    if weight is None:
        return x
    if x.dtype in (torch.float32, torch.float64):
        return _scaled(family, x) * (weight + 1.0 if family.norm_adds_one else weight)
    normed = _scaled(family, x.float())
    if family.norm_rounds_late:
        return weight * normed.to(x.dtype)
    return (normed * (weight.float() + 1.0 if family.norm_adds_one else weight)).to(x.dtype)


def _scaled(family: Family, x: Tensor) -> Tensor:
    """x over its root mean square."""
    squares = (x * x).sum(-1, keepdim=True)
    size = _number(float(x.shape[-1]), x.dtype, x.device)
    return x * squares.div_(size).add_(_number(family.epsilon, x.dtype, x.device)).rsqrt_()


@functools.cache
def _number(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor for a number, which torch would convert in each call."""
    with torch.inference_mode(False):  # a trainer of this process may need it for gradients
        return torch.tensor(value, dtype=dtype, device=device)


def _head_norms(
    family: Family, both_RHS: Tensor, query_weight: Tensor, key_weight: Tensor
) -> Tensor:
    """The norms of queries and keys: of each head, or of all heads of a token together."""
    query, key = both_RHS[:, : family.heads], both_RHS[:, family.heads :]
    if family.head_norms == "whole":
        normed = [
            _norm(family, heads.flatten(1), weight).unflatten(-1, heads.shape[1:])
            for heads, weight in ((query, query_weight), (key, key_weight))
        ]
        return torch.cat(normed, 1)
    in_place = both_RHS.dtype is torch.float32 and not torch.is_grad_enabled()
    if not in_place or family.norm_adds_one:
        return torch.cat([_norm(family, query, query_weight), _norm(family, key, key_weight)], 1)
    scaled_RHS = _scaled(family, both_RHS)  # one operation for both
    scaled_RHS[:, : family.heads].mul_(query_weight)
    scaled_RHS[:, family.heads :].mul_(key_weight)
    return scaled_RHS


def _turn(x_RHS: Tensor, table: tuple[Tensor, Tensor] | None) -> Tensor:
    """Rotate the first numbers of each head by the tokens' positions."""
    if table is None:
        return x_RHS
    cos, sin = table
    turned = cos.shape[-1]
    if turned < x_RHS.shape[-1]:
        return torch.cat([_turn(x_RHS[..., :turned], table), x_RHS[..., turned:]], -1)
    if cos.dtype != x_RHS.dtype:
        return _turn(x_RHS.to(cos.dtype), table).to(x_RHS.dtype)
    return (x_RHS * cos).add_(x_RHS.roll(turned // 2, -1).mul_(sin))


def mix_experts(
    family: Family, weights: ExpertWeights, choose: Choose, x_RD: Tensor, row_multiple: int
) -> Tensor:
    """The chosen experts' outputs of each token, weighted; added in the order of the experts."""
    row = family.experts
    assert row is not None
    weight_RC, expert_RC = route(row, weights.router(x_RD), choose)
    mixed_RD = torch.zeros_like(x_RD)
    for expert in expert_RC.unique().tolist():
        token_M, choice_M = torch.where(expert_RC == expert)
        padding = -len(token_M) % row_multiple
        x_MD = functional.pad(x_RD.index_select(0, token_M), (0, 0, 0, padding))
        inner_MI = gated(family, row, weights.gates[expert](x_MD))
        output_MD = weights.down[expert](inner_MI)[: len(token_M)]
        added_MD = output_MD * weight_RC[token_M, choice_M, None]
        mixed_RD = mixed_RD.index_add(0, token_M, added_MD.to(x_RD.dtype))
    return mixed_RD


def route(row: Experts, logit_RE: Tensor, choose: Choose) -> tuple[Tensor, Tensor]:
    """The weights and the numbers of each token's experts; the weights are the router's, whoever chose."""
    if not row.router_in_float32:
        expert_RC = choose(logit_RE.topk(row.count, -1).indices)
        return logit_RE.gather(-1, expert_RC).softmax(-1), expert_RC
    exact = torch.promote_types(logit_RE.dtype, torch.float32)
    weight_RE = logit_RE.softmax(-1, dtype=exact)
    expert_RC = choose(weight_RE.topk(row.count, -1).indices)
    weight_RC = weight_RE.gather(-1, expert_RC)
    if row.renormalises:
        weight_RC = weight_RC / weight_RC.sum(-1, keepdim=True)
    return weight_RC if row.weights_in_float32 else weight_RC.to(logit_RE.dtype), expert_RC


def gated(family: Family, row: Experts, product_MN: Tensor) -> Tensor:
    """What lies between an expert's products."""
    if row.clamp is None:
        gate, up = product_MN.chunk(2, -1)
        return activation(family.activation)(gate) * up
    alpha, limit = row.clamp
    gate = product_MN[..., ::2].clamp(max=limit)
    up = product_MN[..., 1::2].clamp(-limit, limit)
    return (up + 1) * (gate * torch.sigmoid(gate * alpha))


@functools.cache
def activation(name: str) -> Callable[[Tensor], Tensor]:
    """An activation by its name in a config."""
    if name == "silu":
        return functional.silu
    from transformers.activations import ACT2FN

    function: nn.Module = ACT2FN[name]
    return function
