"""Sampling over a batch of rows with a parameter per row, and the log-prob of what was chosen.

Pure tensor functions. Every row is computed on its own: neighbours never change its bits. One uniform
number per row picks the token by inverse CDF, so no [rows, vocabulary] noise is drawn.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_BLOCK = 256  # columns summed before the search goes inside one block


@dataclass(slots=True, frozen=True, kw_only=True)
class RowSampling:
    """How each row is sampled; all tensors have the length of the rows."""

    uniform_N: torch.Tensor  # float32 in [0, 1)
    temperature_N: torch.Tensor  # float32; 1 where greedy
    greedy_N: torch.Tensor | None  # bool; None: no row is greedy
    top_k_N: torch.Tensor | None  # int64, 0 is off; None: off everywhere
    top_p_N: torch.Tensor | None  # float32; None: 1 everywhere
    banned: tuple[torch.Tensor, torch.Tensor] | None = None  # (row, token) pairs that may not come


def sample(logits_NV: torch.Tensor, how: RowSampling) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens int64 [N] and their float32 log-probs under the distribution they came from."""
    scaled_NV = logits_NV.float() / how.temperature_N[:, None]
    if how.banned is not None:
        scaled_NV[how.banned] = -torch.inf
    if how.top_k_N is not None or how.top_p_N is not None:
        scaled_NV = keep_likely(scaled_NV, how.top_k_N, how.top_p_N)
    logprobs_NV = torch.log_softmax(scaled_NV, dim=-1)
    token_N = pick(logprobs_NV.exp(), how.uniform_N)
    if how.greedy_N is not None:
        token_N = torch.where(how.greedy_N, logprobs_NV.argmax(dim=-1), token_N)
    return token_N, logprobs_NV.gather(1, token_N[:, None])[:, 0]


def pick(probs_NV: torch.Tensor, uniform_N: torch.Tensor) -> torch.Tensor:
    """Inverse CDF: the token whose slice of the row's total holds the uniform number."""
    rows, vocabulary = probs_NV.shape
    if vocabulary <= 2 * _BLOCK:
        return _search(probs_NV.cumsum(dim=-1), uniform_N, None)
    padding = -vocabulary % _BLOCK
    if padding:
        probs_NV = torch.nn.functional.pad(probs_NV, (0, padding))
    blocks_NCB = probs_NV.view(rows, -1, _BLOCK)
    ends_NC = blocks_NCB.sum(dim=-1).cumsum(dim=-1)
    block_N = _search(ends_NC, uniform_N, None)
    row_N = torch.arange(rows, device=probs_NV.device)
    start_N = torch.where(block_N > 0, ends_NC[row_N, (block_N - 1).clamp_min(0)], 0.0)
    target_N = uniform_N * ends_NC[:, -1] - start_N
    inside_NB = blocks_NCB[row_N, block_N].cumsum(dim=-1)
    return block_N * _BLOCK + _search(inside_NB, uniform_N, target_N)


def _search(
    ends_NC: torch.Tensor, uniform_N: torch.Tensor, target_N: torch.Tensor | None
) -> torch.Tensor:
    """Index of the first end above the target; rounding never leads past the last positive cell."""
    if target_N is None:
        target_N = uniform_N * ends_NC[:, -1]
    last_N = (ends_NC < ends_NC[:, -1:]).sum(dim=-1)  # the cell where the total is reached
    return torch.minimum((ends_NC <= target_N[:, None]).sum(dim=-1), last_N)


def keep_likely(
    scaled_NV: torch.Tensor, top_k_N: torch.Tensor | None, top_p_N: torch.Tensor | None
) -> torch.Tensor:
    """Minus infinity outside the top k, then outside the smallest set that holds top_p."""
    sorted_NV, order_NV = scaled_NV.sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(scaled_NV.shape[-1], device=scaled_NV.device)
    if top_k_N is not None:
        limit_N = torch.where(top_k_N > 0, top_k_N, scaled_NV.shape[-1])
        sorted_NV = sorted_NV.masked_fill(rank_V[None, :] >= limit_N[:, None], -torch.inf)
    if top_p_N is not None:
        probs_NV = sorted_NV.softmax(dim=-1)
        before_NV = probs_NV.cumsum(dim=-1) - probs_NV
        outside_NV = (before_NV >= top_p_N[:, None]) & (top_p_N < 1)[:, None]
        outside_NV[:, 0] = False
        sorted_NV = sorted_NV.masked_fill(outside_NV, -torch.inf)
    return torch.empty_like(sorted_NV).scatter_(1, order_NV, sorted_NV)
