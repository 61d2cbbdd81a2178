"""One decoder: the forward pass of every family in `families.py`, as functions of its row and its weights.

It runs over rows, one per token, from any mix of sequences; a `Step` stores keys and values and attends. The
engine on a CPU and the trainer on a CPU call it. The weights stay the parameters of transformers' modules,
under the checkpoint's names; how they are multiplied is the caller's (`Products`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from penstock.model.attention import AttentionCall, Step
from penstock.model.families import Experts, Family, Rope

Linear = Callable[[Tensor], Tensor]
Tables = dict[str | None, tuple[Tensor, Tensor] | None]


@dataclass(slots=True, frozen=True, eq=False, kw_only=True)
class ExpertWeights:
    """The products of a router and its experts."""

    router: Linear
    gates: Sequence[Linear]
    down: Sequence[Linear]


@dataclass(slots=True, frozen=True, eq=False, kw_only=True)
class LayerWeights:
    """The weights of one layer; None: the family has none there."""

    norms: tuple[Tensor | None, ...]
    heads: Linear  # queries, keys and values side by side
    head_norms: tuple[Tensor, Tensor] | None
    out: Linear
    sinks: Tensor | None
    mlp: tuple[Linear, Linear] | ExpertWeights  # gate and up side by side, and down


@dataclass(slots=True, frozen=True, eq=False, kw_only=True)
class Weights:
    """The weights of a decoder."""

    embedding: Tensor
    padding_id: int | None  # its embedding gets no gradient
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Linear


class Products(Protocol):
    """How weights are multiplied."""

    def joint(self, modules: list[Any]) -> Linear:
        """The outputs of linear layers of one input, side by side."""

    def stacked(self, weight_EOI: Tensor, bias_EO: Tensor | None) -> Sequence[Linear]:
        """One product for each of stacked weights."""


class ModuleProducts:
    """Calls the modules, with their adapters and gradients."""

    def joint(self, modules: list[Any]) -> Linear:
        if len(modules) == 1:
            linear: Linear = modules[0]
            return linear
        return lambda x: torch.cat([module(x) for module in modules], -1)

    def stacked(self, weight_EOI: Tensor, bias_EO: Tensor | None) -> Sequence[Linear]:
        # unbind: the gradients are stacked once, instead of added to zeros of the whole for each expert
        biases = [None] * len(weight_EOI) if bias_EO is None else bias_EO.unbind()
        return [
            functools.partial(functional.linear, weight=weight, bias=bias)
            for weight, bias in zip(weight_EOI.unbind(), biases, strict=True)
        ]


def read_weights(model: Any, family: Family, products: Products) -> Weights:
    """The weights of a transformers model; cheap with `ModuleProducts`, so that a trainer reads them for each pass."""
    body, embedding = model.get_decoder(), model.get_input_embeddings()
    return Weights(
        embedding=embedding.weight,
        padding_id=embedding.padding_idx,
        layers=tuple(
            _layer_weights(layer, family, row.experts, products)
            # a check may cut the model to its first layers
            for layer, row in zip(body.layers, family.layers, strict=False)
        ),
        norm=body.norm.weight,
        head=products.joint([model.get_output_embeddings()]),
    )


def _layer_weights(layer: Any, family: Family, experts: bool, products: Products) -> LayerWeights:
    attention, mlp = layer.self_attn, layer.mlp
    norms = [None if name is None else getattr(layer, name).weight for name in family.norms]
    has_norms = family.head_norms != "none"
    return LayerWeights(
        norms=tuple(norms),
        heads=products.joint(_modules(attention, "qkv_proj", "q_proj", "k_proj", "v_proj")),
        head_norms=(attention.q_norm.weight, attention.k_norm.weight) if has_norms else None,
        out=products.joint([attention.o_proj]),
        sinks=attention.sinks if family.has_sinks else None,
        mlp=_expert_weights(mlp, family.experts, products)
        if experts
        else (
            products.joint(_modules(mlp, "gate_up_proj", "gate_proj", "up_proj")),
            products.joint([mlp.down_proj]),
        ),
    )


def _modules(parent: Any, joint: str, *parts: str) -> list[Any]:
    """The joint layer, if the checkpoint has it, else its parts."""
    return (
        [getattr(parent, joint)] if hasattr(parent, joint) else [getattr(parent, p) for p in parts]
    )


def _expert_weights(mlp: Any, experts: Experts | None, products: Products) -> ExpertWeights:
    assert experts is not None
    router, stack = getattr(mlp, experts.router), mlp.experts
    gates, down = stack.gate_up_proj, stack.down_proj
    biases = None, None
    if experts.transposed:
        gates, down = gates.transpose(1, 2), down.transpose(1, 2)
        biases = stack.gate_up_proj_bias, stack.down_proj_bias
    bias = getattr(router, "bias", None)
    return ExpertWeights(
        router=products.stacked(router.weight[None], None if bias is None else bias[None])[0],
        gates=products.stacked(gates, biases[0]),
        down=products.stacked(down, biases[1]),
    )


def hidden_states(
    family: Family,
    weights: Weights,
    step: Step,
    ids_R: Tensor,
    position_R: Tensor,
    kept_K: Tensor | None = None,
    *,
    row_multiple: int = 1,
    checkpoints: bool = False,
) -> Tensor:
    """The normalised hidden states [rows, size] of the kept rows; None: of all. All rows are stored.

    The rows of an expert are padded to `row_multiple`. `checkpoints`: keep only the inputs of each layer
    for the backward pass.
    """
    x_RD = functional.embedding(ids_R, weights.embedding, weights.padding_id)
    if family.embedding_scale is not None:
        scale = family.embedding_scale
        if family.embedding_scale_rounds:
            scale = float(torch.tensor(scale, dtype=x_RD.dtype))
        x_RD = x_RD * scale
    tables = _tables(family, position_R, x_RD.dtype)
    last = len(weights.layers) - 1
    for index in range(last + 1):
        kept = kept_K if index == last else None
        run = functools.partial(_layer, family, weights.layers[index], index, step, tables, kept)
        if checkpoints and torch.is_grad_enabled():
            x_RD = checkpoint(run, row_multiple, x_RD, use_reentrant=False)
        else:
            x_RD = run(row_multiple, x_RD)
    return _norm(family, x_RD, weights.norm)


def logits(family: Family, weights: Weights, hidden_KD: Tensor) -> Tensor:
    """The logits of normalised hidden states."""
    logits_KV = weights.head(hidden_KD)
    if family.logit_scale != 1.0:
        logits_KV = logits_KV * family.logit_scale
    if family.logit_cap is not None:
        logits_KV = torch.tanh(logits_KV / family.logit_cap) * family.logit_cap
    return logits_KV


def _layer(
    family: Family,
    weights: LayerWeights,
    index: int,
    step: Step,
    tables: Tables,
    kept_K: Tensor | None,
    row_multiple: int,
    x_RD: Tensor,
) -> Tensor:
    """One layer: attention and a gated mlp, each with a residual."""
    before_attention, after_attention, before_mlp, after_mlp = weights.norms
    mixed_RN = _attention(
        family, weights, index, step, tables, _norm(family, x_RD, before_attention)
    )
    if kept_K is not None:
        x_RD, mixed_RN = x_RD.index_select(0, kept_K), mixed_RN.index_select(0, kept_K)
    x_RD = _add(family, x_RD, _norm(family, weights.out(mixed_RN), after_attention))
    normed_RD = _norm(family, x_RD, before_mlp)
    if isinstance(weights.mlp, ExpertWeights):
        output_RD = _mix_experts(family, weights.mlp, normed_RD, row_multiple)
    else:
        gates, down = weights.mlp
        gate, up = gates(normed_RD).chunk(2, -1)
        output_RD = down(_activation(family.activation)(gate) * up)
    return _add(family, x_RD, _norm(family, output_RD, after_mlp))


def _add(family: Family, x_RD: Tensor, branch_RD: Tensor) -> Tensor:
    if family.residual_scale != 1.0:
        branch_RD = branch_RD * family.residual_scale
    return branch_RD.add_(x_RD)  # no operation keeps its output for the backward pass


def _attention(
    family: Family,
    weights: LayerWeights,
    index: int,
    step: Step,
    tables: Tables,
    x_RD: Tensor,
) -> Tensor:
    """The heads' outputs side by side, before the output projection."""
    row, size, queries = family.layers[index], family.head_size, family.heads
    turned = (family.heads + family.kv_heads) * size
    product_RN = weights.heads(x_RD)
    both_RN, value_RN = product_RN[:, :turned], product_RN[:, turned:]
    both_RHS = both_RN.view(len(x_RD), -1, size)
    if weights.head_norms is not None:
        both_RHS = _head_norms(family, both_RHS, *weights.head_norms)
    both_RHS = _turn(both_RHS, tables[row.rope])
    query = both_RHS[:, :queries].transpose(0, 1)[None]
    key = both_RHS[:, queries:].transpose(0, 1)[None]
    value = value_RN.view(len(x_RD), -1, size).transpose(0, 1)[None]
    step.store(index, key, value)
    call = AttentionCall(query, key, value, family.scale, row.window, family.softcap, weights.sinks)
    return step.attend(index, call).reshape(len(x_RD), -1)


def _norm(family: Family, x: Tensor, weight: Tensor | None) -> Tensor:
    """An RMS norm, rounded where the family rounds; None: none."""
    if weight is None:
        return x
    if x.dtype in (torch.float32, torch.float64):
        return _scaled(family, x) * (weight + 1.0 if family.norm_adds_one else weight)
    scaled = _scaled(family, x.float())
    if family.norm_rounds_late:
        return weight * scaled.to(x.dtype)
    return (scaled * (weight.float() + 1.0 if family.norm_adds_one else weight)).to(x.dtype)


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


def _tables(family: Family, position_R: Tensor, dtype: torch.dtype) -> Tables:
    """Cosines and signed sines [rows, 1, turned size] of each rotation; None: no rotation."""
    tables: Tables = {None: None}
    for name, rope in family.ropes.items():
        tables[name] = _table(rope, position_R, torch.float32 if family.turns_in_float32 else dtype)
    return tables


def _table(rope: Rope, position_R: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    angle_RN = position_R[:, None].float() * rope.frequencies.to(position_R.device)
    cos, sin = angle_RN.cos(), angle_RN.sin()
    if rope.factor != 1.0:
        cos, sin = cos * rope.factor, sin * rope.factor
    # the first half of the sines is negated instead of the heads
    return (
        torch.cat([cos, cos], -1)[:, None].to(dtype),
        torch.cat([-sin, sin], -1)[:, None].to(dtype),
    )


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


def _mix_experts(family: Family, weights: ExpertWeights, x_RD: Tensor, row_multiple: int) -> Tensor:
    """The chosen experts' outputs of each token, weighted; added in the order of the experts."""
    row = family.experts
    assert row is not None
    weight_RC, expert_RC = _route(row, weights.router(x_RD))
    mixed_RD = torch.zeros_like(x_RD)
    for expert in expert_RC.unique().tolist():
        token_M, choice_M = torch.where(expert_RC == expert)
        padding = -len(token_M) % row_multiple
        x_MD = functional.pad(x_RD.index_select(0, token_M), (0, 0, 0, padding))
        inner_MI = _gated(family, row, weights.gates[expert](x_MD))
        output_MD = weights.down[expert](inner_MI)[: len(token_M)]
        added_MD = output_MD * weight_RC[token_M, choice_M, None]
        mixed_RD = mixed_RD.index_add(0, token_M, added_MD.to(x_RD.dtype))
    return mixed_RD


def _route(row: Experts, logit_RE: Tensor) -> tuple[Tensor, Tensor]:
    """The weights and the numbers of each token's experts."""
    if not row.router_in_float32:
        best_RC, expert_RC = logit_RE.topk(row.count, -1)
        return best_RC.softmax(-1), expert_RC
    exact = torch.promote_types(logit_RE.dtype, torch.float32)
    weight_RC, expert_RC = logit_RE.softmax(-1, dtype=exact).topk(row.count, -1)
    if row.renormalises:
        weight_RC = weight_RC / weight_RC.sum(-1, keepdim=True)
    return weight_RC if row.weights_in_float32 else weight_RC.to(logit_RE.dtype), expert_RC


def _gated(family: Family, row: Experts, product_MN: Tensor) -> Tensor:
    """What lies between an expert's products."""
    if row.clamp is None:
        gate, up = product_MN.chunk(2, -1)
        return _activation(family.activation)(gate) * up
    alpha, limit = row.clamp
    gate = product_MN[..., ::2].clamp(max=limit)
    up = product_MN[..., 1::2].clamp(-limit, limit)
    return (up + 1) * (gate * torch.sigmoid(gate * alpha))


@functools.cache
def _activation(name: str) -> Callable[[Tensor], Tensor]:
    """An activation by its name in a config."""
    if name == "silu":
        return functional.silu
    from transformers.activations import ACT2FN

    function: nn.Module = ACT2FN[name]
    return function
