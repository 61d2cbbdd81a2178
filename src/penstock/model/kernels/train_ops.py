"""What a decoder layer computes when it trains on a GPU: the entry of `Ops` with kernels, forward and backward.

Attention, its output product and the mlp are one autograd function each where all their weights are plain; a layer
with adapters, or with weights divided over ranks, has its products between the same parts. Gradients of plain
weights are added straight to the float32 gradients of their masters, in a fixed order. What no kernel computes (soft
caps, other activations, very wide norms) is the plain torch of `ops.py`, under autograd.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from penstock.model import attention
from penstock.model.attention import AttentionCall, Step, can_use_flash
from penstock.model.decoder_weights import ExpertWeights, LayerWeights, Linear, Weights
from penstock.model.families import Family
from penstock.model.kernels import chains, layer_kernels, turn_kernels
from penstock.model.kernels.chains import Masters, Part, run
from penstock.model.kernels.trained_products import Product, SortedRows, Stack
from penstock.model.ops import (
    Choose,
    Table,
    TorchOps,
    activation,
    gated,
    mix_experts,
    route,
    scaled,
)
from penstock.model.packed_attention import (
    Copies,
    PackedStep,
    PackLayout,
    SharedKeys,
    flash_aligns_ends,
)

_TORCH = TorchOps()


@dataclass(slots=True, frozen=True, eq=False)
class TrainOps:
    """The entry of a trainer on a GPU; `masters` are those of parameters that have others, by their ids."""

    masters: Masters = field(default_factory=dict)

    def embed(self, family: Family, weights: Weights, ids_R: Tensor) -> Tensor:
        master = self.masters.get(id(weights.embedding))
        if master is None:
            return _TORCH.embed(family, weights, ids_R)
        x_RD = _Embedding.apply(weights.embedding, ids_R, weights.padding_id, master)
        return scaled(family, x_RD)

    def attend(
        self,
        family: Family,
        weights: LayerWeights,
        index: int,
        step: Step,
        table: Table,
        x_RD: Tensor,
    ) -> Tensor:
        assert isinstance(step, PackedStep)
        parts = [*self._norm(family, weights.norms[0]), weights.heads]
        turn = Turn(family, table, weights.head_norms)
        if _can_flash(family, step.layout, x_RD):
            return run(self.masters, [*parts, self._attention(turn, weights, index, step)], x_RD)
        if table is not None or weights.head_norms is not None:
            parts.append(turn)
        joint_RC = run(self.masters, parts, x_RD)
        return _attend_plainly(family, weights, index, step, joint_RC)

    def take(self, rows_RN: Tensor, number_K: Tensor) -> Tensor:
        return layer_kernels.take_rows(rows_RN, number_K)

    def add_product(
        self, family: Family, x_RD: Tensor, rows_RN: Tensor, linear: Linear, norm: Tensor | None
    ) -> Tensor:
        parts = [linear, *self._norm(family, norm)]
        return run(self.masters, parts, rows_RN, x_RD, family.residual_scale)

    def mlp(self, family: Family, weights: LayerWeights, choose: Choose, x_RD: Tensor) -> Tensor:
        *_, before, after = weights.norms
        parts = self._norm(family, before)
        if isinstance(weights.mlp, ExpertWeights):
            parts.append(functools.partial(_experts, self.masters, family, weights.mlp, choose))
        else:
            gates, down = weights.mlp
            parts += [gates, *self._gate(family.activation, down)]
        parts += self._norm(family, after)
        return run(self.masters, parts, x_RD, x_RD, family.residual_scale)

    def norm(self, family: Family, x: Tensor, weight: Tensor | None) -> Tensor:
        return run(self.masters, self._norm(family, weight), x)

    # the steps that `exact_ops.py` computes in another way

    def _norm(self, family: Family, weight: Tensor | None) -> list[Part]:
        """The norm with this weight, as parts of a layer; None: none."""
        if weight is None:
            return []
        if weight.shape[0] > layer_kernels.LARGEST:
            return [lambda x: _TORCH.norm(family, x, weight)]
        return [Norm(weight, family.epsilon, family.norm_adds_one)]

    def _attention(self, turn: Turn, weights: LayerWeights, index: int, step: PackedStep) -> Part:
        window = turn.family.layers[index].window
        return Attention(turn, step.layout, window, weights.sinks)

    def _gate(self, name: str, down: Linear) -> list[Part]:
        return _gate(name, down)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weight_VD: Tensor, ids_R: Tensor, padding: int | None, master: nn.Parameter
    ) -> Tensor:
        ctx.save_for_backward(ids_R)
        ctx.padding, ctx.master = padding, master
        return functional.embedding(ids_R, weight_VD)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None, None]:
        (ids_R,) = ctx.saved_tensors
        master = ctx.master
        if master.grad is None:
            master.grad = torch.zeros_like(master)
        skipped = -1 if ctx.padding is None else ctx.padding  # a token that is not trained
        layer_kernels.add_rows_(master.grad, ids_R, grads[0].contiguous(), skipped)
        return None, None, None, None


# ---- norms


@dataclass(slots=True, eq=False)
class Norm(chains.Step):
    weight: Tensor
    epsilon: float
    adds_one: bool

    @property
    def vectors(self) -> tuple[Tensor, ...]:
        return (self.weight,)

    def forward(self, x: Tensor, *, owned: bool) -> tuple[Tensor, tuple[Tensor, ...]]:
        return self._compute(x, None, 1.0)

    def forward_onto(
        self, x: Tensor, residual: Tensor, scale: float, *, owned: bool
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        return self._compute(x, residual, scale)

    def _compute(
        self, x: Tensor, residual: Tensor | None, scale: float
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        x = x.contiguous()
        output, inverse = layer_kernels.rms_norm(
            x,
            self.weight,
            self.epsilon,
            adds_one=self.adds_one,
            residual=residual,
            scale=scale,
        )
        return output, (x, inverse)

    def backward(
        self, grad: Tensor, saved: Sequence[Tensor], added: Tensor | None
    ) -> tuple[Tensor, Sequence[Tensor | None]]:
        x, inverse = saved
        x_grad, weight_grad = layer_kernels.norm_gradients(
            grad, x, self.weight, inverse, added, adds_one=self.adds_one
        )
        return x_grad, (weight_grad,)


# ---- attention


@dataclass(slots=True, eq=False)
class Turn(chains.Step):
    """Norms and rotation of the queries and keys in a joint product."""

    family: Family
    table: Table
    weights: tuple[Tensor, Tensor] | None

    @property
    def vectors(self) -> tuple[Tensor, ...]:
        return self.weights or ()

    def forward(self, x: Tensor, *, owned: bool) -> tuple[Tensor, tuple[Tensor, ...]]:
        if self.table is None and self.weights is None:
            return x, ()
        in_place = owned and self.weights is None
        turned = turn_kernels.turn(x, self.family, self.table, self.weights, in_place=in_place)
        return turned, () if self.weights is None else (x,)

    def backward(
        self, grad: Tensor, saved: Sequence[Tensor], added: Tensor | None
    ) -> tuple[Tensor, Sequence[Tensor | None]]:
        return self.back(turn_kernels.split(self.family, grad), saved, None)

    def back(
        self, grads: tuple[Tensor, Tensor, Tensor], saved: Sequence[Tensor], copies: Copies | None
    ) -> tuple[Tensor, Sequence[Tensor | None]]:
        """The gradient of the joint product, and of the norms, from those of queries, keys and values."""
        raw = saved[0] if saved else grads[0].flatten(1)  # not read
        return turn_kernels.turn_back(grads, raw, self.family, self.table, self.weights, copies)


def _can_flash(family: Family, layout: PackLayout, x_RD: Tensor) -> bool:
    """Whether the flash kernel computes this attention, with all keys in the pack."""
    head = x_RD.new_empty(0, family.head_size)
    if family.softcap is not None or layout.gather is not None or not can_use_flash(head, head):
        return False
    shared = layout.shared
    return shared is None or (shared.copies is not None and flash_aligns_ends(x_RD.device))


def _attend_plainly(
    family: Family, weights: LayerWeights, index: int, step: PackedStep, joint_RC: Tensor
) -> Tensor:
    """Attention in plain torch; scores that no fused kernel computes are computed again in backward, not kept."""

    def attend(joint_RC: Tensor) -> Tensor:
        query, key, value = (
            part.transpose(0, 1)[None] for part in turn_kernels.split(family, joint_RC)
        )
        window = family.layers[index].window
        call = AttentionCall(query, key, value, family.scale, window, family.softcap, weights.sinks)
        return step.attend(index, call).reshape(len(joint_RC), -1)

    is_fused = family.softcap is None and weights.sinks is None
    if is_fused or not torch.is_grad_enabled():
        return attend(joint_RC)
    output_RN: Tensor = checkpoint(attend, joint_RC, use_reentrant=False)
    return output_RN


@dataclass(slots=True, eq=False)
class Attention(chains.Step):
    """Turned queries and keys, and flash attention, on the joint product without copies."""

    turn: Turn
    layout: PackLayout
    window: int | None
    sinks: Tensor | None  # a score of each head that has no value

    @property
    def vectors(self) -> tuple[Tensor, ...]:
        return self.turn.vectors if self.sinks is None else (*self.turn.vectors, self.sinks)

    @property
    def _call(self) -> dict[str, Any]:
        """How queries see keys: bounds and largest lengths of their sequences, scale, window."""
        keys: PackLayout | SharedKeys = self.layout.shared or self.layout
        return {
            "queries": (self.layout.bounds_S1, self.layout.longest),
            "keys": (keys.bounds_S1, keys.longest),
            "scale": self.turn.family.scale,
            "window": self.window,
        }

    def forward(self, x: Tensor, *, owned: bool) -> tuple[Tensor, tuple[Tensor, ...]]:
        turned_RC, saved = self.turn.forward(x, owned=owned)
        query, key, value = turn_kernels.split(self.turn.family, turned_RC)
        if self.layout.shared is not None:
            index_K = self.layout.shared.index_K
            key, value = (part.index_select(0, index_K) for part in (key, value))
        output_RHD, sums_HR, *rest = attention.flash_attention(query, key, value, **self._call)
        if self.sinks is not None:
            # the sink's share of the softmax; the backward pass sees it in the sums
            keys_HR, sums_HR = sums_HR, torch.logaddexp(sums_HR, self._sinks_H1)
            share_RH1 = (keys_HR - sums_HR).exp().t()[..., None]
            output_RHD.mul_(share_RH1)
        output_RN = self._output(query, key, value, output_RHD).reshape(len(x), -1)
        return output_RN, (*saved, query, key, value, output_RN, sums_HR, *rest)

    def _output(self, query: Tensor, key: Tensor, value: Tensor, flash_RHD: Tensor) -> Tensor:
        """The output, which the flash kernel has computed too."""
        return flash_RHD

    def backward(
        self, grad: Tensor, saved: Sequence[Tensor], added: Tensor | None
    ) -> tuple[Tensor, Sequence[Tensor | None]]:
        count = len(saved) - 7
        raw, (query, key, value, output_RN, sums_HR, *rest) = saved[:count], saved[count:]
        grad_RHD, output_RHD = grad.view(query.shape), output_RN.view(query.shape)
        grads = attention.flash_gradients(
            grad_RHD, (query, key, value), (output_RHD, sums_HR, *rest), **self._call
        )
        shared = self.layout.shared
        copies = None if shared is None else shared.copies
        joint_grad_RC, vectors = self.turn.back(grads, raw, copies)
        if self.sinks is not None:
            dot_RH = (grad_RHD.float() * output_RHD.float()).sum(-1)
            share_RH = (self._sinks_H1 - sums_HR).exp().t()
            vectors = [*vectors, -(share_RH * dot_RH).sum(0)]
        return joint_grad_RC, vectors

    @property
    def _sinks_H1(self) -> Tensor:
        assert self.sinks is not None
        return self.sinks.detach().float()[:, None]


# ---- the mlp


def _gate(name: str, down: Linear) -> list[Part]:
    """The activation of gate times up, and the product after it."""
    if name not in layer_kernels.ACTIVATIONS:
        return [functools.partial(_plain_gate, name), down]
    if isinstance(down, Product):
        return [Gate(name, down)]
    return [Gate(name, None), down]


def _plain_gate(name: str, both_RF: Tensor) -> Tensor:
    gate_RF, up_RF = both_RF.chunk(2, -1)
    return activation(name)(gate_RF) * up_RF


@dataclass(slots=True, eq=False)
class Gate(chains.Step):
    """The gate, and the product after it, for which the activation is computed again in backward.

    Kept, it would be a third of what a layer keeps. None: the product is a module's, which keeps it.
    """

    activation: str
    down: Product | None

    def forward(self, x: Tensor, *, owned: bool) -> tuple[Tensor, tuple[Tensor, ...]]:
        active_RF = self._active(x)
        return active_RF if self.down is None else self.down.multiply(active_RF), (x,)

    def forward_onto(
        self, x: Tensor, residual: Tensor, scale: float, *, owned: bool
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        active_RF = self._active(x)
        if self.down is None:
            return chains.add_scaled_(active_RF, residual, scale), (x,)
        return self.down.multiply_onto(active_RF, residual, scale), (x,)

    def _active(self, both_RF: Tensor) -> Tensor:
        gate_RF, up_RF = both_RF.chunk(2, -1)
        return layer_kernels.gate_values(gate_RF, up_RF, self.activation)

    def backward(
        self, grad: Tensor, saved: Sequence[Tensor], added: Tensor | None
    ) -> tuple[Tensor, Sequence[Tensor | None]]:
        down = self.down
        active_RF = grad if down is None else down.multiply_back(grad)
        again = down is not None and down.trains
        both_grad = layer_kernels.gate_gradients(active_RF, saved[0], self.activation, again=again)
        if down is not None and down.trains:
            down.add_gradients(grad, active_RF)
        return both_grad, ()


# ---- experts


def _experts(
    masters: Masters, family: Family, weights: ExpertWeights, choose: Choose, x_RD: Tensor
) -> Tensor:
    """The chosen experts' outputs of each token, weighted and added up in the order of choice."""
    row, gates, down = family.experts, weights.gates, weights.down
    assert row is not None
    if not isinstance(gates, Stack) or not isinstance(down, Stack):
        return mix_experts(family, weights, choose, x_RD, 1)
    weight_RC, expert_RC = route(row, weights.router(x_RD), choose)
    rows = SortedRows.of(expert_RC, len(gates))
    parts: list[Part] = [gates.of(rows)]
    if row.clamp is None:
        parts += _gate(family.activation, down.of(rows))
    else:
        parts += [functools.partial(gated, family, row), down.of(rows)]
    output_MD = run(masters, parts, rows.spread(x_RD))
    weighted_RCD = rows.collect(output_MD) * weight_RC[..., None]
    return weighted_RCD.to(x_RD.dtype).sum(1)
