"""The entry of the `Ops` table for an engine on a GPU: Triton kernels around the products, no gradients.

With many rows, a layer is norm, product, heads (norm, rotation, KV store), attention, product onto the residual, norm,
product, gate, product onto the residual. With few rows, small products are kernels with their neighbours. What no kernel
computes is computed as `TorchOps` does. Nothing here waits for the device, so that CUDA graphs capture every family.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from penstock.engine.transformers.cuda.cuda_steps import DecodeStep
from penstock.model.attention import AttentionCall, Step
from penstock.model.decoder_weights import ExpertWeights, LayerWeights, Linear, Weights
from penstock.model.families import Family
from penstock.model.joint_weights import LinearStack, PlainLinear
from penstock.model.kernels import row_tiles
from penstock.model.kernels.decode_kernels import turn_heads
from penstock.model.kernels.expert_kernels import (
    add_expert_outputs,
    best_experts,
    expert_gates,
    sort_entries,
)
from penstock.model.kernels.row_kernels import (
    ACTIVATIONS,
    add_norm,
    add_product,
    gate_product,
    gate_values,
    norm_rows,
    project_and_store,
)
from penstock.model.kernels.row_tiles import Norm
from penstock.model.ops import Choose, Table, TorchOps, activation, route


class CudaOps:
    """See `Ops`. Inputs of a layer are overwritten."""

    def embed(self, family: Family, weights: Weights, ids_R: Tensor) -> Tensor:
        return TorchOps().embed(family, weights, ids_R)

    def norm(self, family: Family, x: Tensor, weight: Tensor | None) -> Tensor:
        return x if weight is None else norm_rows(x, _norm(family, weight))

    def take(self, rows_RN: Tensor, number_K: Tensor) -> Tensor:
        return rows_RN.index_select(0, number_K)

    def attend(
        self,
        family: Family,
        weights: LayerWeights,
        index: int,
        step: Step,
        table: Table,
        x_RD: Tensor,
    ) -> Tensor:
        if isinstance(step, DecodeStep):  # it attends to the stored keys and values
            query_RHS = self._stored_queries(family, weights, index, step, table, x_RD)
            query = key = value = query_RHS.transpose(0, 1)[None]
        else:
            product_RN = self._heads(family, weights, x_RD)
            turn_heads(product_RN, _sizes(family), table, _head_norms(family, weights), None)
            heads = product_RN.view(len(x_RD), -1, family.head_size).transpose(0, 1)[None]
            ends = (family.heads, family.heads + family.kv_heads)
            query, key, value = heads.tensor_split(ends, dim=1)
            step.store(index, key, value)
        window = family.layers[index].window
        call = AttentionCall(query, key, value, family.scale, window, family.softcap, weights.sinks)
        return step.attend(index, call).reshape(len(x_RD), -1)

    def _stored_queries(
        self,
        family: Family,
        weights: LayerWeights,
        index: int,
        step: DecodeStep,
        table: Table,
        x_RD: Tensor,
    ) -> Tensor:
        """The queries; keys and values are stored."""
        first, heads, cache = weights.norms[0], weights.heads, step.cache(index)
        if (
            first is not None
            and table is not None
            and table[0].shape[-1] == family.head_size
            and weights.head_norms is None
            and isinstance(heads, PlainLinear)
            and (tiles := row_tiles.choose("heads", x_RD, heads.weight)) is not None
        ):
            norm = _norm(family, first)
            return project_and_store(x_RD, norm, heads.weight, heads.bias, table, *cache, tiles)
        product_RN = self._heads(family, weights, x_RD)
        norms = _head_norms(family, weights)
        return turn_heads(product_RN, _sizes(family), table, norms, cache)

    def _heads(self, family: Family, weights: LayerWeights, x_RD: Tensor) -> Tensor:
        """Queries, keys and values side by side, normed where the norm is of all heads together."""
        product_RN = weights.heads(self.norm(family, x_RD, weights.norms[0]))
        if family.head_norms == "whole" and weights.head_norms is not None:
            ends = (family.heads * family.head_size, (family.heads + family.kv_heads) * family.head_size)  # fmt: skip
            for part_RN, weight in zip(
                product_RN.tensor_split(ends, dim=1), weights.head_norms, strict=False
            ):
                norm_rows(part_RN, _norm(family, weight), part_RN)
        return product_RN

    def add_product(
        self, family: Family, x_RD: Tensor, rows_RN: Tensor, linear: Linear, norm: Tensor | None
    ) -> Tensor:
        return self._add("out", family, x_RD, rows_RN, linear, norm)

    def _add(
        self,
        product: row_tiles.Product,
        family: Family,
        x_RD: Tensor,
        rows_RN: Tensor,
        linear: Linear,
        norm: Tensor | None,
    ) -> Tensor:
        scale = family.residual_scale
        if norm is not None:
            return add_norm(x_RD, linear(rows_RN), _norm(family, norm), scale)
        if not isinstance(linear, PlainLinear):
            return TorchOps().add_product(family, x_RD, rows_RN, linear, norm)
        tiles = row_tiles.choose(product, rows_RN, linear.weight)
        if tiles is not None and scale == 1.0:
            return add_product(x_RD, rows_RN, linear.weight, linear.bias, tiles)
        x_RD.addmm_(rows_RN, linear.weight.t(), alpha=scale)
        return x_RD if linear.bias is None else x_RD.add_(linear.bias, alpha=scale)

    def mlp(self, family: Family, weights: LayerWeights, choose: Choose, x_RD: Tensor) -> Tensor:
        *_, before, after = weights.norms
        if isinstance(weights.mlp, ExpertWeights):
            return self._experts(family, weights, weights.mlp, choose, x_RD)
        gates, down = weights.mlp
        return self._add("down", family, x_RD, self._gate(family, before, gates, x_RD), down, after)

    def _gate(self, family: Family, norm: Tensor | None, gates: Linear, x_RD: Tensor) -> Tensor:
        """What lies between the norm and the last product of an mlp."""
        if family.activation not in ACTIVATIONS:
            gate, up = gates(self.norm(family, x_RD, norm)).chunk(2, -1)
            return activation(family.activation)(gate) * up
        if (
            norm is not None
            and isinstance(gates, PlainLinear)
            and gates.bias is None
            and (tiles := row_tiles.choose("gate", x_RD, gates.weight)) is not None
        ):
            return gate_product(x_RD, _norm(family, norm), gates.weight, family.activation, tiles)
        return gate_values(gates(self.norm(family, x_RD, norm)), family.activation)

    def _experts(
        self,
        family: Family,
        weights: LayerWeights,
        mlp: ExpertWeights,
        choose: Choose,
        x_RD: Tensor,
    ) -> Tensor:
        row, (*_, before, after) = family.experts, weights.norms
        assert row is not None
        assert after is None
        assert family.residual_scale == 1.0
        gates, down = mlp.gates, mlp.down
        assert isinstance(gates, LinearStack)
        assert isinstance(down, LinearStack)
        normed_RD = self.norm(family, x_RD, before)
        logit_RE = mlp.router(normed_RD)
        weight_RC, best_RC = best_experts(
            logit_RE,
            row.count,
            renormalises=row.renormalises or not row.router_in_float32,
            rounds=not row.weights_in_float32,
        )
        expert_RC = choose(best_RC)
        if expert_RC is not best_RC:  # a check's
            weight_RC = route(row, logit_RE, lambda _: expert_RC)[0].float()
        routes = sort_entries(weight_RC, expert_RC, logit_RE.shape[1])
        gated_NF = expert_gates(normed_RD, routes, gates, family.activation, row.clamp)
        return add_expert_outputs(x_RD, gated_NF, routes, down)


def _norm(family: Family, weight: Tensor) -> Norm:
    return Norm(weight, family.epsilon, 1.0 if family.norm_adds_one else 0.0)


def _sizes(family: Family) -> tuple[int, int, int]:
    return family.heads, family.kv_heads, family.head_size


def _head_norms(family: Family, weights: LayerWeights) -> Any:
    """The norms of each query head and each key head; None: none."""
    if weights.head_norms is None or family.head_norms != "head":
        return None
    query, key = weights.head_norms
    return _norm(family, query), _norm(family, key)
