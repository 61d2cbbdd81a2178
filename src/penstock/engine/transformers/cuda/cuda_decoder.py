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
from penstock.engine.transformers.cuda.cuda_steps import DecodeStep, PrefillStep
from penstock.engine.transformers.cuda.regions import KVPool
from penstock.engine.transformers.kv_attention import KVShape
from penstock.model.attention import Step
from penstock.model.decoder import Tables, logits, rotations, run_layers
from penstock.model.decoder_check import check_decoder
from penstock.model.decoder_weights import read_weights
from penstock.model.families import Family
from penstock.model.joint_weights import JointProducts
from penstock.model.kernels.decode_kernels import open_rows
from penstock.model.ops import embedding_scale


class CudaDecoder:
    """The weights of a model, joint, and the operations over them."""

    def __init__(self, model: Any, family: Family) -> None:
        self._model, self._family = model, family
        self._weights = read_weights(model, family, JointProducts())
        self._ops = CudaOps()
        self._dtype, self._device = self._weights.embedding.dtype, self._weights.embedding.device
        self.shape = KVShape.of(family, self._dtype)
        self._turn_PW: Tensor | None = None

    def check(self, longest: int) -> None:
        """Refuse the model if prompts or decode steps do not give its own log-probs; see `check_decoder`."""
        check_decoder(
            self._model, self._family, self._weights, longest, self._ops, self._steps_of_check
        )

    def _steps_of_check(self, length: int) -> Iterator[Step]:
        """A prompt, and the same rows as decode steps: each sees those before it in the region."""
        pool = KVPool.allocate(self.shape, length, self._device)
        rows_T = np.arange(length)
        yield PrefillStep(pool, np.array([length]), rows_T, rows_T)
        target_T = torch.arange(length, device=self._device)
        yield DecodeStep(pool, torch.zeros_like(target_T), target_T, target_T + 1)

    def open(self, positions: int) -> None:
        """Make the rotations of so many positions."""
        position_P = torch.arange(positions, device=self._device)
        tables = rotations(self._family, position_P, self._dtype)
        parts = [part[:, 0] for name in self._family.ropes for part in tables[name] or ()]
        self._turn_PW, self._sizes = torch.cat(parts, 1), [part.shape[-1] for part in parts]

    def close(self) -> None:
        """Release what `open` made."""
        self._turn_PW = None

    def _tables(self, turn_RW: Tensor) -> Tables:
        parts = iter(turn_RW[:, None].split(self._sizes, -1))
        return {None: None} | {name: (next(parts), next(parts)) for name in self._family.ropes}

    def decode(self, state: Any, pool: KVPool, slot_B: Tensor) -> Tensor:
        """Store a token of each slot and return the logits of its next one."""
        assert self._turn_PW is not None
        scale = embedding_scale(self._family, self._dtype)
        rows = open_rows(slot_B, state, self._weights.embedding, scale, self._turn_PW)
        step = DecodeStep(pool, rows.start_B, rows.target_B, rows.length_B)
        return self._logits(step, rows.x_BD, rows.turn_BW, None)

    def logits(
        self, step: Step, ids_R: Tensor, position_R: Tensor, kept_K: Tensor | None
    ) -> Tensor:
        """Store the rows and return the logits of those kept; None: of all."""
        assert self._turn_PW is not None
        x_RD = self._ops.embed(self._family, self._weights, ids_R)
        # a padding row's position grows beyond the table
        turn_RW = self._turn_PW[position_R.clamp_max(len(self._turn_PW) - 1)]
        return self._logits(step, x_RD, turn_RW, kept_K)

    def _logits(self, step: Step, x_RD: Tensor, turn_RW: Tensor, kept_K: Tensor | None) -> Tensor:
        family, weights, tables = self._family, self._weights, self._tables(turn_RW)
        hidden_KD = run_layers(self._ops, family, weights, step, tables, x_RD, kept_K)
        return logits(family, weights, hidden_KD)
