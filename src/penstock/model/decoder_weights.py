"""The weights of a decoder, as `decoder.py` reads them from a transformers model.

They stay the parameters of transformers' modules, under the checkpoint's names; how they are multiplied is
the caller's (`Products`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from penstock.model.families import Experts, Family

Linear = Callable[[Tensor], Tensor]


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
            read_layer(layer, family, row.experts, products)
            # a check may cut the model to its first layers
            for layer, row in zip(body.layers, family.layers, strict=False)
        ),
        norm=body.norm.weight,
        head=products.joint([model.get_output_embeddings()]),
    )


def read_layer(layer: Any, family: Family, experts: bool, products: Products) -> LayerWeights:
    """The weights of one layer, which has experts or none."""
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
