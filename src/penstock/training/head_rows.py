"""The arithmetic between the matrix products of the output head on a CPU, a few rows at a time.

Rows of logits stay in the CPU's cache until their log-probs, entropies and gradients are known, and the
gradient replaces them. `logprobs.py` computes the same over whole tables (`chunk_logprobs`), and tests
compare the two. Knows no ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.model.exponentials import exp_into

BLOCK_ELEMENTS = 1 << 20  # logits of the rows that are worked on at a time
NO_CHANCE = -1e30  # a logit whose probability is 0; finite, so that 0 x its log is 0 in the entropy


def chunk_logprobs_(
    raw_CV: Tensor,
    targets_C: Tensor,
    temperatures_C: Tensor,
    scale: float,
    softcap: float | None,
    banned: tuple[Tensor, Tensor] | None,
    gradient: bool,
    axis: None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute `chunk_logprobs` of `logprobs.py` for rows that no ranks share; overwrite the raw logits.

    With `gradient` they are replaced by it.
    """
    assert axis is None
    count, vocabulary = raw_CV.shape
    logprob_C, entropy_C = raw_CV.new_empty(count), raw_CV.new_empty(count)
    block = max(1, BLOCK_ELEMENTS // vocabulary)
    scratch_BV = raw_CV.new_empty(min(block, count), vocabulary)
    warm = not bool((temperatures_C == 1).all())
    for start in range(0, count, block):
        part = slice(start, start + block)
        rows_BV, slope_BV = raw_CV[part], None
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
        torch.sub(rows_BV, rows_BV.amax(-1, keepdim=True), out=shifted_BV)
        target_B1 = targets_C[part, None]
        chosen_B = shifted_BV.gather(-1, target_B1)[:, 0]
        weight_BV = exp_into(shifted_BV, rows_BV)  # the costliest operation: once per logit
        total_B = weight_BV.sum(-1)
        log_total_B = total_B.log()
        logprob_C[part] = chosen_B - log_total_B
        entropy_C[part] = log_total_B - shifted_BV.mul_(weight_BV).sum(-1) / total_B
        if gradient:
            weight_BV.mul_(-1 / total_B[:, None])
            weight_BV.scatter_add_(-1, target_B1, torch.ones_like(chosen_B)[:, None])
            if slope_BV is not None:
                weight_BV.mul_(slope_BV)
    return logprob_C, entropy_C, raw_CV if gradient else None
