"""RMS norms as one operation, for engine and trainer.

transformers writes an RMS norm as eight operations, and rounds twice in half precision; torch's
`rms_norm` is one kernel forward and one backward on a GPU, and rounds once. Engine and trainer use the
same, so that their log-probs agree.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import nn


def fuse_norms(model: nn.Module) -> int:
    """Run every RMS norm that computes what `rms_norm` does as one call; return how many.

    A norm is found by its class name and tested by its output, so that a variant (an offset of one,
    another order of rounding that matters) keeps its own code.
    """
    count = 0
    for module in model.modules():
        weight = getattr(module, "weight", None)
        is_rms_norm = type(module).__name__.endswith("RMSNorm")
        if is_rms_norm and weight is not None and epsilon(module) is not None:
            count += _fuse_norm(module, weight)
    return count


def restore_norms(model: nn.Module) -> None:
    """Undo `fuse_norms`: every norm runs its own code again."""
    for module in model.modules():
        if is_fused(module):
            del module.forward


def _fuse_norm(module: nn.Module, weight: torch.Tensor) -> bool:
    fused = types.MethodType(_forward, module)  # a bound method follows a copy of the model
    probe = torch.linspace(-3, 5, 4 * weight.numel(), device=weight.device, dtype=weight.dtype)
    probe = probe.view(4, *weight.shape)
    tolerance = 1e-5 if weight.dtype is torch.float32 else 2e-2
    with torch.no_grad():
        same = torch.allclose(fused(probe), module(probe), rtol=tolerance, atol=tolerance)
    if same:
        module.forward = fused
    return same


def _forward(module: Any, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.rms_norm(x, module.weight.shape, module.weight, epsilon(module))


def is_fused(module: nn.Module) -> bool:
    """Whether `fuse_norms` replaced this norm's code."""
    return getattr(module.__dict__.get("forward"), "__func__", None) is _forward


def epsilon(module: Any) -> float | None:
    """What a norm adds to the mean square."""
    return getattr(module, "variance_epsilon", getattr(module, "eps", None))
