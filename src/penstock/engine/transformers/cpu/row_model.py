"""A model's forward pass over rows on a CPU, without the model's own code.

A decode step of a small model is mostly the Python code of its modules. For models of the usual form (norm,
attention with rotary positions, residual, norm, gated activation, residual) the same operations are called
here directly, with one product for queries, keys and values and one for gate and up. The logits are compared
with the model's own before its code is left out; a model of another form keeps it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from penstock.engine.transformers.fuse import FusedLinear, PlainLinear
from penstock.engine.transformers.kv_attention import (
    AttentionCall,
    OneSequence,
    Step,
    StepCache,
    running,
)
from penstock.model.layer_form import is_silu, window_of
from penstock.model.norms import epsilon

_KNOWN = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_TOLERANCE = 1e-4  # of the largest difference of logits, in their standard deviations


class RowModel:
    """Computes the logits of rows; a `Step` stores their keys and values and attends."""

    def __init__(self, model: Any, fused: dict[Any, FusedLinear]) -> None:
        base = model.base_model
        self._embedding = base.embed_tokens.weight.detach()
        self._rotary = base.rotary_emb
        self._layers = [_Layer(layer, fused) for layer in base.layers]
        self._norm = _Norm(base.norm)
        self._head = model.lm_head.forward

    def __call__(
        self,
        step: Step,
        ids_R: torch.Tensor,
        position_R: torch.Tensor,
        kept_K: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The logits of the kept rows; None: of all."""
        x_RD = functional.embedding(ids_R, self._embedding)
        cos, sin = self._rotary(x_RD, position_R[None])
        half = sin.shape[-1] // 2
        # [rows, 1, head size]; the first half of the sines is negated instead of the heads
        turn = cos[0, :, None], torch.cat([-sin[0, :, None, :half], sin[0, :, None, half:]], -1)
        for layer in self._layers[:-1]:
            x_RD = layer(step, x_RD, turn)
        x_RD = self._layers[-1](step, x_RD, turn, kept_K)
        logits: torch.Tensor = self._head(self._norm(x_RD))
        return logits


class _Norm:
    """An RMS norm; in float32 by the operations of torch's `rms_norm`, without its conversions."""

    def __init__(self, norm: Any) -> None:
        self.weight = norm.weight.detach()
        self.epsilon = epsilon(norm)
        self.is_float = self.weight.dtype is torch.float32
        # tensors, because a Python number would be converted in each call
        self._size = torch.tensor(float(self.weight.numel()))
        self._epsilon = torch.tensor(self.epsilon)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_float:
            return torch.rms_norm(x, self.weight.shape, self.weight, self.epsilon)
        return self.scale(x).mul_(self.weight)

    def scale(self, x: torch.Tensor) -> torch.Tensor:
        """x over its root mean square, before the weight."""
        squares = (x * x).sum(-1, keepdim=True)
        return x * squares.div_(self._size).add_(self._epsilon).rsqrt_()


class _HeadNorms:
    """The norms of queries and keys, whose heads stand beside each other in [rows, heads, size]."""

    def __init__(self, query_norm: Any, key_norm: Any, queries: int) -> None:
        self._query, self._key, self._queries = _Norm(query_norm), _Norm(key_norm), queries
        self._together = self._query.is_float and self._query.epsilon == self._key.epsilon

    def __call__(self, both_RHS: torch.Tensor) -> torch.Tensor:
        query, key = both_RHS[:, : self._queries], both_RHS[:, self._queries :]
        if not self._together:
            return torch.cat([self._query(query), self._key(key)], 1)
        scaled_RHS = self._query.scale(both_RHS)
        scaled_RHS[:, : self._queries].mul_(self._query.weight)
        scaled_RHS[:, self._queries :].mul_(self._key.weight)
        return scaled_RHS


class _Layer:
    """One layer; its weights are the model's own."""

    def __init__(self, layer: Any, fused: dict[Any, FusedLinear]) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._index, self._scale = attention.layer_idx, attention.scaling
        self._size = attention.head_dim
        self._window = window_of(attention)
        heads = fused[attention.q_proj]
        self._heads: PlainLinear = heads.linear
        self._query_width, self._key_width, _ = heads.sizes
        self._out, self._down = attention.o_proj.forward, mlp.down_proj.forward
        self._gates: PlainLinear = fused[mlp.gate_proj].linear
        self._norms = _Norm(layer.input_layernorm), _Norm(layer.post_attention_layernorm)
        self._queries = self._query_width // self._size
        self._of_heads: _HeadNorms | None = None
        if hasattr(attention, "q_norm"):
            self._of_heads = _HeadNorms(attention.q_norm, attention.k_norm, self._queries)

    def __call__(
        self,
        step: Step,
        x_RD: torch.Tensor,
        turn: tuple[torch.Tensor, torch.Tensor],
        kept_K: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The output of the kept rows, or of all rows if `kept_K` is None. All rows are stored."""
        product_RN = self._heads(self._norms[0](x_RD))
        rows, turned = len(x_RD), self._query_width + self._key_width
        both_RHS = product_RN[:, :turned].view(rows, -1, self._size)
        if self._of_heads is not None:
            both_RHS = self._of_heads(both_RHS)
        turned_RHS = both_RHS.roll(self._size // 2, -1).mul_(turn[1])
        both_RHS = (both_RHS * turn[0]).add_(turned_RHS)
        query = both_RHS[:, : self._queries].transpose(0, 1)[None]
        key = both_RHS[:, self._queries :].transpose(0, 1)[None]
        value = product_RN[:, turned:].view(rows, -1, self._size).transpose(0, 1)[None]
        step.store(self._index, key, value)
        call = AttentionCall(query, key, value, self._scale, self._window, None, None)
        mixed_RN = step.attend(self._index, call).view(rows, -1)
        if kept_K is not None:
            x_RD, mixed_RN = x_RD[kept_K], mixed_RN[kept_K]
        x_RD = x_RD + self._out(mixed_RN)
        gate, up = self._gates(self._norms[1](x_RD)).chunk(2, -1)
        added: torch.Tensor = self._down(functional.silu(gate).mul_(up))
        return added.add_(x_RD)


def make_row_model(model: Any, fused: list[FusedLinear]) -> RowModel | None:
    """The forward pass of a model of the usual form that computes what the model does, else None."""
    if type(model).__name__ not in _KNOWN:
        return None
    by_part = {linear.first: linear for linear in fused}
    for layer in model.base_model.layers:
        if layer.self_attn.q_proj not in by_part or layer.mlp.gate_proj not in by_part:
            return None
        if not is_silu(layer.mlp.act_fn):
            return None
    row_model = RowModel(model, by_part)
    return row_model if _computes_the_same(row_model, model) else None


def _computes_the_same(row_model: RowModel, model: Any) -> bool:
    ids_R = torch.arange(1, 9) % len(row_model._embedding)
    position_R = torch.arange(8)
    with torch.no_grad():
        with running(OneSequence()):
            expected = model(
                input_ids=ids_R[None],
                position_ids=position_R[None],
                past_key_values=StepCache(),
                use_cache=True,
            ).logits[0]
        actual = row_model(OneSequence(), ids_R, position_R)
    return float((actual - expected).abs().max()) <= _TOLERANCE * max(1.0, float(expected.std()))
