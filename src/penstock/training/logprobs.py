"""Log-probs and entropies of chosen tokens from hidden states, without holding all logits.

The vocabulary is the largest axis of a language model, so the output head runs over chunks of tokens.
Probabilities are kept for the backward pass if they are few; otherwise each chunk's logits are
computed again there. On a GPU the arithmetic around the matrix products is compiled into one kernel
for the forward and one for the backward pass. Entropies are for metrics and carry no gradient.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

KEEP_ELEMENTS_CPU = 1 << 27  # probabilities up to this many are kept for the backward pass
KEEP_ELEMENTS_GPU = 1 << 24
CHUNK_ELEMENTS_CPU = 1 << 20
CHUNK_ELEMENTS_GPU = 1 << 28
NO_CHANCE = -1e30  # a logit whose probability is 0; finite, so that 0 x its log is 0 in the entropy


@dataclass(frozen=True, slots=True)
class LogitRule:
    """The scaling and capping that some models apply to their logits."""

    scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def from_config(cls, config: Any) -> LogitRule:
        """Read the rule from a transformers config; models have several names for it."""
        scale = getattr(config, "logit_scale", None) or getattr(config, "lm_head_multiplier", None)
        divisor = getattr(config, "logits_scaling", None) or getattr(
            config, "logits_mup_width_multiplier", None
        )
        caps = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
        softcap = next((cap for name in caps if (cap := getattr(config, name, None))), None)
        return cls(scale=(scale or 1.0) / (divisor or 1.0), softcap=softcap)


PLAIN_LOGITS = LogitRule()


def token_logprobs(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    targets_N: Tensor,
    temperatures_N: Tensor,
    rule: LogitRule = PLAIN_LOGITS,
    chunk_tokens: int | None = None,
    banned: tuple[Tensor, Sequence[int]] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (log-prob of each target, entropy of each distribution) at the tokens' temperatures.

    `banned` holds a flag for each token, and ids that have no probability where the flag is set.
    """
    if chunk_tokens is None:
        budget = CHUNK_ELEMENTS_GPU if hidden_ND.is_cuda else CHUNK_ELEMENTS_CPU
        chunk_tokens = max(1, budget // weight_VD.shape[0])
    result: tuple[Tensor, Tensor] = _TokenLogprobs.apply(
        hidden_ND,
        weight_VD,
        bias_V,
        targets_N,
        temperatures_N,
        rule,
        chunk_tokens,
        _banned_columns(banned, weight_VD),
    )
    return result


def _banned_columns(
    banned: tuple[Tensor, Sequence[int]] | None, weight_VD: Tensor
) -> tuple[Tensor, Tensor] | None:
    """Return the flags of the tokens, and of the columns of the vocabulary."""
    if banned is None:
        return None
    columns_V = torch.zeros(weight_VD.shape[0], dtype=torch.bool, device=weight_VD.device)
    columns_V[list(banned[1])] = True
    return banned[0], columns_V


class _TokenLogprobs(torch.autograd.Function):
    """Keep one number per token (and few probabilities) in forward; recompute chunks in backward."""

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
    ) -> tuple[Tensor, Tensor]:
        count = len(hidden_ND)
        exact = torch.promote_types(hidden_ND.dtype, torch.float32)
        logprobs_N = torch.empty(count, dtype=exact, device=hidden_ND.device)
        entropies_N, log_totals_N = torch.empty_like(logprobs_N), torch.empty_like(logprobs_N)
        limit = KEEP_ELEMENTS_GPU if hidden_ND.is_cuda else KEEP_ELEMENTS_CPU
        keep = any(ctx.needs_input_grad[:3]) and count * weight_VD.shape[0] <= limit
        keep = keep and rule.softcap is None
        chunk_logprobs = _compiled(_chunk_logprobs, hidden_ND.is_cuda and not keep)
        kept: list[Tensor] = []
        for start in range(0, count, chunk_tokens):
            part = slice(start, start + chunk_tokens)
            raw_CV = linear(hidden_ND[part], weight_VD, bias_V)
            logprobs_N[part], log_totals_N[part], entropies_N[part], probabilities_CV = (
                chunk_logprobs(
                    raw_CV,
                    targets_N[part],
                    temperatures_N[part],
                    rule.scale,
                    rule.softcap,
                    keep,
                    _part(banned, part),
                )
            )
            if probabilities_CV is not None:
                kept.append(probabilities_CV)
        ctx.save_for_backward(
            hidden_ND, weight_VD, bias_V, targets_N, temperatures_N, log_totals_N, *kept
        )
        ctx.rule, ctx.chunk_tokens, ctx.banned = rule, chunk_tokens, banned
        ctx.mark_non_differentiable(entropies_N)
        return logprobs_N, entropies_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_N = grads[0]
        hidden_ND, weight_VD, bias_V, targets_N, temperatures_N, log_totals_N, *kept = (
            ctx.saved_tensors
        )
        rule: LogitRule = ctx.rule
        grad_hidden_ND = torch.empty_like(hidden_ND)
        grad_weight_VD: Tensor | None = None
        grad_bias_V = None if bias_V is None else torch.zeros_like(bias_V)
        logit_gradient = _compiled(_logit_gradient, hidden_ND.is_cuda and not kept)
        for index, start in enumerate(range(0, len(hidden_ND), ctx.chunk_tokens)):
            part = slice(start, start + ctx.chunk_tokens)
            factor_C = grad_N[part] / temperatures_N[part] * rule.scale
            if kept:
                grad_logits_CV = kept[index] * -factor_C[:, None]
                grad_logits_CV.scatter_add_(-1, targets_N[part, None], factor_C[:, None])
            else:
                raw_CV = linear(hidden_ND[part], weight_VD, bias_V)
                grad_logits_CV = logit_gradient(
                    raw_CV,
                    targets_N[part],
                    temperatures_N[part],
                    log_totals_N[part],
                    factor_C,
                    rule.scale,
                    rule.softcap,
                    _part(ctx.banned, part),
                )
            if grad_bias_V is not None:
                grad_bias_V += grad_logits_CV.sum(0)
            grad_logits_CV = grad_logits_CV.to(weight_VD.dtype)
            grad_hidden_ND[part] = grad_logits_CV @ weight_VD
            if ctx.needs_input_grad[1]:
                grad_weight_VD = _add_product(grad_weight_VD, grad_logits_CV, hidden_ND[part])
        if ctx.needs_input_grad[1]:
            if grad_weight_VD is None:  # no tokens: sharded ranks still reduce a gradient
                grad_weight_VD = torch.zeros_like(weight_VD)
            grad_weight_VD = grad_weight_VD.to(weight_VD.dtype)
        return grad_hidden_ND, grad_weight_VD, grad_bias_V, None, None, None, None, None


def _part(banned: tuple[Tensor, Tensor] | None, part: slice) -> tuple[Tensor, Tensor] | None:
    return None if banned is None else (banned[0][part], banned[1])


def _fill(values_CV: Tensor, banned: tuple[Tensor, Tensor] | None, value: float) -> Tensor:
    """Return the values with `value` at the banned places."""
    if banned is None:
        return values_CV
    return values_CV.masked_fill(banned[0][:, None] & banned[1][None, :], value)


def _logits(raw_CV: Tensor, scale: float, softcap: float | None) -> Tensor:
    logits_CV = raw_CV.to(torch.promote_types(raw_CV.dtype, torch.float32))
    if scale != 1.0:
        logits_CV = logits_CV * scale
    if softcap is not None:
        logits_CV = softcap * torch.tanh(logits_CV / softcap)
    return logits_CV


def _chunk_logprobs(
    raw_CV: Tensor,
    targets_C: Tensor,
    temperatures_C: Tensor,
    scale: float,
    softcap: float | None,
    keep: bool,
    banned: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return (log-prob, log of the partition sum, entropy, probabilities or None) of one chunk."""
    logits_CV = _logits(raw_CV, scale, softcap) / temperatures_C[:, None]
    logits_CV = _fill(logits_CV, banned, NO_CHANCE)
    log_all_CV = torch.log_softmax(logits_CV, -1)
    logprob_C = log_all_CV.gather(-1, targets_C[:, None]).squeeze(-1)
    log_total_C = logits_CV.gather(-1, targets_C[:, None]).squeeze(-1) - logprob_C
    probabilities_CV = log_all_CV.exp()
    entropy_C = -torch.linalg.vecdot(probabilities_CV, log_all_CV)
    return logprob_C, log_total_C, entropy_C, probabilities_CV if keep else None


def _logit_gradient(
    raw_CV: Tensor,
    targets_C: Tensor,
    temperatures_C: Tensor,
    log_total_C: Tensor,
    factor_C: Tensor,
    scale: float,
    softcap: float | None,
    banned: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """Return the raw logits' gradient: (one at the target, minus the probabilities) x factor."""
    logits_CV = _logits(raw_CV, scale, softcap)
    probabilities_CV = (logits_CV / temperatures_C[:, None] - log_total_C[:, None]).exp()
    probabilities_CV = _fill(probabilities_CV, banned, 0.0)
    columns_V = torch.arange(raw_CV.shape[1], device=raw_CV.device)
    chosen_CV = (columns_V[None, :] == targets_C[:, None]).to(probabilities_CV.dtype)
    grad_logits_CV = (chosen_CV - probabilities_CV) * factor_C[:, None]
    if softcap is not None:
        grad_logits_CV = grad_logits_CV * (1 - (logits_CV / softcap).square())
    return grad_logits_CV.to(raw_CV.dtype)


@functools.cache
def _compiled(function: Callable[..., Any], wanted: bool) -> Callable[..., Any]:
    """Return the function compiled if that is wanted and triton is installed, else as it is."""
    if not wanted or importlib.util.find_spec("triton") is None:
        return function
    compiled: Callable[..., Any] = torch.compile(function, dynamic=True)
    return compiled


def _add_product(total_VD: Tensor | None, grad_logits_CV: Tensor, hidden_CD: Tensor) -> Tensor:
    """Return total + grad_logits^T hidden, summed in float32 if the operands are shorter."""
    left_VC = grad_logits_CV.t()
    if grad_logits_CV.is_cuda and grad_logits_CV.dtype in (torch.bfloat16, torch.float16):
        product_VD = torch.mm(left_VC, hidden_CD, out_dtype=torch.float32)
        return product_VD if total_VD is None else total_VD.add_(product_VD)
    if total_VD is None:
        return left_VC @ hidden_CD
    return total_VD.addmm_(left_VC, hidden_CD)
