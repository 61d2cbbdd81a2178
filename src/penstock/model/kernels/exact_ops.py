"""What a layer computes when it trains on a GPU with `model.arithmetic = "exact"`: the engine's values, the trainer's gradients.

Each step computes its output by the engine's kernels, in which a row has the same bits in any batch, and keeps what
the trainer's own backward pass needs: no layer is computed twice. For families whose parts are all steps (`covers`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.model.attention import AttentionCall, can_use_flash
from penstock.model.decoder import Tables
from penstock.model.decoder_weights import LayerWeights, Linear, Weights
from penstock.model.families import Family
from penstock.model.kernels import decode_kernels, layer_kernels, row_kernels, row_tiles, train_ops
from penstock.model.kernels.chains import Part, add_scaled_
from penstock.model.kernels.exact_products import multiply
from penstock.model.kernels.trained_products import JointProduct, Product
from penstock.model.ops import Table
from penstock.model.packed_attention import PackedStep, flash_aligns_ends


def covers(family: Family, weights: Weights) -> bool:
    """Whether all parts of all layers are steps; `weights` are those of a trainer with masters."""
    head = weights.embedding.new_empty(0, family.head_size)
    return (
        family.softcap is None
        and family.experts is None
        and family.activation in layer_kernels.ACTIVATIONS
        and family.activation in row_kernels.ACTIVATIONS
        and weights.embedding.shape[1] <= layer_kernels.LARGEST
        and can_use_flash(head, head)
        and flash_aligns_ends(head.device)
        and isinstance(weights.head, Product)
        and all(
            isinstance(product, Product)
            for layer in weights.layers
            if isinstance(layer.mlp, tuple)
            for product in (layer.heads, layer.out, *layer.mlp)
        )
    )


class RegionsOfPack(PackedStep):
    """The attention of a pack with the bits of a decode step: each row by itself, over its sequence's keys."""

    def __init__(self, step: PackedStep, tables: Tables) -> None:
        """tables: the rotations in the engine's layout, on which the order of a kernel's sums may depend."""
        super().__init__(step.layout, step.experts_TLC)
        self.tables = tables
        rows_S1 = self.layout.bounds_S1.long()
        keys_S1 = rows_S1 if self.layout.shared is None else self.layout.shared.bounds_S1.long()
        count_S = rows_S1.diff()
        tokens = sum(block.count * block.length for block in self.layout.blocks)
        own_S = torch.arange(len(count_S), device=count_S.device)
        sequence_T = own_S.repeat_interleave(count_S, output_size=tokens)
        before_S = keys_S1.diff() - count_S
        place_T = torch.arange(tokens, device=count_S.device) - rows_S1[:-1][sequence_T]
        self.start_T = keys_S1[:-1][sequence_T]
        self.length_T = before_S[sequence_T] + place_T + 1

    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        key_TGD, value_TGD = (part[0].transpose(0, 1) for part in (key, value))
        if self.layout.shared is not None:
            index_K = self.layout.shared.index_K
            key_TGD, value_TGD = (part.index_select(0, index_K) for part in (key_TGD, value_TGD))
        self._stored = key_TGD, value_TGD

    def attend(self, layer: int, call: AttentionCall) -> Tensor:
        query_TBD = call.query[0].transpose(0, 1)
        return self.mix(query_TBD, *self._stored, call)[None]

    def mix(
        self, query_THD: Tensor, key_KGD: Tensor, value_KGD: Tensor, call: AttentionCall
    ) -> Tensor:
        """The attention of queries to the keys of all sequences; `call` says how scores are made."""
        return decode_kernels.decode_attention(
            query_THD, key_KGD.contiguous(), value_KGD.contiguous(), self.start_T, self.length_T,
            call.scale, call.window, call.softcap, call.sinks, programs=0,
        )  # fmt: skip


@dataclass(slots=True, frozen=True, eq=False)
class ExactOps(train_ops.TrainOps):
    """The entry of a trainer whose packs are `RegionsOfPack`, with products of `ExactProduct`."""

    def _norm(self, family: Family, weight: Tensor | None) -> list[Part]:
        return [] if weight is None else [_Norm(weight, family.epsilon, family.norm_adds_one)]

    def _attention(
        self, turn: train_ops.Turn, weights: LayerWeights, index: int, step: PackedStep
    ) -> Part:
        assert isinstance(step, RegionsOfPack)
        layer = turn.family.layers[index]
        exact = _Turn(turn.family, turn.table, turn.weights, step.tables[layer.rope])
        return _Attention(exact, step.layout, layer.window, weights.sinks, step)

    def _gate(self, name: str, down: Linear) -> list[Part]:
        assert isinstance(down, Product)
        return [_Gate(name, down)]


@dataclass(slots=True, eq=False)
class ExactProduct(JointProduct):
    """A joint product with the engine's bits."""

    def multiply(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.values()
        return multiply(x, [(self.weight.values(), bias)])

    def multiply_onto(self, x: Tensor, residual: Tensor, scale: float) -> Tensor:
        return add_scaled_(self.multiply(x), residual, scale)


@dataclass(slots=True, eq=False)
class _Norm(train_ops.Norm):
    def _compute(
        self, x: Tensor, residual: Tensor | None, scale: float
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        _, saved = train_ops.Norm._compute(self, x, None, 1.0)
        norm = row_tiles.Norm(self.weight, self.epsilon, float(self.adds_one))
        if residual is None:
            return row_kernels.norm_rows(saved[0], norm), saved
        return row_kernels.add_norm(residual.clone(), saved[0], norm, scale), saved


@dataclass(slots=True, eq=False)
class _Turn(train_ops.Turn):
    engine_table: Table

    def forward(self, x: Tensor, *, owned: bool) -> tuple[Tensor, tuple[Tensor, ...]]:
        family, norms = self.family, None
        turned_TC = x.clone() if self.weights is not None or not owned else x
        if self.weights is not None:
            offset = float(family.norm_adds_one)
            query, key = (row_tiles.Norm(w, family.epsilon, offset) for w in self.weights)
            if family.head_norms == "head":
                norms = query, key
            else:  # of all heads together
                ends = family.heads * family.head_size, (family.heads + family.kv_heads) * family.head_size  # fmt: skip
                for part, norm in zip(turned_TC.tensor_split(ends, 1), (query, key), strict=False):
                    row_kernels.norm_rows(part, norm, part)
        sizes = family.heads, family.kv_heads, family.head_size
        decode_kernels.turn_heads(turned_TC, sizes, self.engine_table, norms, None)
        return turned_TC, () if self.weights is None else (x,)


@dataclass(slots=True, eq=False)
class _Attention(train_ops.Attention):
    step: RegionsOfPack

    def _output(self, query: Tensor, key: Tensor, value: Tensor, flash_RHD: Tensor) -> Tensor:
        scale = self.turn.family.scale
        call = AttentionCall(query, key, value, scale, self.window, None, self.sinks)
        return self.step.mix(query, key, value, call)


@dataclass(slots=True, eq=False)
class _Gate(train_ops.Gate):
    def _active(self, both_RF: Tensor) -> Tensor:
        return row_kernels.gate_values(both_RF, self.activation)
