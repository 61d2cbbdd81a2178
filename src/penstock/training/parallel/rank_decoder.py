"""The decoder on several trainer ranks: layers stay modules, because their weights are gathered when they are called.

FSDP gathers a layer's weights in hooks around its module; tensor parallel talks to other ranks in hooks around linear
layers. So each layer of transformers is replaced by a module with the same parts, under the same names, that
the decoder computes. A pipeline's stage runs its own layers; a tensor rank has some of the heads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from penstock.model.decoder import rotations, run_layer
from penstock.model.decoder_weights import LayerWeights, Products, read_layer
from penstock.model.families import Family
from penstock.model.ops import Ops, scaled
from penstock.model.packed_attention import PackedStep
from penstock.model.parallel_plan import COLUMNS
from penstock.training.logprobs import VocabularySlice
from penstock.training.pack import Pack
from penstock.training.parallel.tensor_parallel import look_up


class DecoderLayer(nn.Module):
    """The parts of a layer, whose weights are read when it is called."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self._modules.update(layer._modules)

    def forward(
        self,
        read: Callable[[nn.Module], LayerWeights],
        run: Callable[[LayerWeights, Tensor], Tensor],
        x_RD: Tensor,
    ) -> Tensor:
        return run(read(self), x_RD)


@dataclass(slots=True, frozen=True, kw_only=True)
class RankDecoder:
    """The decoder over this rank's layers and slices."""

    model: Any
    body: Any
    family: Family
    share: VocabularySlice | None  # of the embedding; None: all of it
    is_last: bool  # stage of the pipeline

    @classmethod
    def of(
        cls,
        model: Any,
        body: Any,
        family: Family,
        plan: dict[str, str],
        share: VocabularySlice | None,
        *,
        is_last: bool,
    ) -> RankDecoder:
        """Replace the layers of a model that is cut by a plan; heads are cut if the plan does not gather them."""
        layers: nn.ModuleList = body.layers
        layers._modules.update(
            {name: DecoderLayer(layer) for name, layer in layers.named_children()}
        )
        if share is not None and plan.get("layers.*.self_attn.q_proj") == COLUMNS:
            size = share.axis.size
            family = replace(family, heads=family.heads // size, kv_heads=family.kv_heads // size)
        return cls(model=model, body=body, family=family, share=share, is_last=is_last)

    def hidden_states(
        self,
        ops: Ops,
        products: Products,
        pack: Pack,
        step: PackedStep,
        hidden: Tensor | None,
        *,
        checkpoints: bool,
    ) -> Tensor:
        """What this stage makes of the states of the stage before, [1, tokens, size]; of the predictors, if it is last."""
        family = self.family
        x_RD = self._embed(pack.input_ids_T) if hidden is None else hidden[0]
        tables = rotations(family, pack.position_ids_T, x_RD.dtype)
        last = str(len(family.layers) - 1)
        for name, layer in self.body.layers.named_children():
            row = family.layers[int(name)]
            read = functools.partial(
                read_layer, family=family, experts=row.experts, products=products
            )
            kept = pack.predictor_N if name == last else None
            run = functools.partial(run_layer, ops, family, int(name), step, tables, kept)
            if checkpoints and torch.is_grad_enabled():
                x_RD = checkpoint(layer, read, run, x_RD, use_reentrant=False)
            else:
                x_RD = layer(read, run, x_RD)
        return ops.norm(family, x_RD, self.body.norm.weight) if self.is_last else x_RD[None]

    def _embed(self, ids_R: Tensor) -> Tensor:
        embedding = self.model.get_input_embeddings()
        weight_VD, padding = embedding.weight, embedding.padding_idx
        if self.share is None:
            x_RD = functional.embedding(ids_R, weight_VD, padding)
        else:
            x_RD = look_up(ids_R, weight_VD, padding, self.share.first, self.share.axis)
        return scaled(self.family, x_RD)
