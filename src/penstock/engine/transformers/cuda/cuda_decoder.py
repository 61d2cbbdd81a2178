"""A family's decoder on a GPU: the logits of decode steps, which graphs capture, and of prompts.

One kernel looks up the rows of a decode step: state, embeddings and rotations.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.engine.transformers.cuda.cuda_ops import CudaOps
from penstock.engine.transformers.cuda.cuda_steps import DecodeStep, PrefillStep, Prompt
from penstock.engine.transformers.cuda.grouped_adapters import GroupedAdapters
from penstock.engine.transformers.cuda.regions import KVPool
from penstock.engine.transformers.kv_attention import KVShape
from penstock.model.attention import Step
from penstock.model.decoder import Tables, logits, rotations, run_layers
from penstock.model.decoder_check import check_decoder
from penstock.model.decoder_weights import Products, read_weights
from penstock.model.families import Family
from penstock.model.joint_weights import JointProducts
from penstock.model.kernels.decode_kernels import open_rows
from penstock.model.kernels.exact_products import ExactProducts
from penstock.model.ops import embedding_scale


class CudaDecoder:
    """The weights of a model, joint, and the operations over them."""

    def __init__(
        self,
        model: Any,
        family: Family,
        *,
        records: bool = False,
        adapters: bool = False,
        exact: bool = False,
    ) -> None:
        """records: the experts of each token, too; adapters: rows may have some of their own; exact: the bits of a
        row are those of any batch."""
        self._model, self._family, self.exact = model, family, exact
        products: Products = ExactProducts(joins=True) if exact else JointProducts()
        self.adapters = GroupedAdapters(model, products) if adapters else None
        self._weights = read_weights(model, family, self.adapters or products)
        if self.adapters is not None:
            self.adapters.allocate(self._weights.embedding)
        self._ops = CudaOps()
        self._dtype, self._device = self._weights.embedding.dtype, self._weights.embedding.device
        self.shape = KVShape.of(family, self._dtype, records=records)
        self._turn_PW: Tensor | None = None

    def check(self, longest: int) -> None:
        """Refuse the model if prompts or decode steps do not give its own log-probs; see `check_decoder`."""
        check_decoder(
            self._model, self._family, self._weights, longest, self._ops, self._steps_of_check
        )

    def _steps_of_check(self, length: int) -> Iterator[Step]:
        """A prompt, and the same rows as decode steps: each sees those before it in the region."""
        pool = KVPool.allocate(self.shape, length, self._device)
        yield PrefillStep(pool, [Prompt(np.zeros(length, np.int64), 0, [0])], exact=self.exact)
        target_T = torch.arange(length, device=self._device)
        start_T = torch.zeros_like(target_T)
        yield DecodeStep(pool, start_T, target_T, target_T + 1, exact=self.exact)

    def open(self, positions: int) -> None:
        """Make the rotations of so many positions."""
        position_P = torch.arange(positions, device=self._device)
        self._turn_PW, self._sizes = joined_rotations(self._family, position_P, self._dtype)

    def close(self) -> None:
        """Release what `open` made."""
        self._turn_PW = None

    def decode(self, state: Any, pool: KVPool, slot_B: Tensor) -> Tensor:
        """Store a token of each slot and return the logits of its next one."""
        assert self._turn_PW is not None
        if self.adapters is not None:
            self.adapters.assign(state.adapter[slot_B], None)
        scale = embedding_scale(self._family, self._dtype)
        rows = open_rows(slot_B, state, self._weights.embedding, scale, self._turn_PW)
        step = DecodeStep(pool, rows.start_B, rows.target_B, rows.length_B, exact=self.exact)
        return self._logits(step, rows.x_BD, rows.turn_BW, None)

    def logits(
        self, step: Step, ids_R: Tensor, position_R: Tensor, kept_K: Tensor | None
    ) -> Tensor:
        """Store the rows and return the logits of those kept; None: of all."""
        assert self._turn_PW is not None
        if self.adapters is not None and isinstance(step, PrefillStep):
            self.adapters.assign(step.adapter_R, kept_K)
        x_RD = self._ops.embed(self._family, self._weights, ids_R)
        # a padding row's position grows beyond the table
        turn_RW = self._turn_PW[position_R.clamp_max(len(self._turn_PW) - 1)]
        return self._logits(step, x_RD, turn_RW, kept_K)

    def _logits(self, step: Step, x_RD: Tensor, turn_RW: Tensor, kept_K: Tensor | None) -> Tensor:
        family, weights, tables = (
            self._family,
            self._weights,
            tables_of(self._family, turn_RW, self._sizes),
        )
        hidden_KD = run_layers(self._ops, family, weights, step, tables, x_RD, kept_K)
        return logits(family, weights, hidden_KD)


def joined_rotations(
    family: Family, position_R: Tensor, dtype: torch.dtype
) -> tuple[Tensor, list[int]]:
    """The tables of all rotations side by side, and the width of each."""
    tables = rotations(family, position_R, dtype)
    parts = [part[:, 0] for name in family.ropes for part in tables[name] or ()]
    return torch.cat(parts, 1), [part.shape[-1] for part in parts]


def tables_of(family: Family, turn_RW: Tensor, sizes: list[int]) -> Tables:
    """Views of each table."""
    parts = iter(turn_RW[:, None].split(sizes, -1))
    return {None: None} | {name: (next(parts), next(parts)) for name in family.ropes}
