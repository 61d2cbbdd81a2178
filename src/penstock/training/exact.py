"""`model.arithmetic = "exact"`: the trainer's log-probs have the bits of those that the engine sampled with.

A forward pass runs the engine's own operations over the packs of the trainer: products and attention in which a row
does not depend on the others, and its log-probs. The backward pass is the trainer's, at the exact inputs, so gradients
are those of the default. On a GPU, each step of a layer has the engine's forward and the trainer's backward
(`exact_ops.py`); elsewhere a layer is computed again for its gradients. For one trainer rank and a family of the decoder.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from penstock.engine.transformers.cpu.cpu_steps import QUANTUM, Masks, attend_parts
from penstock.engine.transformers.cpu.invariance import find_row_quantum
from penstock.engine.transformers.cpu.packed_linear import ModelLinears, choose_linear
from penstock.engine.transformers.kv_attention import KVShape
from penstock.errors import UserError
from penstock.model.arithmetic import any_order
from penstock.model.attention import AttentionCall
from penstock.model.decoder import (
    Tables,
    rotations,
    run_layer,
    run_layers,
    scaled_logits,
)
from penstock.model.decoder_weights import Linear, Products, Weights, read_weights
from penstock.model.families import Family
from penstock.model.joint_weights import can_join
from penstock.model.kernels.chains import Masters
from penstock.model.kernels.trained_products import TrainProducts
from penstock.model.ops import Ops, TorchOps
from penstock.model.packed_attention import PackedStep, PackLayout, by_block
from penstock.model.sampling import RowSampling, sample
from penstock.training.logprobs import ExactScores, banned_here
from penstock.training.pack import Kept, Pack

_LOGITS = 1 << 25  # that are scored at once where some have no chance


class Arithmetic(Protocol):
    """How the engine of a device computes, over the weights that the trainer has now."""

    ops: Ops
    quantum: int  # rows of a pass are a multiple of it

    def renew(self) -> None:
        """Read the weights again when they are needed."""

    def weights(self) -> Weights:
        """The weights, as the engine multiplies them."""

    def step(self, step: PackedStep, position_R: Tensor, dtype: torch.dtype) -> PackedStep:
        """The step of a pack whose rows, at these positions, may be padded."""

    def tables(self, position_R: Tensor, dtype: torch.dtype) -> Tables:
        """The rotations of rows."""

    def logprobs(self, logits_NV: Tensor, target_N: Tensor, temperature_N: Tensor) -> Tensor:
        """The log-probs of tokens, as the engine gives them when it samples."""

    def alone(self) -> contextlib.AbstractContextManager[None]:
        """How a pass must run."""


class ExactForward:
    """Consumes packs, produces hidden states and log-probs with the engine's bits and the trainer's gradients."""

    def __init__(self, model: Any, family: Family, how: Arithmetic) -> None:
        self._model, self._family, self._how = model, family, how
        self._in_one_pass = False

    @classmethod
    def of(cls, model: Any, family: Family | None) -> ExactForward:
        """On the device of the model; None: the decoder does not compute all of it."""
        if family is None:
            raise UserError(
                "model.arithmetic: got exact with adapters, several trainer ranks, or a model without a row in "
                "docs/models.md, allowed: deterministic or fast"
            )
        on_gpu = next(model.parameters()).device.type == "cuda"
        return cls(model, family, (CudaArithmetic if on_gpu else CpuArithmetic)(model, family))

    def table(self, masters: Masters) -> tuple[Ops, Products] | None:
        """The operations of a trainer on a GPU whose steps have the engine's bits; None: not of this family."""
        from penstock.model.kernels.exact_ops import ExactOps, ExactProduct, covers

        products = TrainProducts(masters, ExactProduct)
        self._in_one_pass = covers(self._family, read_weights(self._model, self._family, products))
        return (ExactOps(masters), products) if self._in_one_pass else None

    def renew(self) -> None:
        """Compute with the weights as they are now."""
        self._how.renew()

    def hidden_states(
        self, ops: Ops, weights: Weights, step: PackedStep, pack: Pack, *, checkpoints: bool
    ) -> Tensor:
        """The normalised hidden states of the predictors; `ops` and `weights` are the trainer's."""
        family, position_T = self._family, pack.position_ids_T
        x_RD = ops.embed(family, weights, pack.input_ids_T)
        tables = rotations(family, position_T, x_RD.dtype)
        if self._in_one_pass:
            step = self._how.step(step, position_T, x_RD.dtype)
            return run_layers(
                ops, family, weights, step, tables, x_RD, pack.predictor_N, checkpoints=checkpoints
            )
        engine = _EnginePass(self._how, family, step, position_T, x_RD.dtype)
        last = len(weights.layers) - 1
        for index, layer in enumerate(weights.layers):
            kept = pack.predictor_N if index == last else None
            x_RD = _in_two_ways(
                functools.partial(run_layer, ops, family, index, step, tables, kept, layer),
                functools.partial(engine.layer, index, kept),
                x_RD,
            )
        return _in_two_ways(lambda x_ND: ops.norm(family, x_ND, weights.norm), engine.norm, x_RD)

    def scores(self, pack: Pack, temperature_N: Tensor, banned: Any) -> ExactScores:
        """What gives the logits of some of the pack's trained tokens, before scale and cap, and their log-probs."""
        how, weights = self._how, self._how.weights()
        banned = banned_here(banned, weights.embedding, 0)

        def score(hidden_CD: Tensor, part: slice) -> tuple[Tensor, Tensor]:
            with how.alone():
                raw_CV = weights.head(_padded(hidden_CD, how.quantum))[: len(hidden_CD)]
                left = None if banned is None else (banned[0][part], banned[1])
                return raw_CV, self._logprobs(
                    raw_CV, left, None if pack.kept is None else pack.kept[part],
                    pack.target_N[part], temperature_N[part],
                )  # fmt: skip

        return score

    def _logprobs(
        self,
        raw_CV: Tensor,
        banned: tuple[Tensor, Tensor] | None,
        kept: Kept | None,
        target_C: Tensor,
        temperature_C: Tensor,
    ) -> Tensor:
        """The log-probs of tokens; a few at a time where top_k or top_p left some ids only."""
        chunk = max(1, len(raw_CV) if kept is None else _LOGITS // raw_CV.shape[1])
        scale, cap = self._family.logit_scale, self._family.logit_cap
        parts = [raw_CV.new_zeros(0, dtype=torch.float32)]
        for start in range(0, len(raw_CV), chunk):
            part = slice(start, start + chunk)
            logits_PV = scaled_logits(raw_CV[part], scale, cap)
            if kept is not None:
                dropped_PV = kept[start : start + len(logits_PV)].dropped(logits_PV.shape[1])
                logits_PV = logits_PV.masked_fill(dropped_PV, -torch.inf)
            with _without(banned, part, logits_PV):
                parts.append(self._how.logprobs(logits_PV, target_C[part], temperature_C[part]))
        return torch.cat(parts)


@contextlib.contextmanager
def _without(
    banned: tuple[Tensor, Tensor] | None, part: slice, logits_PV: Tensor
) -> Iterator[None]:
    """Give the banned columns no chance in the flagged rows, for a while: the logits may be the caller's."""
    if banned is None:
        yield
        return
    early_P1, columns = banned[0][part, None], banned[1]
    values_PB = logits_PV.index_select(1, columns)
    with any_order():  # no column comes twice
        logits_PV.index_copy_(1, columns, values_PB.masked_fill(early_P1, -torch.inf))
    yield
    with any_order():
        logits_PV.index_copy_(1, columns, values_PB)


class _EnginePass:
    """One forward pass of the engine's operations over a pack."""

    def __init__(
        self,
        how: Arithmetic,
        family: Family,
        step: PackedStep,
        position_T: Tensor,
        dtype: torch.dtype,
    ) -> None:
        self._how, self._family, self._weights = how, family, how.weights()
        position_R = _padded(position_T, how.quantum)
        with how.alone():
            self._step = how.step(step, position_R, dtype)
            self._tables = how.tables(position_R, dtype)

    def layer(self, index: int, kept_K: Tensor | None, x_TD: Tensor) -> Tensor:
        how, quantum = self._how, self._how.quantum
        kept = None if kept_K is None else _padded(kept_K, quantum)
        weights = self._weights.layers[index]
        with how.alone():
            x_RD = run_layer(
                how.ops, self._family, index, self._step, self._tables, kept, weights,
                _padded(x_TD, quantum),
            )  # fmt: skip
        return x_RD[: len(x_TD if kept_K is None else kept_K)]

    def norm(self, x_ND: Tensor) -> Tensor:
        with self._how.alone():
            return self._how.ops.norm(self._family, x_ND, self._weights.norm)


def _in_two_ways(
    own: Callable[[Tensor], Tensor], engine: Callable[[Tensor], Tensor], x: Tensor
) -> Tensor:
    """The engine's values, with the gradients of the trainer's own operations at the same input."""
    if not torch.is_grad_enabled():
        return engine(x)

    def compute(x: Tensor) -> Tensor:  # without gradients first, then again with them
        return own(x) if torch.is_grad_enabled() else engine(x)

    output: Tensor = checkpoint(compute, x, use_reentrant=True, preserve_rng_state=False)
    return output


def _padded(rows: Tensor, quantum: int) -> Tensor:
    """A copy with zeros up to a multiple of rows."""
    missing = -len(rows) % quantum
    return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])]) if missing else rows.clone()


# ---- on a CPU


class CpuArithmetic:
    """The rows of the CPU engine: one thread, packed products, attention by parts."""

    def __init__(self, model: Any, family: Family) -> None:
        self._model, self._family, self._kind = model, family, choose_linear(model)
        self._weights: Weights | None = None
        self.quantum = 1
        linears = _Copies(self._kind)
        weights = read_weights(model, family, linears)
        plain = family.softcap is not None or family.has_sinks
        shape = KVShape.of(family, weights.embedding.dtype)
        with self.alone():
            self.quantum, invariant = find_row_quantum(linears.sizes, shape, 1, self._kind, plain)
        if not invariant:
            raise UserError(
                "model.arithmetic: got exact on a CPU whose products change with the batch, allowed: "
                "deterministic"
            )
        self.ops: Ops = TorchOps(self.quantum)

    def renew(self) -> None:
        self._weights = None

    def weights(self) -> Weights:
        if self._weights is None:
            with torch.no_grad():
                self._weights = read_weights(self._model, self._family, _Copies(self._kind))
        return self._weights

    def step(self, step: PackedStep, position_R: Tensor, dtype: torch.dtype) -> PackedStep:
        return _RowsOfPack(step, len(position_R))

    def tables(self, position_R: Tensor, dtype: torch.dtype) -> Tables:
        return rotations(self._family, position_R, dtype)

    def logprobs(self, logits_NV: Tensor, target_N: Tensor, temperature_N: Tensor) -> Tensor:
        how = RowSampling(
            uniform_N=torch.zeros(len(logits_NV)),
            temperature_N=temperature_N.float(),
            greedy_N=None,
            top_k_N=None,
            top_p_N=None,
        )
        return sample(logits_NV, how, target_N)[1]

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """By one thread, as an engine computes."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


class _Copies(ModelLinears):
    """The engine's products over copies: a trainer's weights stay where they are."""

    def joint(self, modules: list[Any]) -> Linear:
        assert can_join(modules)
        bias = None
        if modules[0].bias is not None:
            bias = torch.cat([module.bias.detach() for module in modules])
        return self.product(torch.cat([module.weight.detach() for module in modules]), bias)


class _RowsOfPack(PackedStep):
    """The attention of a pack with the bits of the CPU engine; rows beyond the pack are padding."""

    def __init__(self, step: PackedStep, rows: int) -> None:
        experts_TLC = step.experts_TLC
        if experts_TLC is not None:
            padding = experts_TLC.new_zeros(rows - len(experts_TLC), *experts_TLC.shape[1:])
            experts_TLC = torch.cat([experts_TLC, padding])
        super().__init__(step.layout, experts_TLC)
        self._masks: Masks = {}

    def attend(self, layer: int, call: AttentionCall) -> Tensor:
        layout, first = self.layout, 0
        count = _tokens(layout)
        output = call.query.new_zeros(call.query.shape[2], call.query.shape[1], call.value.shape[3])
        heads, keys, values = (part[:, :, :count] for part in (call.query, call.key, call.value))
        for query, key, value in by_block(heads, keys, values, layout):
            runs, length = query.shape[0], query.shape[2]
            before, missing = key.shape[2] - length, -key.shape[2] % QUANTUM
            end = first + runs * length
            key, value = (functional.pad(x, (0, 0, 0, missing)).contiguous() for x in (key, value))
            target = output[first:end].unflatten(0, (runs, length))
            attend_parts(query.transpose(1, 2), key, value, before, call, target, self._masks)
            first = end
        return output[None]


def _tokens(layout: PackLayout) -> int:
    return sum(block.count * block.length for block in layout.blocks)


# ---- on a GPU


class CudaArithmetic:
    """The kernels of the engine on a GPU, with products of one form, over the weights where they are."""

    quantum = 1

    def __init__(self, model: Any, family: Family) -> None:
        from penstock.engine.transformers.cuda.cuda_ops import CudaOps

        self._model, self._family = model, family
        self.ops: Ops = CudaOps()
        self.renew()

    def renew(self) -> None:
        from penstock.model.kernels.exact_products import ExactProducts

        self._weights = read_weights(self._model, self._family, ExactProducts(joins=False))

    def weights(self) -> Weights:
        return self._weights

    def step(self, step: PackedStep, position_R: Tensor, dtype: torch.dtype) -> PackedStep:
        from penstock.model.kernels.exact_ops import RegionsOfPack

        return RegionsOfPack(step, self.tables(position_R, dtype))

    def tables(self, position_R: Tensor, dtype: torch.dtype) -> Tables:
        """In the layout of the engine's: a kernel adds up heads in an order that may depend on it."""
        from penstock.engine.transformers.cuda.cuda_decoder import joined_rotations, tables_of

        return tables_of(self._family, *joined_rotations(self._family, position_R, dtype))

    def logprobs(self, logits_NV: Tensor, target_N: Tensor, temperature_N: Tensor) -> Tensor:
        from penstock.model.kernels.decode_kernels import sample_rows

        unused_N = torch.zeros_like(target_N)
        return sample_rows(logits_NV, unused_N, unused_N, temperature_N.float(), target_N)[1]

    def alone(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()
