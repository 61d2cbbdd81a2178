"""Norms and rotation of queries and keys, forward and backward, against plain torch under autograd."""

from __future__ import annotations

import os
import types
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.gpu(stand_in=True)
pytest.importorskip("triton")
from penstock.model.kernels import turn_kernels  # noqa: E402
from penstock.model.packed_attention import Copies  # noqa: E402

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
ROWS, EPSILON = 5, 1e-5


def normed(x: torch.Tensor, weight: torch.Tensor, kind: str, adds_one: bool) -> torch.Tensor:
    shape = x.shape
    x = x.flatten(1) if kind == "whole" else x
    x = x * (x.square().mean(-1, keepdim=True) + EPSILON).rsqrt() * (weight + adds_one)
    return x.view(shape)


def plain(joint: torch.Tensor, family: Any, table: Any, weights: Any) -> list[torch.Tensor]:
    """The turned queries and keys, and the values."""
    parts = list(turn_kernels.split(family, joint))
    for place in (0, 1):
        if weights:
            kind, adds_one = family.head_norms, family.norm_adds_one
            parts[place] = normed(parts[place], weights[place], kind, adds_one)
        if table is not None:
            cos, sin = table
            size = cos.shape[-1]
            turned, rest = parts[place].split((size, family.head_size - size), -1)
            turned = turned * cos + turned.roll(size // 2, -1) * sin
            parts[place] = torch.cat([turned, rest], -1)
    return parts


@pytest.mark.parametrize(
    ("norms", "turned", "adds_one", "shared"),
    [
        ("none", 16, False, False),
        ("none", 12, False, True),  # a part of each head turns
        ("none", 0, False, True),  # nothing does
        ("head", 16, True, True),
        ("head", 12, False, False),
        ("whole", 16, False, True),
    ],
)
def test_heads_and_their_gradients(
    norms: Any, turned: int, adds_one: bool, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turn_kernels, "_PROGRAMS", 2)  # each has several tokens
    family: Any = types.SimpleNamespace(
        heads=3, kv_heads=2, head_size=16, head_norms=norms, epsilon=EPSILON, norm_adds_one=adds_one
    )
    torch.manual_seed(0)
    widths = {"none": (), "head": (16, 16), "whole": (48, 32)}[norms]
    weights = tuple(torch.randn(width).requires_grad_() for width in widths) or None
    table = (torch.randn(ROWS, 1, turned), torch.randn(ROWS, 1, turned)) if turned else None
    joint = torch.randn(ROWS, 7 * 16).requires_grad_()
    query, key, value = plain(joint, family, table, weights)
    index = torch.tensor([0, 1, 2, 0, 1, 3, 4]) if shared else torch.arange(ROWS)
    grads = [torch.randn_like(part) for part in (query, key[index], value[index])]
    torch.autograd.backward([query, key[index], value[index]], grads)
    copies = None
    if shared:
        bounds = torch.cat([torch.zeros(1, dtype=torch.int64), index.bincount().cumsum(0)])
        order = index.argsort(stable=True).to(DEVICE)
        copies = Copies(order_K=order, bounds_T1=bounds.to(DEVICE, torch.int32))
    moved = joint.detach().to(DEVICE)
    on_device = None if weights is None else tuple(w.detach().to(DEVICE) for w in weights)
    turns = None if table is None else tuple(part.to(DEVICE) for part in table)
    if table is not None:
        wanted = torch.cat([part.flatten(1) for part in (query, key, value)], 1).detach()
        actual = turn_kernels.turn(moved, family, turns, on_device, in_place=False)
        torch.testing.assert_close(actual.cpu(), wanted)
        if weights is None:
            copied = moved.clone()
            assert turn_kernels.turn(copied, family, turns, None, in_place=True) is copied
            torch.testing.assert_close(copied.cpu(), wanted)
    joint_grad, vectors = turn_kernels.turn_back(
        tuple(grad.to(DEVICE) for grad in grads), moved, family, turns, on_device, copies
    )
    torch.testing.assert_close(joint_grad.cpu(), joint.grad)
    for vector, weight in zip(vectors, weights or (), strict=True):
        torch.testing.assert_close(vector.cpu(), weight.grad)
