"""The optimizer: float32 master weights, AdamW over them, gradient clipping, learning rate.

If the model computes in float32 the masters are its own parameters. If it computes in bfloat16 they
are copies: gradients are added to them in every backward pass, and `write_back` copies them into the
model after a step. Sharded models keep float32 parameters and cast them by themselves. The learning
rate is a pure function of the step, so a resumed run needs no schedule state.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from penstock.config import TrainConfig
from penstock.train.ranks import whole_tensor


class Masters:
    """The parameters that the optimizer changes, by their names in the model."""

    def __init__(self, model: nn.Module, *, separate: bool) -> None:
        self._model_parameters = {
            name: parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        self.separate = separate
        self.parameters: dict[str, nn.Parameter] = dict(self._model_parameters)
        if separate:
            for name, parameter in self._model_parameters.items():
                master = nn.Parameter(parameter.detach().to(torch.float32, copy=True))
                self.parameters[name] = master
                parameter.register_post_accumulate_grad_hook(_AddGradientTo(master))

    def write_back(self) -> None:
        """Copy the masters into the model's parameters."""
        if self.separate:
            with torch.no_grad():
                torch._foreach_copy_(
                    list(self._model_parameters.values()),
                    [self.parameters[name] for name in self._model_parameters],
                )


class _AddGradientTo:
    """Add a parameter's new gradient to that of its master, summed in float32, and free it."""

    def __init__(self, master: nn.Parameter) -> None:
        self._master = master

    def __call__(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        if self._master.grad is None:
            self._master.grad = parameter.grad.to(torch.float32)
        else:
            self._master.grad.add_(parameter.grad)
        parameter.grad = None


def learning_rate(config: TrainConfig, step: int, total_steps: int) -> float:
    """Return the learning rate of `step` (from 1): a linear warm-up, then the schedule."""
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
    """Return AdamW over the parameters; vectors (norms, biases) have no weight decay."""
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
    """Scale the gradients of all ranks down to `max_norm`; return the norm they had before."""
    listed = [parameter for parameter in parameters if parameter.grad is not None]
    if not listed:
        return 0.0
    norm = nn.utils.get_total_norm([p.grad for p in listed if p.grad is not None])
    total: Tensor = whole_tensor(norm)
    if torch.isfinite(total):
        nn.utils.clip_grads_with_norm_(listed, max_norm, total)
    return float(total)
