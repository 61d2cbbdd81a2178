"""`model.arithmetic = "exact"`: the trainer's log-probs have the bits of those that the engine sampled with.

A forward pass runs the engine's own operations over the packs of the trainer: products and attention in which a row
does not depend on the others, and its log-probs. The backward pass computes each layer again by the trainer's
operations, at the exact inputs, so gradients are those of the default. For one trainer rank and a family of the
decoder; the engine's side is what `engine/transformers` does for every request.
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
from penstock.model.attention import AttentionCall
from penstock.model.decoder import Tables, logits, rotations, run_layer
from penstock.model.decoder_weights import Linear, Weights, read_weights
from penstock.model.families import Family
from penstock.model.joint_weights import can_join
from penstock.model.ops import Ops, TorchOps
from penstock.model.packed_attention import PackedStep, PackLayout, by_block
from penstock.model.sampling import RowSampling, sample
from penstock.training.logprobs import banned_here, without_chance
from penstock.training.pack import Pack

_LOGITS = 1 << 25  # that are scored at once


class Arithmetic(Protocol):
    """How the engine of a device computes, over the weights that the trainer has now."""

    ops: Ops
    quantum: int  # rows of a pass are a multiple of it

    def renew(self) -> None:
        """Read the weights again when they are needed."""

    def weights(self) -> Weights:
        """The weights, as the engine multiplies them."""

    def step(self, step: PackedStep, rows: int) -> PackedStep:
        """The step of a pack whose rows are padded to a number."""

    def tables(self, position_R: Tensor, dtype: torch.dtype) -> Tables:
        """The rotations of rows."""

    def logprobs(self, logits_NV: Tensor, target_N: Tensor, temperature_N: Tensor) -> Tensor:
        """The log-probs of tokens, as the engine gives them when it samples."""

    def alone(self) -> contextlib.AbstractContextManager[None]:
        """How a pass must run."""


class ExactForward:
    """Consumes packs, produces hidden states and log-probs with the engine's bits and the trainer's gradients."""

    def __init__(self, family: Family, how: Arithmetic) -> None:
        self._family, self._how = family, how

    @classmethod
    def of(cls, model: Any, family: Family | None) -> ExactForward:
        """On the device of the model; None: the decoder does not compute all of it."""
        if family is None:
            raise UserError(
                "model.arithmetic: got exact with adapters, several trainer ranks, or a model without a row in "
                "docs/models.md, allowed: deterministic or fast"
            )
        on_gpu = next(model.parameters()).device.type == "cuda"
        return cls(family, (CudaArithmetic if on_gpu else CpuArithmetic)(model, family))

    def renew(self) -> None:
        """Compute with the weights as they are now."""
        self._how.renew()

    def hidden_states(self, ops: Ops, weights: Weights, step: PackedStep, pack: Pack) -> Tensor:
        """The normalised hidden states of the predictors; `ops` and `weights` are the trainer's."""
        family = self._family
        x_RD = ops.embed(family, weights, pack.input_ids_T)
        tables = rotations(family, pack.position_ids_T, x_RD.dtype)
        engine = _EnginePass(self._how, family, step, pack.position_ids_T, x_RD.dtype)
        last = len(weights.layers) - 1
        for index, layer in enumerate(weights.layers):
            kept = pack.predictor_N if index == last else None
            x_RD = _in_two_ways(
                functools.partial(run_layer, ops, family, index, step, tables, kept, layer),
                functools.partial(engine.layer, index, kept),
                x_RD,
            )
        return _in_two_ways(lambda x_ND: ops.norm(family, x_ND, weights.norm), engine.norm, x_RD)

    def replace(self, logprob_N: Tensor, hidden_ND: Tensor, pack: Pack, how: Any) -> Tensor:
        """Log-probs with the engine's values and the gradients of the trainer's."""
        with torch.no_grad():
            exact_N = self._logprobs(hidden_ND, pack, *how)
        replaced_N: Tensor = _Replaced.apply(logprob_N, exact_N)
        return replaced_N

    def _logprobs(
        self, hidden_ND: Tensor, pack: Pack, temperature_N: Tensor, banned: Any
    ) -> Tensor:
        weights, parts = self._how.weights(), []
        banned = banned_here(banned, weights.embedding, 0)
        chunk = max(self._how.quantum, _LOGITS // len(weights.embedding))
        for start in range(0, len(hidden_ND), chunk):
            part = slice(start, start + chunk)
            with self._how.alone():
                rows_ND = _padded(hidden_ND[part], self._how.quantum)
                logits_NV = logits(self._family, weights, rows_ND)[: len(hidden_ND[part])]
                left = None if banned is None else (banned[0][part], banned[1])
                kept = None if pack.kept is None else pack.kept[part]
                dropped_NV = without_chance(left, kept, logits_NV)
                if dropped_NV is not None:
                    logits_NV = logits_NV.masked_fill(dropped_NV, -torch.inf)
                parts.append(
                    self._how.logprobs(logits_NV, pack.target_N[part], temperature_N[part])
                )
        return torch.cat(parts) if parts else temperature_N.new_zeros(0)


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
        self._step = how.step(step, len(position_R))
        with how.alone():
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


class _Replaced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, exact: Tensor) -> Tensor:
        return exact.to(own.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


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

    def step(self, step: PackedStep, rows: int) -> PackedStep:
        return _RowsOfPack(step, rows)

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

    def step(self, step: PackedStep, rows: int) -> PackedStep:
        return _RegionsOfPack(step)

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


class _RegionsOfPack(PackedStep):
    """The attention of a pack with the bits of a decode step: each row by itself, over its sequence's keys."""

    def __init__(self, step: PackedStep) -> None:
        super().__init__(step.layout, step.experts_TLC)
        rows_S1 = self.layout.bounds_S1.long()
        keys_S1 = rows_S1 if self.layout.shared is None else self.layout.shared.bounds_S1.long()
        count_S, tokens = rows_S1.diff(), _tokens(self.layout)
        own_S = torch.arange(len(count_S), device=count_S.device)
        sequence_T = own_S.repeat_interleave(count_S, output_size=tokens)
        before_S = keys_S1.diff() - count_S
        place_T = torch.arange(tokens, device=count_S.device) - rows_S1[:-1][sequence_T]
        self._start_T = keys_S1[:-1][sequence_T]
        self._length_T = before_S[sequence_T] + place_T + 1

    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        rows = (part[0].transpose(0, 1) for part in (key, value))
        if self.layout.shared is None:
            self._keys, self._values = (part.contiguous() for part in rows)
        else:
            index_K = self.layout.shared.index_K
            self._keys, self._values = (part.index_select(0, index_K) for part in rows)

    def attend(self, layer: int, call: AttentionCall) -> Tensor:
        from penstock.model.kernels.decode_kernels import decode_attention

        return decode_attention(
            call.query[0].transpose(0, 1), self._keys, self._values, self._start_T, self._length_T,
            call.scale, call.window, call.softcap, call.sinks, programs=0,
        )[None]  # fmt: skip
