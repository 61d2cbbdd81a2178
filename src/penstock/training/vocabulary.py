"""Log-probs and entropies of chosen tokens when each tensor rank has a slice of the vocabulary.

What `logprobs.py` computes on one rank. No rank holds a whole row of logits: maxima and sums over the
vocabulary are taken over the ranks, one chunk of tokens after another, and the backward pass computes
each chunk's logits again. Hidden states are equal on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from penstock.training.collectives import all_max, all_sum
from penstock.training.logprobs import (
    CHUNK_ELEMENTS_CPU,
    CHUNK_ELEMENTS_GPU,
    NO_CHANCE,
    PLAIN_LOGITS,
    LogitRule,
)
from penstock.training.ranks import Axis
from penstock.training.sharding import Cut


def sliced_logprobs(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    targets_N: Tensor,
    temperatures_N: Tensor,
    rule: LogitRule = PLAIN_LOGITS,
    *,
    cut: Cut,
    axis: Axis,
    chunk_tokens: int | None = None,
    banned: tuple[Tensor, Sequence[int]] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (log-prob of each target, entropy of each distribution) at the tokens' temperatures.

    `weight_VD` and `bias_V` are this rank's slice of the head; see `logprobs.token_logprobs`.
    """
    if chunk_tokens is None:
        budget = CHUNK_ELEMENTS_GPU if hidden_ND.is_cuda else CHUNK_ELEMENTS_CPU
        chunk_tokens = max(1, budget // weight_VD.shape[0])
    ids_V = torch.arange(len(weight_VD), device=weight_VD.device) + cut.first
    closed = None
    if banned is not None:
        closed = banned[0], torch.isin(ids_V, torch.tensor(banned[1], device=ids_V.device))
    result: tuple[Tensor, Tensor] = _SlicedLogprobs.apply(
        hidden_ND,
        weight_VD,
        bias_V,
        targets_N - cut.first,
        temperatures_N,
        rule,
        chunk_tokens,
        closed,
        axis,
    )
    return result


class _SlicedLogprobs(torch.autograd.Function):
    """Keep one number per token in forward; compute the logits of each chunk again in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        temperatures_N: Tensor,
        rule: LogitRule,
        chunk_tokens: int,
        banned: tuple[Tensor, Tensor] | None,
        axis: Axis,
    ) -> tuple[Tensor, Tensor]:
        exact = torch.promote_types(hidden_ND.dtype, torch.float32)
        logprobs_N = torch.empty(len(hidden_ND), dtype=exact, device=hidden_ND.device)
        entropies_N, log_totals_N = torch.empty_like(logprobs_N), torch.empty_like(logprobs_N)
        for start in range(0, len(hidden_ND), chunk_tokens):
            part = slice(start, start + chunk_tokens)
            raw_CV = linear(hidden_ND[part], weight_VD, bias_V)
            logits_CV = _scaled(raw_CV, rule)[0] / temperatures_N[part, None]
            _ban(logits_CV, banned, part, NO_CHANCE)
            peak_C = all_max(logits_CV.amax(-1), axis)
            share_CV = (logits_CV - peak_C[:, None]).exp()
            own_C, column_C = _own_targets(targets_N[part], len(weight_VD))
            target_C = logits_CV.gather(-1, column_C[:, None]).squeeze(-1) * own_C
            total_C, weighted_C, target_C = all_sum(
                torch.stack([share_CV.sum(-1), torch.linalg.vecdot(share_CV, logits_CV), target_C]),
                axis,
            )
            log_totals_N[part] = peak_C + total_C.log()
            logprobs_N[part] = target_C - log_totals_N[part]
            entropies_N[part] = log_totals_N[part] - weighted_C / total_C
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, targets_N, temperatures_N, log_totals_N)
        ctx.rule, ctx.chunk_tokens, ctx.banned, ctx.axis = rule, chunk_tokens, banned, axis
        ctx.mark_non_differentiable(entropies_N)
        return logprobs_N, entropies_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_VD, bias_V, targets_N, temperatures_N, log_totals_N = ctx.saved_tensors
        grad_hidden_ND = torch.zeros_like(hidden_ND)
        exact = torch.promote_types(weight_VD.dtype, torch.float32)
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=exact)
        grad_bias_V = None if bias_V is None else torch.zeros_like(bias_V, dtype=exact)
        for start in range(0, len(hidden_ND), ctx.chunk_tokens):
            part = slice(start, start + ctx.chunk_tokens)
            raw_CV = linear(hidden_ND[part], weight_VD, bias_V)
            logits_CV, slope_CV = _scaled(raw_CV, ctx.rule)
            share_CV = (logits_CV / temperatures_N[part, None] - log_totals_N[part, None]).exp()
            _ban(share_CV, ctx.banned, part, 0.0)
            factor_C = grads[0][part] / temperatures_N[part] * ctx.rule.scale
            grad_CV = share_CV * -factor_C[:, None]
            own_C, column_C = _own_targets(targets_N[part], len(weight_VD))
            grad_CV.scatter_add_(-1, column_C[:, None], (factor_C * own_C)[:, None])
            if slope_CV is not None:
                grad_CV = grad_CV * slope_CV
            if grad_bias_V is not None:
                grad_bias_V += grad_CV.sum(0)
            grad_CV = grad_CV.to(weight_VD.dtype)
            grad_hidden_ND[part] = grad_CV @ weight_VD
            if ctx.needs_input_grad[1]:
                grad_weight_VD += grad_CV.t() @ hidden_ND[part]
        grad_weight = grad_weight_VD.to(weight_VD.dtype) if ctx.needs_input_grad[1] else None
        grad_bias = None if grad_bias_V is None or bias_V is None else grad_bias_V.to(bias_V.dtype)
        return all_sum(grad_hidden_ND, ctx.axis), grad_weight, grad_bias, *(None,) * 6


def _scaled(raw_CV: Tensor, rule: LogitRule) -> tuple[Tensor, Tensor | None]:
    """Return the logits after scale and cap, and the slope of the cap (None: there is no cap)."""
    logits_CV = raw_CV.to(torch.promote_types(raw_CV.dtype, torch.float32)) * rule.scale
    if rule.softcap is None:
        return logits_CV, None
    capped_CV = rule.softcap * torch.tanh(logits_CV / rule.softcap)
    return capped_CV, 1 - (capped_CV / rule.softcap).square()


def _ban(
    values_CV: Tensor, banned: tuple[Tensor, Tensor] | None, part: slice, value: float
) -> None:
    """Write `value` at the places that have no probability."""
    if banned is not None:
        values_CV.masked_fill_(banned[0][part, None] & banned[1][None, :], value)


def _own_targets(targets_C: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return which targets are in this rank's slice, and their columns (0 for others' targets)."""
    own_C = (targets_C >= 0) & (targets_C < count)
    return own_C, targets_C.masked_fill(~own_C, 0)
