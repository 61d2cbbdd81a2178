"""Log-probs and entropies of chosen tokens from hidden states, without holding all logits.

The vocabulary is the largest axis of a language model, so the head runs over chunks of tokens. When
the probabilities are small enough to keep they are kept; otherwise each chunk's logits are computed
again in the backward pass. Entropy is a measurement and carries no gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

KEEP_ELEMENTS = 1 << 24  # logits up to this many are kept for the backward pass
CHUNK_ELEMENTS_CPU = 1 << 22
CHUNK_ELEMENTS_GPU = 1 << 27


@dataclass(frozen=True, slots=True)
class LogitRule:
    """What some models do to their logits after the head."""

    scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def of(cls, config: Any) -> LogitRule:
        """Read the rule from a transformers config (Gemma, Granite and Cohere have one)."""
        scale = 1.0
        if getattr(config, "logits_scaling", None):
            scale = 1.0 / config.logits_scaling
        elif getattr(config, "logit_scale", None):
            scale = config.logit_scale
        return cls(scale=scale, softcap=getattr(config, "final_logit_softcapping", None))


PLAIN_LOGITS = LogitRule()


def token_logprobs(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    targets_N: Tensor,
    temperatures_N: Tensor,
    rule: LogitRule = PLAIN_LOGITS,
    chunk_tokens: int | None = None,
) -> tuple[Tensor, Tensor]:
    """(log-prob of each target, entropy of each distribution), both at the tokens' temperatures."""
    if chunk_tokens is None:
        budget = CHUNK_ELEMENTS_GPU if hidden_ND.is_cuda else CHUNK_ELEMENTS_CPU
        chunk_tokens = max(1, budget // weight_VD.shape[0])
    result: tuple[Tensor, Tensor] = _TokenLogprobs.apply(
        hidden_ND, weight_VD, bias_V, targets_N, temperatures_N, rule, chunk_tokens
    )
    return result


class _TokenLogprobs(torch.autograd.Function):
    """Forward keeps one number per token (and small probabilities); backward redoes the chunks."""

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
    ) -> tuple[Tensor, Tensor]:
        count = len(hidden_ND)
        exact = torch.promote_types(hidden_ND.dtype, torch.float32)
        logprobs_N = torch.empty(count, dtype=exact, device=hidden_ND.device)
        entropies_N = torch.empty_like(logprobs_N)
        log_totals_N = torch.empty_like(logprobs_N)
        ctx.needs_logits = any(ctx.needs_input_grad[:3])
        keep = ctx.needs_logits and count * weight_VD.shape[0] <= KEEP_ELEMENTS
        kept: list[Tensor] = []
        for start in range(0, count, chunk_tokens):
            part = slice(start, start + chunk_tokens)
            logits_CV = _logits(hidden_ND[part], weight_VD, bias_V, rule, exact)
            logits_CV /= temperatures_N[part, None]
            log_total_C = logits_CV.logsumexp(-1)
            chosen_C = logits_CV.gather(-1, targets_N[part, None]).squeeze(-1)
            logprobs_N[part] = chosen_C - log_total_C
            log_totals_N[part] = log_total_C
            probabilities_CV = (logits_CV - log_total_C[:, None]).exp_()
            entropies_N[part] = log_total_C - torch.linalg.vecdot(probabilities_CV, logits_CV)
            if keep:
                kept.append(probabilities_CV)
        ctx.save_for_backward(
            hidden_ND, weight_VD, bias_V, targets_N, temperatures_N, log_totals_N, *kept
        )
        ctx.rule, ctx.chunk_tokens, ctx.keep = rule, chunk_tokens, keep
        ctx.mark_non_differentiable(entropies_N)
        return logprobs_N, entropies_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_N = grads[0]
        hidden_ND, weight_VD, bias_V, targets_N, temperatures_N, log_totals_N, *kept = (
            ctx.saved_tensors
        )
        rule, exact = ctx.rule, log_totals_N.dtype
        grad_hidden_ND = torch.empty_like(hidden_ND)
        grad_weight_VD = None
        grad_bias_V = None if bias_V is None else torch.zeros_like(bias_V, dtype=exact)
        for index, start in enumerate(range(0, len(hidden_ND), ctx.chunk_tokens)):
            part = slice(start, start + ctx.chunk_tokens)
            rows_CD = hidden_ND[part]
            raw_CV = None
            if ctx.keep and rule.softcap is None:
                slope_CV = kept[index].clone() if len(kept) > 1 else kept[index]
            else:
                raw_CV = _logits(rows_CD, weight_VD, bias_V, rule, exact)
                scaled_CV = raw_CV / temperatures_N[part, None]
                slope_CV = scaled_CV.sub_(log_totals_N[part, None]).exp_()
            # d logprob / d logit = (one at the target, minus the probabilities) / temperature
            factor_C = grad_N[part] / temperatures_N[part] * rule.scale
            slope_CV = slope_CV * -factor_C[:, None]
            slope_CV.scatter_add_(-1, targets_N[part, None], factor_C[:, None])
            if rule.softcap is not None:
                assert raw_CV is not None
                slope_CV *= 1 - (raw_CV / rule.softcap).square()
            if grad_bias_V is not None:
                grad_bias_V += slope_CV.sum(0)
            slope_CV = slope_CV.to(weight_VD.dtype)
            grad_hidden_ND[part] = slope_CV @ weight_VD
            if ctx.needs_input_grad[1]:
                grad_weight_VD = _add_product(grad_weight_VD, slope_CV, rows_CD)
        if ctx.needs_input_grad[1]:
            if grad_weight_VD is None:  # no tokens: sharded ranks still reduce a gradient
                grad_weight_VD = torch.zeros_like(weight_VD)
            grad_weight_VD = grad_weight_VD.to(weight_VD.dtype)
        return grad_hidden_ND, grad_weight_VD, grad_bias_V, None, None, None, None


def _logits(
    hidden_CD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    rule: LogitRule,
    exact: torch.dtype,
) -> Tensor:
    """Logits of one chunk in the exact format; always a fresh tensor, free to be changed."""
    logits_CV = torch.nn.functional.linear(hidden_CD, weight_VD, bias_V).to(exact)
    if rule.scale != 1.0:
        logits_CV *= rule.scale
    if rule.softcap is not None:
        logits_CV = rule.softcap * torch.tanh(logits_CV / rule.softcap)
    return logits_CV


def _add_product(total_VD: Tensor | None, slope_CV: Tensor, rows_CD: Tensor) -> Tensor:
    """total + slope^T rows, summed in float32 where the operands are shorter."""
    left_VC = slope_CV.t()
    if slope_CV.is_cuda and slope_CV.dtype in (torch.bfloat16, torch.float16):
        if total_VD is None:
            return torch.mm(left_VC, rows_CD, out_dtype=torch.float32)
        return torch.addmm(total_VD, left_VC, rows_CD, out_dtype=torch.float32)
    if total_VD is None:
        return left_VC @ rows_CD
    return total_VD.addmm_(left_VC, rows_CD)
