"""Attention over packed sequences: one row of tokens, no padding, no token sees another sequence.

Registered with transformers under the name `penstock_packed`; the forward call carries a
`PackLayout`. Sequences are sorted by length, so sequences of equal length form a block that is viewed
as an ordinary batch. A sequence may continue a context that lies elsewhere in the row and that others
continue too; then the keys and values of each sequence, its context's first, are gathered. On a GPU in
half precision the variable-length flash kernel computes all sequences at once, unless scores are
capped, have sinks, or the heads' sizes do not fit it. Knows no rollouts, no losses.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from penstock.errors import UserError
from penstock.model.attention import AttentionCall, Step, can_use_flash, causal_attention

ATTENTION_NAME = "penstock_packed"


@dataclass(frozen=True, slots=True)
class Block:
    """A run of sequences of equal length, which continue contexts of equal length."""

    count: int
    length: int
    prefix: int = 0  # tokens of the context; 0: none


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """Where the copies of each token's key lie among the gathered keys: order[bounds[t] : bounds[t + 1]]."""

    order_K: Tensor
    bounds_T1: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedKeys:
    """Where the keys of each sequence lie, its context's before its own."""

    index_K: Tensor
    bounds_S1: Tensor  # int32: cumulative numbers of keys
    longest: int
    copies: Copies | None = None  # None: not known


@dataclass(frozen=True, slots=True, kw_only=True)
class PackLayout:
    """Where the sequences of a packed row begin and end."""

    blocks: tuple[Block, ...]
    bounds_S1: Tensor  # int32: cumulative lengths, from 0 to the number of tokens
    longest: int
    shared: SharedKeys | None = None  # None: no sequence has a context
    gather: Callable[[Tensor], Tensor] | None = None  # returns keys or values of other ranks too


def register() -> None:
    """Register the packed attention with transformers; safe to call again."""
    from transformers import AttentionInterface

    # No mask function is registered: transformers then builds no mask (the layout says which token sees
    # which), and does not look at the positions, for which the host would wait.
    AttentionInterface.register(ATTENTION_NAME, packed_attention)


def packed_attention(
    module: torch.nn.Module | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    pack_layout: PackLayout,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **other: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention within each sequence; tensors are [1, heads, tokens, head size].

    There is no dropout: the policy that sampled had none, and `Policy.train` leaves it off.
    """
    assert query.shape[0] == 1
    assert attention_mask is None
    if other.get("position_bias") is not None:
        raise UserError(
            f"model.path: got {type(module).__name__} with position biases, allowed: rotary positions"
        )
    if pack_layout.gather is not None:
        key, value = pack_layout.gather(key), pack_layout.gather(value)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    call = AttentionCall(query, key, value, scale, sliding_window, softcap, s_aux)
    flash = not call.needs_plain and can_use_flash(query, value)
    if flash and (pack_layout.shared is None or flash_aligns_ends(query.device)):
        return _flash_attention(query, key, value, pack_layout, scaling, sliding_window), None
    outputs = [
        causal_attention(replace(call, query=query, key=key, value=value))
        .transpose(1, 2)
        .flatten(0, 1)
        for query, key, value in by_block(query, key, value, pack_layout)
    ]
    joined_THD = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return joined_THD[None], None


class PackedStep(Step):
    """The `Step` of one pass over a packed row; tokens take the experts that an engine took, if they are known."""

    def __init__(self, layout: PackLayout, experts_TLC: Tensor | None = None) -> None:
        """experts_TLC: int16, of each token and layer, number + 1; 0: not known."""
        self.layout, self.experts_TLC = layout, experts_TLC

    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Do nothing: a pass has all its keys and values."""

    def attend(self, layer: int, call: AttentionCall) -> Tensor:
        return packed_attention(
            None,
            call.query,
            call.key,
            call.value,
            None,
            pack_layout=self.layout,
            scaling=call.scale,
            sliding_window=call.window,
            softcap=call.softcap,
            s_aux=call.sinks,
        )[0]

    def choose(self, layer: int, kept_K: Tensor | None, expert_RC: Tensor) -> Tensor:
        if self.experts_TLC is None:
            return expert_RC
        known_RC = self.experts_TLC[:, layer].long()
        if kept_K is not None:
            known_RC = known_RC.index_select(0, kept_K)
        return torch.where(known_RC > 0, known_RC - 1, expert_RC)


def by_block(
    query: Tensor, key: Tensor, value: Tensor, layout: PackLayout
) -> Iterator[tuple[Tensor, ...]]:
    """Yield queries, keys and values of each block, [sequences, heads, tokens, head size]."""
    query_THD, key_THD, value_THD = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    if layout.shared is not None:
        key_THD = gather_rows(key_THD, layout.shared.index_K)
        value_THD = gather_rows(value_THD, layout.shared.index_K)
    query_counts = [block.count * block.length for block in layout.blocks]
    key_counts = [block.count * (block.prefix + block.length) for block in layout.blocks]
    parts = (query_THD.split(query_counts), key_THD.split(key_counts), value_THD.split(key_counts))
    for block, *tensors in zip(layout.blocks, *parts, strict=True):
        yield tuple(tensor.unflatten(0, (block.count, -1)).transpose(1, 2) for tensor in tensors)


@functools.cache
def _varlen_function() -> tuple[Any, frozenset[str]]:
    """torch's variable-length attention and the option names that this version accepts."""
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn, frozenset(inspect.signature(varlen_attn).parameters)


@functools.cache
def flash_aligns_ends(device: torch.device) -> bool:
    """Whether the flash kernel takes fewer queries than keys for the last of a sequence.

    Tried once per device, because torch does not document it.
    """
    with torch.no_grad():
        draw = torch.Generator(device).manual_seed(0)
        query, key, value = (
            torch.randn(1, 2, 7, 64, generator=draw, device=device).bfloat16() for _ in range(3)
        )
        layout = PackLayout(
            blocks=(Block(1, 4), Block(1, 3, 4)),
            bounds_S1=torch.tensor([0, 4, 7], dtype=torch.int32, device=device),
            longest=4,
            shared=SharedKeys(
                index_K=torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6], device=device),
                bounds_S1=torch.tensor([0, 4, 11], dtype=torch.int32, device=device),
                longest=7,
            ),
        )
        actual = _flash_attention(query, key, value, layout, None, None)
        expected = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True
        )
        return bool((actual - expected.transpose(1, 2)).abs().max() < 0.05)


def _flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: PackLayout,
    scaling: float | None,
    sliding_window: int | None,
) -> Tensor:
    """Compute all sequences at once with the variable-length flash kernel."""
    varlen_attn, allowed_options = _varlen_function()
    query_THD, key_THD, value_THD = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    left = -1 if sliding_window is None else sliding_window - 1
    options: dict[str, Any] = {"scale": scaling, "window_size": (left, 0)}
    repeats = query_THD.shape[1] // key_THD.shape[1]
    if "enable_gqa" in allowed_options:
        options["enable_gqa"] = repeats > 1
    elif repeats > 1:
        key_THD = key_THD.repeat_interleave(repeats, dim=1)
        value_THD = value_THD.repeat_interleave(repeats, dim=1)
    keys: PackLayout | SharedKeys = layout
    if layout.shared is not None:
        keys = layout.shared
        key_THD = gather_rows(key_THD, layout.shared.index_K)
        value_THD = gather_rows(value_THD, layout.shared.index_K)
    # With fewer queries than keys the kernel takes the queries for the last of the sequence.
    output_THD: Tensor = varlen_attn(
        query_THD.contiguous(),
        key_THD.contiguous(),
        value_THD.contiguous(),
        layout.bounds_S1,
        keys.bounds_S1,
        layout.longest,
        keys.longest,
        **options,
    )
    return output_THD[None]


def gather_rows(rows_TX: Tensor, index_K: Tensor) -> Tensor:
    """rows[index]; in backward, the gradients of a row's copies are added in float32."""
    gathered: Tensor = _GatherRows.apply(rows_TX, index_K)
    return gathered


class _GatherRows(torch.autograd.Function):
    """`index_select`, whose own backward pass would add in half precision."""

    @staticmethod
    def forward(ctx: Any, rows_TX: Tensor, index_K: Tensor) -> Tensor:
        ctx.save_for_backward(index_K)
        ctx.count = len(rows_TX)
        return rows_TX.index_select(0, index_K)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (index_K,) = ctx.saved_tensors
        (grad_KX,) = grads
        exact = torch.promote_types(grad_KX.dtype, torch.float32)
        total_TX = grad_KX.new_zeros((ctx.count, *grad_KX.shape[1:]), dtype=exact)
        total_TX.index_add_(0, index_K, grad_KX.to(exact))
        return total_TX.to(grad_KX.dtype), None
