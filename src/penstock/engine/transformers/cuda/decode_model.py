"""A model's decode step without the model's own code between its layers.

One kernel looks up the rows' state, embeddings and rotary positions, which the model's own code does in sixteen launches. Only for
models whose layers all run `decode_layer.py`, after a comparison of the logits.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import functional

from penstock.engine.transformers.cuda.cuda_steps import DecodeStep
from penstock.engine.transformers.cuda.decode_kernels import open_rows
from penstock.engine.transformers.cuda.decode_layer import decode, norm_parts
from penstock.engine.transformers.cuda.regions import KVPool
from penstock.engine.transformers.cuda.row_kernels import norm_rows
from penstock.engine.transformers.kv_attention import KVShape, StepCache, running
from penstock.models.layer_kernels import is_close

_KNOWN = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM")


class DecodeModel:
    """Computes the logits of a decode step."""

    def __init__(self, model: Any, positions: int) -> None:
        self._model = model
        weight = model.get_input_embeddings().weight
        at_P = torch.arange(positions, device=weight.device)
        with torch.no_grad():
            turn = model.base_model.rotary_emb(weight[:1, None], at_P[None])
        self._cos_PD, self._sin_PD = (part[0].contiguous() for part in turn)

    def logits(self, state: Any, pool: KVPool, slot_B: torch.Tensor) -> torch.Tensor:
        """Store a token of each slot and return the logits of its next one."""
        base = self._model.base_model
        embedding = base.embed_tokens.weight
        x_BD, cos_BD, sin_BD, *places = open_rows(
            slot_B, state, embedding, self._cos_PD, self._sin_PD
        )
        step = DecodeStep(pool, *places)
        for layer in base.layers:
            x_BD = decode(layer, step, x_BD, (cos_BD, sin_BD))
        return functional.linear(norm_rows(x_BD, norm_parts(base.norm)), self._model.lm_head.weight)


def make_decode_model(model: Any, shape: KVShape, fused: int, positions: int) -> DecodeModel | None:
    """Return the decode step of a model of which `fused` layers decode on their own; None: of another form."""
    if type(model).__name__ not in _KNOWN or fused != len(model.base_model.layers):
        return None
    if model.lm_head.bias is not None:
        return None
    made = DecodeModel(model, positions)
    device, rows = made._cos_PD.device, 3
    slot_B = torch.arange(rows, device=device)
    state = SimpleNamespace(token=slot_B + 1, position=slot_B % 2, start=2 * slot_B)
    with torch.no_grad():
        got = made.logits(state, KVPool.allocate(shape, 2 * rows, device), slot_B)
        pool = KVPool.allocate(shape, 2 * rows, device)
        with running(DecodeStep.at(pool, state.start, state.position)):
            wanted = model(
                input_ids=state.token[None],
                position_ids=state.position[None],
                past_key_values=StepCache(),
                use_cache=True,
            ).logits[0]
    return made if is_close(got, wanted) else None
