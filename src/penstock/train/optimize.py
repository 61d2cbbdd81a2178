"""The optimizer and its schedule: AdamW over the masters, and a learning rate that is a pure
function of the step, so that a resumed run needs no schedule state.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from penstock.config import TrainConfig
from penstock.train.policy_weights import whole_tensor


def learning_rate(config: TrainConfig, step: int, total_steps: int) -> float:
    """The rate of step `step` (from 1): a linear rise over the warm-up, then the schedule."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    span = max(total_steps - config.warmup_steps, 1)
    done = min((step - config.warmup_steps - 1) / span, 1.0)
    left = 1.0 - done if config.schedule == "linear" else (1.0 + math.cos(math.pi * done)) / 2
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * left)


def make_optimizer(
    parameters: dict[str, nn.Parameter], config: TrainConfig
) -> torch.optim.Optimizer:
    """AdamW; vectors (norms, biases) are not decayed."""
    matrices = [parameter for parameter in parameters.values() if parameter.ndim > 1]
    vectors = [parameter for parameter in parameters.values() if parameter.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=config.betas,
        fused=True,
    )


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> float:
    """Scale the gradients down to `max_norm` over all ranks; returns the norm they had."""
    listed = [parameter for parameter in parameters if parameter.grad is not None]
    if not listed:
        return 0.0
    norm = nn.utils.get_total_norm([p.grad for p in listed if p.grad is not None])
    total: Tensor = whole_tensor(norm)
    if torch.isfinite(total):
        nn.utils.clip_grads_with_norm_(listed, max_norm, total)
    return float(total)
