"""The flash kernel's two functions in plain torch, so that what surrounds them can be tested without a GPU."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from penstock.model import attention
from penstock.model.kernels import train_ops


def use_plain_flash(monkeypatch: Any) -> None:
    """Let the trainer's attention run as on a GPU, with these functions."""
    monkeypatch.setattr(attention, "flash_attention", flash_attention)
    monkeypatch.setattr(attention, "flash_gradients", flash_gradients)
    monkeypatch.setattr(train_ops, "can_use_flash", lambda *_: True)
    monkeypatch.setattr(train_ops, "flash_aligns_ends", lambda _: True)


def _scores(query: Tensor, key: Tensor, scale: float, window: int | None) -> Tensor:
    """The scores [heads, queries, keys] of one sequence; the queries are its last tokens."""
    repeats = query.shape[1] // key.shape[1]
    scores = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(repeats, 1)) * scale
    own, seen = (torch.arange(len(rows), device=query.device) for rows in (query, key))
    gap = own[:, None] + len(key) - len(query) - seen
    return scores.masked_fill((gap < 0) | (gap >= (window or len(key))), -torch.inf)


def _sequences(queries: Any, keys: Any) -> Any:
    pairs = [itertools.pairwise(bounds.tolist()) for bounds, _ in (queries, keys)]
    for own, seen in zip(*pairs, strict=True):
        yield slice(*own), slice(*seen)


def flash_attention(query, key, value, queries, keys, *, scale, window=None) -> tuple[Tensor, ...]:
    output, sums = torch.empty_like(query), query.new_empty(query.shape[1], len(query)).float()
    query, key, value = query.float(), key.float(), value.float()
    repeats = query.shape[1] // key.shape[1]
    for rows, seen in _sequences(queries, keys):
        scores = _scores(query[rows], key[seen], scale, window)
        sums[:, rows] = scores.logsumexp(-1)
        wide = value[seen].repeat_interleave(repeats, 1)
        output[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), wide)
    return output, sums, sums.new_zeros(2), sums.new_zeros(1)


def flash_gradients(
    grad, inputs, outputs, queries, keys, *, scale, window=None
) -> tuple[Tensor, ...]:
    """By the formulas of the kernel: probabilities from the given sums, no softmax."""
    query, key, value = (part.float() for part in inputs)
    (output, sums, state, unused), grad = outputs, grad.float()
    assert state.shape == (2,)
    assert unused.shape == (1,)
    repeats = query.shape[1] // key.shape[1]
    grads = [torch.zeros_like(part) for part in (query, key, value)]
    for rows, seen in _sequences(queries, keys):
        wide_key, wide_value = (p[seen].repeat_interleave(repeats, 1) for p in (key, value))
        p = (_scores(query[rows], key[seen], scale, window) - sums[:, rows, None]).exp()
        inner = torch.einsum("qhd,khd->hqk", grad[rows], wide_value)
        dot = (grad[rows] * output[rows]).sum(-1).t()[..., None]
        scores_grad = p * (inner - dot) * scale
        grads[0][rows] = torch.einsum("hqk,khd->qhd", scores_grad, wide_key)
        key_grad = torch.einsum("hqk,qhd->khd", scores_grad, query[rows])
        value_grad = torch.einsum("hqk,qhd->khd", p, grad[rows])
        for target, one in zip(grads[1:], (key_grad, value_grad), strict=True):
            target[seen] = one.unflatten(1, (-1, repeats)).sum(2)
    return tuple(one.to(part.dtype) for one, part in zip(grads, inputs, strict=True))
