"""Attention and sampling of a decode step in plain torch: the specification of the kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from penstock.model.attention import plain_attention
from penstock.model.sampling import uniforms


def decode_attention(
    query_BHD: torch.Tensor,
    keys_TGD: torch.Tensor,
    values_TGD: torch.Tensor,
    start_B: torch.Tensor,
    length_B: torch.Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sink_H: torch.Tensor | None = None,
    programs: int = 0,
) -> torch.Tensor:
    """Attend from each row to the `length` tokens of its region at `start`; return [B, H, D]."""
    longest = int(length_B.max())
    column_L = torch.arange(longest, device=query_BHD.device)
    seen_BL = column_L[None, :] < length_B[:, None]
    if window is not None:
        seen_BL &= column_L[None, :] >= length_B[:, None] - window
    index_BL = torch.where(column_L[None, :] < length_B[:, None], start_B[:, None] + column_L, 0)
    key_BGLD = keys_TGD[index_BL].transpose(1, 2).float()
    value_BGLD = values_TGD[index_BL].transpose(1, 2).float()
    output_BHD = plain_attention(
        query_BHD.float()[:, :, None],
        key_BGLD,
        value_BGLD,
        seen_BL[:, None, None, :],
        scale=scale,
        softcap=softcap,
        sink_H=sink_H,
    )[:, :, 0]
    return output_BHD.to(query_BHD.dtype)


def store_rows(
    key: torch.Tensor,
    value: torch.Tensor,
    keys_TGD: torch.Tensor,
    values_TGD: torch.Tensor,
    target_S: torch.Tensor,
    source_S: torch.Tensor | None = None,
) -> None:
    """Store row `source_S[i]` of the new keys and values, [1, kv heads, rows, size], at token `target_S[i]`.

    Without `source_S` it is row i.
    """
    for pool_TGD, new in ((keys_TGD, key), (values_TGD, value)):
        rows_RGD = new[0].transpose(0, 1)
        pool_TGD.index_copy_(0, target_S, rows_RGD if source_S is None else rows_RGD[source_S])


def next_rows(
    logits_BV: torch.Tensor, slot_B: torch.Tensor, state: Any, by: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Advance the slots by `by` tokens; return the key, index and temperature of each row.

    The logits of a row's stop tokens become -inf while its response is shorter than `min_index`. The
    last slot is padding and does not advance.
    """
    index_B = state.index[slot_B] + by
    step_B = torch.where(slot_B < len(state.index) - 1, by, 0)
    stop_BS = state.stops[slot_B]
    banned_BS = (stop_BS >= 0) & (index_B < state.min_index[slot_B])[:, None]
    row_B = torch.arange(len(slot_B), device=slot_B.device)
    logits_BV[row_B[:, None].expand_as(stop_BS)[banned_BS], stop_BS[banned_BS]] = -torch.inf
    state.index.index_add_(0, slot_B, step_B)
    state.position.index_add_(0, slot_B, step_B)
    return state.key[slot_B], index_B, state.temperature[slot_B]


def sample_rows(
    logits_BV: torch.Tensor,
    key_B: torch.Tensor,
    index_B: torch.Tensor,
    temperature_B: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token and log-prob of each row; temperature 0: the likeliest token, log-prob at 1."""
    greedy_B = temperature_B == 0
    scaled_BV = logits_BV.float() / torch.where(greedy_B, 1.0, temperature_B)[:, None]
    logprobs_BV = scaled_BV.log_softmax(dim=-1)
    ends_BV = logprobs_BV.double().exp().cumsum(dim=-1)
    uniform_B = uniforms(key_B.cpu().numpy().view(np.uint64), index_B.cpu().numpy())
    target_B = torch.from_numpy(uniform_B).to(ends_BV) * ends_BV[:, -1]
    token_B = (ends_BV <= target_B[:, None]).sum(dim=-1).clamp_max(logits_BV.shape[1] - 1)
    token_B = torch.where(greedy_B, logprobs_BV.argmax(dim=-1), token_B)
    return token_B, logprobs_BV.gather(1, token_B[:, None])[:, 0]
