"""A model's decode step and prefill without the model's own code.

In a decode step one kernel looks up the rows' state, embeddings and rotary positions, which the model's own code does in sixteen
launches. A prefill waits for the host, which the model's own code keeps busy for longer than the GPU. Only for
models whose layers all run `decode_layer.py`, after a comparison of the logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from penstock.engine.transformers.cuda.cuda_steps import DecodeStep, PrefillStep
from penstock.engine.transformers.cuda.decode_layer import LayerParts, decode, norm_parts, prefill
from penstock.engine.transformers.cuda.regions import KVPool
from penstock.engine.transformers.kv_attention import KVShape, StepCache, running
from penstock.engine.transformers.sequences import Span
from penstock.model.kernels.decode_kernels import open_rows
from penstock.model.kernels.layer_kernels import is_close
from penstock.model.kernels.row_kernels import norm_rows

_KNOWN = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM")


class DecodeModel:
    """Computes the logits of a decode step and of packed prompts, with the weights where they are now."""

    def __init__(self, model: Any, positions: int) -> None:
        base = model.base_model
        self._embedding, self._head_weight = base.embed_tokens.weight, model.lm_head.weight
        self._layers = [LayerParts.of(layer) for layer in base.layers]
        self._norm = norm_parts(base.norm)
        weight = model.get_input_embeddings().weight
        at_P = torch.arange(positions, device=weight.device)
        with torch.no_grad():
            turn = base.rotary_emb(weight[:1, None], at_P[None])
        self._cos_PD, self._sin_PD = (part[0].contiguous() for part in turn)

    @property
    def device(self) -> torch.device:
        return self._cos_PD.device

    def logits(self, state: Any, pool: KVPool, slot_B: torch.Tensor) -> torch.Tensor:
        """Store a token of each slot and return the logits of its next one."""
        x_BD, cos_BD, sin_BD, *places = open_rows(
            slot_B, state, self._embedding, self._cos_PD, self._sin_PD
        )
        step = DecodeStep(pool, *places)
        for layer in self._layers:
            x_BD = decode(layer, step, x_BD, (cos_BD, sin_BD))
        return self._head(x_BD)

    def prefill(
        self, step: PrefillStep, ids_R: torch.Tensor, position_R: torch.Tensor, last_S: torch.Tensor
    ) -> torch.Tensor:
        """Store packed prompts and return the logits of the rows `last_S`."""
        x_RD = functional.embedding(ids_R, self._embedding)
        turn = (self._cos_PD[position_R], self._sin_PD[position_R])
        for layer in self._layers:
            x_RD = prefill(layer, step, x_RD, turn)
        return self._head(x_RD[last_S])

    def _head(self, x_BD: torch.Tensor) -> torch.Tensor:
        return functional.linear(norm_rows(x_BD, self._norm), self._head_weight)


def make_decode_model(model: Any, shape: KVShape, fused: int, positions: int) -> DecodeModel | None:
    """The decode step of a model, if all its layers decode by kernels (`fused` of them do); else None."""
    if type(model).__name__ not in _KNOWN or fused != len(model.base_model.layers):
        return None
    if model.lm_head.bias is not None:
        return None
    with torch.no_grad(), _cut_to_one_layer(model.base_model):
        probe = DecodeModel(model, positions)
        same = _decodes_the_same(probe, model, shape) and _prefills_the_same(probe, model, shape)
    return DecodeModel(model, positions) if same else None


@contextmanager
def _cut_to_one_layer(base: Any) -> Iterator[None]:
    """Leave the first layer only: the rounding of many adds up, with SmolLM2 to two fifths of the logits' scale.

    The others were compared one by one when they got their decode step.
    """
    layers = base.layers
    base.layers = layers[:1]
    try:
        yield
    finally:
        base.layers = layers


def _decodes_the_same(decode_model: DecodeModel, model: Any, shape: KVShape) -> bool:
    device, rows = decode_model.device, 3
    slot_B = torch.arange(rows, device=device)
    state = SimpleNamespace(token=slot_B + 1, position=slot_B % 2, start=2 * slot_B)
    actual = decode_model.logits(state, KVPool.allocate(shape, 2 * rows, device), slot_B)
    pool = KVPool.allocate(shape, 2 * rows, device)
    step = DecodeStep.at(pool, state.start, state.position)
    return is_close(actual, _own_logits(model, step, state.token, state.position))


def _prefills_the_same(decode_model: DecodeModel, model: Any, shape: KVShape) -> bool:
    """Compare two prompts, of three and of two tokens; the second has two regions."""
    device = decode_model.device
    spans = [Span(0, 3, 3), Span(3, 2, 2)]
    source, target = np.array([0, 1, 2, 3, 4, 3, 4]), np.arange(7)
    position_R = torch.tensor([0, 1, 2, 0, 1], device=device)
    rows_R = torch.arange(5, device=device)
    pools = [KVPool.allocate(shape, 7, device) for _ in range(2)]
    steps = [PrefillStep(pool, spans, source, target) for pool in pools]
    actual = decode_model.prefill(steps[0], rows_R + 1, position_R, rows_R)
    expected = _own_logits(model, steps[1], rows_R + 1, position_R)
    return is_close(actual, expected) and is_close(pools[0].keys, pools[1].keys)


def _own_logits(
    model: Any, step: DecodeStep | PrefillStep, ids_R: torch.Tensor, position_R: torch.Tensor
) -> torch.Tensor:
    with running(step):
        output = model(
            input_ids=ids_R[None],
            position_ids=position_R[None],
            past_key_values=StepCache(),
            use_cache=True,
        )
    logits: torch.Tensor = output.logits[0]
    return logits
