"""Log-probs and entropies of chosen tokens from hidden states, without holding all logits.

The vocabulary is the largest axis of a language model, so the output head runs over chunks of tokens.
The gradient of a token's log-prob with respect to its logits needs nothing that comes later: the forward
pass computes it beside the log-probs and keeps it if it fits; the backward pass only scales the hidden
states and the result of its two matrix products. Otherwise each chunk's logits are computed again in
backward. `chunk_logprobs_` does the arithmetic around the products, on a GPU a kernel (`head_kernels.py`) where
no ranks share a row and no tokens were cut. If each tensor rank has a slice of the vocabulary, no rank holds a
whole row of logits: maxima and sums are taken over the ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from penstock.model.families import Family
from penstock.model.sampling import exp_into
from penstock.training.pack import Kept
from penstock.training.parallel.collectives import all_max, all_sum
from penstock.training.parallel.ranks import Axis

KEEP_ELEMENTS_CPU = 1 << 27  # gradients of logits up to this many are kept for the backward pass
KEEP_SHARE_GPU = 0.04  # of the device's memory
CHUNK_ELEMENTS_CPU = 1 << 23
CHUNK_ELEMENTS_GPU = 1 << 28
BLOCK_ELEMENTS = 1 << 20  # logits of the rows that are worked on at a time on a CPU
NO_CHANCE = -1e30  # a logit whose probability is 0; finite, so that 0 x its log is 0 in the entropy


@dataclass(frozen=True, slots=True)
class LogitRule:
    """The scaling and capping that some models apply to their logits."""

    scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def of(cls, model: Any, family: Family | None) -> LogitRule:
        """The rule of a model: its family's, or read from its config, which has several names for it."""
        if family is not None:
            return cls(scale=family.logit_scale, softcap=family.logit_cap)
        config = model.config.get_text_config()
        scale = getattr(config, "logit_scale", None) or getattr(config, "lm_head_multiplier", None)
        divisor = getattr(config, "logits_scaling", None) or getattr(
            config, "logits_mup_width_multiplier", None
        )
        caps = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
        softcap = next((cap for name in caps if (cap := getattr(config, name, None))), None)
        return cls(scale=(scale or 1.0) / (divisor or 1.0), softcap=softcap)


PLAIN_LOGITS = LogitRule()
# Adds left^T right to the gradient of the weight's master.
AddProduct = Callable[[Tensor, Tensor], None]
# The product of some hidden states with the head, and the log-probs of their targets with the engine's bits.
ExactScores = Callable[[Tensor, slice], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularySlice:
    """This rank's slice of the head, where the ranks of an axis have one each."""

    first: int  # id of its first token
    largest: int  # rows of the largest slice; all ranks must agree on the chunks
    axis: Axis


def token_logprobs(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    targets_N: Tensor,
    temperatures_N: Tensor,
    rule: LogitRule = PLAIN_LOGITS,
    chunk_tokens: int | None = None,
    banned: tuple[Tensor, Sequence[int]] | None = None,
    kept: Kept | None = None,
    share: VocabularySlice | None = None,
    add_to: AddProduct | None = None,
    exact: ExactScores | None = None,
) -> tuple[Tensor, Tensor]:
    """(log-prob of each target, entropy of each distribution) at the tokens' temperatures.

    `banned` holds a flag for each token, and ids that have no probability where the flag is set; `kept` the only
    ids that have one. With
    a `share`, `weight_VD` and `bias_V` are this rank's slice, and hidden states are equal on all ranks.
    Entropies are for metrics and carry no gradient. With `add_to`, the weight itself gets no gradient.
    """
    first, largest = (0, len(weight_VD)) if share is None else (share.first, share.largest)
    if chunk_tokens is None:
        budget = CHUNK_ELEMENTS_GPU if hidden_ND.is_cuda else CHUNK_ELEMENTS_CPU
        chunk_tokens = max(1, budget // largest)
        if (
            hidden_ND.is_cuda and chunk_tokens > 64
        ):  # aligned: a kernel is compiled for its alignment
            chunk_tokens -= chunk_tokens % 64
    result: tuple[Tensor, Tensor] = _TokenLogprobs.apply(
        hidden_ND,
        weight_VD,
        bias_V,
        targets_N - first if first else targets_N,
        temperatures_N,
        rule,
        chunk_tokens,
        banned_here(banned, weight_VD, first),
        None if kept is None else Kept(kept.bounds_N1, kept.ids_M - first),
        None if share is None else share.axis,
        add_to,
        exact,
    )
    return result


def banned_here(
    banned: tuple[Tensor, Sequence[int]] | None, weight_VD: Tensor, first: int
) -> tuple[Tensor, Tensor] | None:
    """The flags of the tokens, and the banned columns of the vocabulary (of this rank's slice)."""
    if banned is None:
        return None
    columns = tuple(token - first for token in banned[1] if 0 <= token - first < len(weight_VD))
    return banned[0], _on_device(columns, weight_VD.device)


@functools.lru_cache(maxsize=16)
def _on_device(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """A tensor of the numbers. Kept: to copy it, the host waits for all work of the GPU."""
    return torch.tensor(numbers, dtype=torch.int64, device=device)


class _TokenLogprobs(torch.autograd.Function):
    """Keep the gradient of the logits in forward if it fits, else compute it again in backward."""

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
        kept: Kept | None,
        axis: Axis | None,
        add_to: AddProduct | None,
        exact_scores: ExactScores | None,
    ) -> tuple[Tensor, Tensor]:
        count, vocabulary = len(hidden_ND), weight_VD.shape[0]
        exact = torch.promote_types(hidden_ND.dtype, torch.float32)
        logprobs_N = torch.empty(count, dtype=exact, device=hidden_ND.device)
        entropies_N = torch.empty_like(logprobs_N)
        keep = any(ctx.needs_input_grad[:3]) and axis is None and _fits(hidden_ND, vocabulary)
        score_chunk = _chunk_function(hidden_ND, axis, kept)
        if keep:
            chunk_tokens = max(count, 1)  # in place: one chunk needs no more memory than many
        gradients: list[Tensor] = []
        for start in range(0, count, chunk_tokens):
            part = slice(start, start + chunk_tokens)
            if exact_scores is None:
                raw_CV, exact_C = linear(hidden_ND[part], weight_VD, bias_V), None
            else:
                raw_CV, exact_C = exact_scores(hidden_ND[part], part)
            logprobs_N[part], entropies_N[part], gradient_CV = score_chunk(
                raw_CV,
                targets_N[part],
                temperatures_N[part],
                rule.scale,
                rule.softcap,
                _part(banned, part),
                keep,
                axis,
                **_kept_part(kept, part),
            )
            if exact_C is not None:
                logprobs_N[part] = exact_C
            if gradient_CV is not None:
                gradients.append(gradient_CV)
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, targets_N, temperatures_N, *gradients)
        ctx.rule, ctx.chunk_tokens, ctx.banned, ctx.axis = rule, chunk_tokens, banned, axis
        ctx.add_to, ctx.kept = add_to, kept
        ctx.mark_non_differentiable(entropies_N)
        return logprobs_N, entropies_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_VD, bias_V, targets_N, temperatures_N, *gradients = ctx.saved_tensors
        factor_N = grads[0] / temperatures_N * ctx.rule.scale
        grad_hidden_ND = torch.empty_like(hidden_ND)
        grad_weight_VD: Tensor | None = None
        grad_bias_V = None if bias_V is None else torch.zeros_like(bias_V)
        count, chunk = len(hidden_ND), ctx.chunk_tokens
        score_chunk = _chunk_function(hidden_ND, ctx.axis, ctx.kept)
        for index, start in enumerate(range(0, count, chunk)):
            part = slice(start, start + chunk)
            factor_C1 = factor_N[part, None]
            if gradients:
                gradient_CV = gradients[index]
            else:
                _, _, gradient_CV = score_chunk(
                    linear(hidden_ND[part], weight_VD, bias_V),
                    targets_N[part],
                    temperatures_N[part],
                    ctx.rule.scale,
                    ctx.rule.softcap,
                    _part(ctx.banned, part),
                    True,
                    ctx.axis,
                    **_kept_part(ctx.kept, part),
                )
            grad_hidden_ND[part] = (gradient_CV @ weight_VD) * factor_C1
            if grad_bias_V is not None:
                grad_bias_V += (factor_C1.to(gradient_CV.dtype).t() @ gradient_CV)[0]
            if ctx.needs_input_grad[1]:
                scaled_CD = (hidden_ND[part] * factor_C1).to(hidden_ND.dtype)
                if ctx.add_to is not None:
                    ctx.add_to(gradient_CV, scaled_CD)
                    continue
                grad_weight_VD = _add_product(
                    grad_weight_VD, gradient_CV, scaled_CD, last=start + chunk >= count
                )
        if ctx.needs_input_grad[1] and ctx.add_to is None:
            if grad_weight_VD is None:  # no tokens: sharded ranks still reduce a gradient
                grad_weight_VD = torch.zeros_like(weight_VD)
            grad_weight_VD = grad_weight_VD.to(weight_VD.dtype)
        if ctx.axis is not None:
            grad_hidden_ND = all_sum(grad_hidden_ND, ctx.axis)
        return grad_hidden_ND, grad_weight_VD, grad_bias_V, *(None,) * 9


def warm_up(
    weight_VD: Tensor, bias_V: Tensor | None, rule: LogitRule, banned: Sequence[int] | None
) -> None:
    """Compile what the first update needs, in seconds in which the trainer waits for responses anyway.

    `banned` are the tokens that some responses were sampled without; None: there are none.
    """
    count = 16
    device, exact = weight_VD.device, torch.promote_types(weight_VD.dtype, torch.float32)
    hidden_ND = weight_VD.new_zeros(count, weight_VD.shape[1], requires_grad=True)
    targets_N = torch.zeros(count, dtype=torch.int64, device=device)
    temperatures_N = torch.ones(count, dtype=exact, device=device)
    early_N = torch.zeros(count, dtype=torch.bool, device=device)
    logprobs_N, _ = token_logprobs(
        hidden_ND,
        weight_VD.detach(),
        None if bias_V is None else bias_V.detach(),
        targets_N,
        temperatures_N,
        rule,
        banned=None if banned is None else (early_N, banned),
    )
    logprobs_N.sum().backward()


def _chunk_function(
    hidden_ND: Tensor, axis: Axis | None, kept: Kept | None
) -> Callable[..., tuple[Tensor, Tensor, Tensor | None]]:
    """How a chunk's logits become log-probs: by the kernel where it can."""
    if axis is not None or kept is not None or not hidden_ND.is_cuda:
        return chunk_logprobs_
    if hidden_ND.dtype == torch.float64:
        return chunk_logprobs_
    from penstock.model.kernels import head_kernels

    return head_kernels.chunk_logprobs_


def _fits(hidden_ND: Tensor, vocabulary: int) -> bool:
    """Whether the gradient of all logits may be kept."""
    elements = len(hidden_ND) * vocabulary
    if not hidden_ND.is_cuda:
        return elements <= KEEP_ELEMENTS_CPU
    memory = torch.cuda.get_device_properties(hidden_ND.device).total_memory
    return elements * hidden_ND.element_size() <= KEEP_SHARE_GPU * memory


def _part(banned: tuple[Tensor, Tensor] | None, part: slice) -> tuple[Tensor, Tensor] | None:
    return None if banned is None else (banned[0][part], banned[1])


def _kept_part(kept: Kept | None, part: slice) -> dict[str, Kept]:
    if kept is None:
        return {}
    count = len(kept.bounds_N1) - 1
    return {"kept": kept[min(part.start, count) : min(part.stop, count)]}


def _add_product(
    total_VD: Tensor | None, gradient_CV: Tensor, hidden_CD: Tensor, *, last: bool
) -> Tensor:
    """Total + gradient^T hidden, summed in float32 if the operands are shorter."""
    left_VC = gradient_CV.t()
    if total_VD is None and last:
        return left_VC @ hidden_CD
    if gradient_CV.is_cuda and gradient_CV.dtype in (torch.bfloat16, torch.float16):
        product_VD = torch.mm(left_VC, hidden_CD, out_dtype=torch.float32)
        return product_VD if total_VD is None else total_VD.add_(product_VD)
    if total_VD is None:
        return left_VC @ hidden_CD
    return total_VD.addmm_(left_VC, hidden_CD)


def chunk_logprobs_(
    raw_CV: Tensor,
    targets_C: Tensor,
    temperatures_C: Tensor,
    scale: float,
    softcap: float | None,
    banned: tuple[Tensor, Tensor] | None,
    gradient: bool,
    axis: Axis | None,
    kept: Kept | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(log-probs, entropies, gradient or None) of one chunk; with an axis, over its ranks.

    The gradient is that of each token's log-prob with respect to its logits, before the factors of
    temperature and scale: one at the target, minus the probabilities. It replaces the raw logits, which are
    overwritten in any case. A few rows at a time stay in a CPU's cache until all is known of them.
    """
    count, vocabulary = raw_CV.shape
    exact = torch.promote_types(raw_CV.dtype, torch.float32)
    logprob_C, entropy_C = raw_CV.new_empty(2, count, dtype=exact)
    elements = BLOCK_ELEMENTS if raw_CV.is_cpu else CHUNK_ELEMENTS_GPU
    # the ranks' slices differ in size: they agree on chunks alone
    block = max(1, elements // vocabulary if axis is None else count)
    scratch_BV = raw_CV.new_empty(min(block, count), vocabulary, dtype=exact)
    warm = not (raw_CV.is_cpu and bool((temperatures_C == 1).all()))
    for start in range(0, count, block):
        part = slice(start, start + block)
        rows_BV, slope_BV = raw_CV[part].to(exact), None
        shifted_BV = scratch_BV[: len(rows_BV)]
        if scale != 1.0:
            rows_BV.mul_(scale)
        if softcap is not None:
            tanh_BV = rows_BV.div_(softcap).tanh_()
            slope_BV = 1 - tanh_BV.square() if gradient else None
            rows_BV.mul_(softcap)
        if warm:
            rows_BV.div_(temperatures_C[part, None])
        if banned is not None:
            rows_BV[banned[0][part].nonzero(), banned[1]] = NO_CHANCE
        if kept is not None:
            rows_BV.masked_fill_(kept[start : start + len(rows_BV)].dropped(vocabulary), NO_CHANCE)
        peak_B1 = rows_BV.amax(-1, keepdim=True)
        peak_B1 = peak_B1 if axis is None else all_max(peak_B1, axis)
        torch.sub(rows_BV, peak_B1, out=shifted_BV)
        target_B1 = targets_C[part, None]
        one_B1 = torch.ones_like(target_B1, dtype=exact)
        if axis is not None:  # other ranks' targets have no column here
            own_B1 = (target_B1 >= 0) & (target_B1 < vocabulary)
            target_B1, one_B1 = target_B1 * own_B1, one_B1 * own_B1
        chosen_B = shifted_BV.gather(-1, target_B1).masked_fill(one_B1 == 0, 0)[:, 0]
        weight_BV = exp_into(shifted_BV, rows_BV)  # the costliest operation: once per logit
        sums = weight_BV.sum(-1), shifted_BV.mul_(weight_BV).sum(-1), chosen_B
        total_B, weighted_B, chosen_B = sums if axis is None else all_sum(torch.stack(sums), axis)
        log_total_B = total_B.log()
        logprob_C[part] = chosen_B - log_total_B
        entropy_C[part] = log_total_B - weighted_B / total_B
        if gradient:
            weight_BV.mul_(-1 / total_B[:, None])
            weight_BV.scatter_add_(-1, target_B1, one_B1)
            if slope_BV is not None:
                weight_BV.mul_(slope_BV)
            if exact != raw_CV.dtype:
                raw_CV[part] = weight_BV
    return logprob_C, entropy_C, raw_CV if gradient else None
