"""Attention over packed sequences: one row of tokens, no padding, no token sees another sequence.

Registered with transformers under the name `penstock_packed`; the forward call carries a
`PackLayout`. Sequences are sorted by length, so sequences of equal length form a block that is viewed
as an ordinary batch without a copy. On a GPU in half precision the variable-length flash kernel
computes all sequences at once, unless scores are capped, have sinks, or the heads' sizes do not fit it. Knows no rollouts, no losses.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.errors import UserError
from penstock.models.attention import plain_attention

ATTENTION_NAME = "penstock_packed"


@dataclass(frozen=True, slots=True, kw_only=True)
class PackLayout:
    """Where the sequences of a packed row begin and end."""

    blocks: tuple[tuple[int, int], ...]  # (sequences, length) of each run of equal lengths
    bounds_S1: Tensor  # int32: cumulative lengths, from 0 to the number of tokens
    longest: int


def register() -> None:
    """Register the packed attention with transformers; safe to call again."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    # Layouts differ from pack to pack: a compiled block that traced them would compile again each time.
    AttentionInterface.register(ATTENTION_NAME, torch.compiler.disable(packed_attention))
    AttentionMaskInterface.register(ATTENTION_NAME, _no_mask)


def _no_mask(*_: Any, **__: Any) -> None:
    """Keep transformers from building a mask: the layout says which token sees which."""


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    pack_layout: PackLayout,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **other: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention within each sequence; tensors are [1, heads, tokens, head size]."""
    assert query.shape[0] == 1
    assert attention_mask is None
    if other.get("position_bias") is not None:
        raise UserError(
            f"model.path: got {type(module).__name__} with position biases, allowed: rotary positions"
        )
    fused = softcap is None and s_aux is None
    half = query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)
    if half and fused and dropout == 0.0 and fits_flash(query.shape[-1], value.shape[-1]):
        return _flash_attention(query, key, value, pack_layout, scaling, sliding_window), None
    sizes = [count * length for count, length in pack_layout.blocks]
    parts = (tensor[0].transpose(0, 1).split(sizes) for tensor in (query, key, value))
    outputs = []
    for (count, length), *block in zip(pack_layout.blocks, *parts, strict=True):
        query_BHLD, key_BHLD, value_BHLD = (
            tensor.unflatten(0, (count, length)).transpose(1, 2) for tensor in block
        )
        if fused:
            output_BHLD = _equal_length_attention(
                query_BHLD, key_BHLD, value_BHLD, scaling, dropout, sliding_window
            )
        else:
            output_BHLD = plain_attention(
                query_BHLD,
                key_BHLD,
                value_BHLD,
                _window_mask(length, sliding_window or length, query.device),
                scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
                softcap=softcap,
                sink_H=s_aux,
            )
        outputs.append(output_BHLD.transpose(1, 2).flatten(0, 1))
    joined_THD = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return joined_THD[None], None


def fits_flash(key_size: int, value_size: int) -> bool:
    """Whether the flash kernel computes heads of these sizes; those of latent attention differ."""
    return key_size == value_size and key_size % 8 == 0 and key_size <= 256


def _equal_length_attention(
    query_BHLD: Tensor,
    key_BHLD: Tensor,
    value_BHLD: Tensor,
    scaling: float | None,
    dropout: float,
    sliding_window: int | None,
) -> Tensor:
    """Compute causal attention for a batch of sequences of one length."""
    length = query_BHLD.shape[2]
    mask = None
    if sliding_window is not None and length > sliding_window:
        mask = _window_mask(length, sliding_window, query_BHLD.device)
    return torch.nn.functional.scaled_dot_product_attention(
        query_BHLD,
        key_BHLD,
        value_BHLD,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=query_BHLD.shape[1] != key_BHLD.shape[1],
    )


def _window_mask(length: int, window: int, device: torch.device) -> Tensor:
    """Return a mask that is True at a token itself and at the window - 1 tokens before it."""
    index = torch.arange(length, device=device)
    distance = index[:, None] - index[None, :]
    return (distance >= 0) & (distance < window)


@functools.cache
def _varlen_function() -> tuple[Any, frozenset[str]]:
    """Return torch's variable-length attention and the option names that this version accepts."""
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn, frozenset(inspect.signature(varlen_attn).parameters)


def _flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: PackLayout,
    scaling: float | None,
    sliding_window: int | None,
) -> Tensor:
    """Compute all sequences at once with the variable-length flash kernel."""
    varlen_attn, known = _varlen_function()
    query_THD, key_THD, value_THD = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    left = -1 if sliding_window is None else sliding_window - 1
    options: dict[str, Any] = {"scale": scaling, "window_size": (left, 0)}
    repeats = query_THD.shape[1] // key_THD.shape[1]
    if "enable_gqa" in known:
        options["enable_gqa"] = repeats > 1
    elif repeats > 1:
        key_THD = key_THD.repeat_interleave(repeats, dim=1)
        value_THD = value_THD.repeat_interleave(repeats, dim=1)
    output_THD: Tensor = varlen_attn(
        query_THD.contiguous(),
        key_THD.contiguous(),
        value_THD.contiguous(),
        layout.bounds_S1,
        layout.bounds_S1,
        layout.longest,
        layout.longest,
        **options,
    )
    return output_THD[None]
