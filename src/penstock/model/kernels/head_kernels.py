# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""A Triton kernel for the arithmetic between the matrix products of the output head.

One program per token reads its row of raw logits, and replaces the row by the gradient if that is wanted.
`logprobs.py` computes the same in plain torch (`chunk_logprobs_`), and tests compare the two. Imported only if
the model is on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_WARPS = 8
_LANES = 256 * _WARPS  # 8 logits for each thread
_STEPS = 4  # lanes' logits that are loaded at once


@triton.jit
def _tanh(x):
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def _logits(
    Row, Banned, column, scale, softcap, coldness, early, VOCABULARY,
    CAPPED: tl.constexpr, BANS: tl.constexpr,
):  # fmt: skip
    # (logits that are sampled from, capped logits before the temperature)
    inside = column < VOCABULARY
    logit = tl.load(Row + column, mask=inside, other=0.0).to(tl.float32) * scale
    if CAPPED:
        logit = softcap * _tanh(logit / softcap)
    sampled = tl.where(inside, logit * coldness, -1e30)
    for ban in tl.static_range(
        BANS
    ):  # few: flags of all columns would be laid out anew in each block
        hit = (column == tl.load(Banned + ban).to(tl.int32)) & early
        sampled = tl.where(hit, -1e30, sampled)
    return sampled, logit


@triton.jit
def _score(
    Raw, Target, Temperature, Early, Banned, Logprob, Entropy, row_stride, scale, softcap, VOCABULARY,
    CAPPED: tl.constexpr, BANS: tl.constexpr, GRADIENT: tl.constexpr, LANES: tl.constexpr,
    STEPS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    start = Raw + row * row_stride
    coldness = 1.0 / tl.load(Temperature + row).to(tl.float32)
    target = tl.load(Target + row)
    # Loaded before the reductions, in which all threads wait for each other: the row is overwritten below.
    chosen = tl.load(start + target).to(tl.float32) * scale
    early = tl.full((), 0, tl.int1)
    if BANS:
        early = tl.load(Early + row).to(tl.int1)
    # A thread's steps lie in its own registers, so that maxima and sums over steps need no other thread.
    at = tl.arange(0, STEPS)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    peak = tl.full((LANES,), -1e30, tl.float32)  # of each lane; finite, so that 0 x it is 0
    total = tl.zeros((LANES,), tl.float32)  # of exp(logit - peak)
    mean = tl.zeros((LANES,), tl.float32)  # of exp(logit - peak) x (logit - peak)
    for first in range(0, VOCABULARY, STEPS * LANES):
        logit, _ = _logits(
            start, Banned, first + at, scale, softcap, coldness, early, VOCABULARY, CAPPED, BANS
        )
        higher = tl.maximum(peak, tl.max(logit, 0))
        shrink, shifted = tl.exp(peak - higher), logit - higher[None, :]
        weight = tl.exp(shifted)
        mean = shrink * (mean + (peak - higher) * total) + tl.sum(weight * shifted, 0)
        total = shrink * total + tl.sum(weight, 0)
        peak = higher
    top = tl.max(peak, 0)
    shrink = tl.exp(peak - top)
    mean_all = tl.sum(shrink * (mean + (peak - top) * total), 0)
    total_all = tl.sum(shrink * total, 0)
    log_total = top + tl.log(total_all)
    if CAPPED:
        chosen = softcap * _tanh(chosen / softcap)
    tl.store(Logprob + row, chosen * coldness - log_total)
    tl.store(Entropy + row, tl.log(total_all) - mean_all / total_all)
    if GRADIENT:
        blocks = tl.cdiv(VOCABULARY, STEPS * LANES)
        for number in range(0, blocks):  # from the end, which the cache still holds
            column = (blocks - 1 - number) * (STEPS * LANES) + at
            logit, capped = _logits(
                start, Banned, column, scale, softcap, coldness, early, VOCABULARY, CAPPED, BANS
            )
            gradient = tl.where(column == target, 1.0, 0.0) - tl.exp(logit - log_total)
            if CAPPED:
                gradient = gradient * (1.0 - (capped / softcap) * (capped / softcap))
            tl.store(start + column, gradient.to(Raw.dtype.element_ty), mask=column < VOCABULARY)


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
    """Compute `chunk_logprobs_` of `logprobs.py` for rows that no ranks share.

    With `gradient`, the raw logits are replaced by it.
    """
    rows, vocabulary = raw_CV.shape
    assert raw_CV.stride(1) == 1
    assert axis is None
    logprob_C = torch.empty(rows, dtype=torch.float32, device=raw_CV.device)
    entropy_C = torch.empty_like(logprob_C)
    early_C, columns = (targets_C, targets_C[:0]) if banned is None else banned
    kernel: Any = _score
    if rows:
        kernel[(rows,)](
            raw_CV, targets_C, temperatures_C, early_C, columns, logprob_C, entropy_C,
            raw_CV.stride(0), scale, softcap or 1.0, vocabulary, CAPPED=softcap is not None,
            BANS=len(columns), GRADIENT=gradient, LANES=_LANES, STEPS=_STEPS,
            num_warps=_WARPS,
        )  # fmt: skip
    return logprob_C, entropy_C, raw_CV if gradient else None
