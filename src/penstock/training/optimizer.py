"""The optimizer: float32 master weights, gradient clipping, learning rate, one step; AdamW is in `moments.py`.

If the model computes in float32 the masters are its own parameters. If it computes in bfloat16 or
float16 they hold the checkpoint's own digits: gradients are added to them in every backward pass, and
`write_back` rounds them into the model after a step. Sharded models keep float32 parameters and round
them by themselves. The learning rate is a pure function of the step, so a resumed run needs no
schedule state.

A step (`UpdateStep`) with a non-finite loss or gradient changes no weight. A gradient that is zero throughout
changes none either: momentum alone must not move the weights. On one GPU these decisions fall there
(`kernels/adamw_kernels.py`), so that no launch waits for the host and the host for no kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from penstock.config import TrainConfig
from penstock.errors import UserError
from penstock.model.loading import format_of
from penstock.model.transfer import HostCopy
from penstock.training.dither import HALF_FORMATS, Place, dither_, dither_key
from penstock.training.moments import StoredAdamW
from penstock.training.parallel.sharding import Sharding, local
from penstock.training.stats import UpdateLoss
from penstock.waits import tell_stage

Outcome = Callable[[], tuple[float, bool]]  # (gradient norm, whether loss and norm are finite)
_NEAR = 0.99  # of the largest norm: nearer, rounding decides whether the gradient is scaled


class Masters:
    """The parameters that the optimizer changes, by their names in the model.

    The model, loaded at its file's precision, computes in `dtype` afterwards.
    """

    def __init__(self, model: Any, dtype: torch.dtype, *, sharding: Sharding) -> None:
        tell_stage("making master weights")
        self.sharding = sharding
        alone = sharding.ranks.world == 1
        self.rounded: dict[str, nn.Parameter] = {}  # the model's own, rounded from their masters
        self.parameters: dict[str, nn.Parameter] = {}
        self.formats: dict[str, torch.dtype] = {}  # number format in which each parameter computes
        for name, parameter in model.named_parameters():
            self.formats[name] = format_of(model, name, dtype)
            exact = parameter.detach()
            if self.formats[name] == torch.float16:
                _check_range(name, local(exact))
            if alone:
                parameter.data = exact.to(self.formats[name])
            if not parameter.requires_grad:
                continue
            self.parameters[name] = parameter
            if self.formats[name] in HALF_FORMATS and alone:
                master = nn.Parameter(exact.to(torch.float32, copy=True))
                self.rounded[name], self.parameters[name] = parameter, master
                parameter.register_post_accumulate_grad_hook(_AddGradientTo(master))

    @property
    def separate(self) -> list[nn.Parameter]:
        """The masters that are not themselves parameters of the model."""
        return [self.parameters[name] for name in self.rounded]

    def of_parameters(self) -> dict[int, nn.Parameter]:
        """The master of each rounded parameter, by the parameter's id."""
        return {id(parameter): self.parameters[name] for name, parameter in self.rounded.items()}

    def dither(self, seed: int) -> None:
        """Move the masters off the grid of the format that computes; the model does not change."""
        with torch.no_grad():
            for name, master in self.parameters.items():
                if self.formats[name] in HALF_FORMATS:
                    part = self.sharding.part(name, master.detach())
                    place = Place(part.first_row, first_column=part.first_column)
                    dither_(part.values, self.formats[name], dither_key(seed, name), place)

    def write_back(self) -> None:
        """Round the masters into the model's parameters."""
        if self.rounded:
            with torch.no_grad():
                torch._foreach_copy_(list(self.rounded.values()), self.separate)


def _check_range(name: str, rows: Tensor) -> None:
    """Refuse float16 for a weight that would become infinite."""
    if rows.numel() and not (largest := float(rows.abs().max())) < torch.finfo(torch.float16).max:
        raise UserError(
            f"model.dtype: got 'float16', but {name} has a weight of {largest:g}, "
            "allowed: 'bfloat16' or 'float32' for this model"
        )


class _AddGradientTo:
    """Add a parameter's new gradient to that of its master, summed in float32, and free it."""

    def __init__(self, master: nn.Parameter) -> None:
        self._master = master

    def __call__(self, parameter: Tensor) -> None:
        if parameter.grad is None:
            return  # what computed the gradient has added it to the master
        if self._master.grad is None:
            self._master.grad = parameter.grad.to(torch.float32)
        else:
            self._master.grad.add_(parameter.grad)
        parameter.grad = None


class LossScale:
    """The factor of the loss that keeps float16 gradients in range; 1 in every other format.

    An update that overflows is skipped and halves the factor; `GROWTH` good updates in a row double
    it. Factors are powers of two, so they change no digit of a gradient.
    """

    GROWTH = 1000
    LARGEST = 2.0**24

    def __init__(self, dtype: torch.dtype) -> None:
        self.is_dynamic = dtype == torch.float16
        self.factor = 2.0**16 if self.is_dynamic else 1.0
        self.good_updates = 0  # in a row, since the factor last changed

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass of the scaled loss."""
        (loss * self.factor if self.is_dynamic else loss).backward()

    def unscale(self, parameters: Iterable[nn.Parameter]) -> None:
        """Divide the gradients by the factor."""
        if self.is_dynamic:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(1.0 / self.factor)

    def overflowed(self, finite: bool) -> bool:
        """Adapt the factor; return whether a non-finite update may be due to it."""
        if not self.is_dynamic:
            return False
        self.good_updates = self.good_updates + 1 if finite else 0
        if finite and self.good_updates == self.GROWTH:
            self.factor, self.good_updates = min(self.factor * 2, self.LARGEST), 0
        if finite or self.factor == 1.0:
            return False
        self.factor /= 2
        return True

    def state_dict(self) -> dict[str, float]:
        return {"factor": self.factor, "good_updates": self.good_updates}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.factor, self.good_updates = state["factor"], int(state["good_updates"])


def learning_rate(config: TrainConfig, step: int, total_steps: int) -> float:
    """The learning rate of `step` (from 1): a linear warm-up, then the schedule."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    span = max(total_steps - config.warmup_steps, 1)
    progress = min((step - config.warmup_steps - 1) / span, 1.0)
    factor = (
        1.0 - progress if config.schedule == "linear" else (1.0 + math.cos(math.pi * progress)) / 2
    )
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * factor)


def clip_gradients(
    parameters: dict[str, nn.Parameter], max_norm: float, sharding: Sharding
) -> float:
    """Scale the gradients of all ranks down to `max_norm`; return the norm they had before."""
    sharding.finish_gradients(parameters)
    norm = sharding.gradient_norm(parameters)
    if norm is None:
        return 0.0
    value = float(norm)
    if math.isfinite(value) and value > _NEAR * max_norm:  # else the factor is 1
        listed = [parameter for parameter in parameters.values() if parameter.grad is not None]
        nn.utils.clip_grads_with_norm_(listed, max_norm, norm)
    return value


class UpdateStep:
    """Applies the gradients of the masters, and drops them."""

    def __init__(self, masters: Masters, optimizer: StoredAdamW, max_norm: float) -> None:
        self._masters, self._optimizer, self._max_norm = masters, optimizer, max_norm
        self._fused = _fused(masters, optimizer)

    def warm_up(self) -> None:
        """Compile what the first update needs."""
        if self._fused is not None:
            self._fused.warm_up()

    def apply(self, rate: float, loss: UpdateLoss) -> Outcome:
        """Make one step; return a function that waits for the device and gives the outcome."""
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        table = None if self._fused is None else self._fused.table()
        outcome = self._plain(loss) if table is None else self._queue(table, loss)
        self._optimizer.zero_grad(set_to_none=True)
        return outcome

    def _plain(self, loss: UpdateLoss) -> Outcome:
        masters = self._masters
        norm = clip_gradients(masters.parameters, self._max_norm, masters.sharding)
        finite = bool(np.isfinite(norm) and np.isfinite(loss()))
        if finite and norm > 0:
            self._optimizer.step()
            masters.write_back()
        return lambda: (norm, finite)

    def _queue(self, table: torch.Tensor, loss: UpdateLoss) -> Outcome:
        assert self._fused is not None
        norm = self._masters.sharding.gradient_norm(self._masters.parameters)
        assert norm is not None
        loss_there = loss.there(norm.device)
        self._fused.launch(table, norm, loss_there, self._max_norm)
        copy = HostCopy(torch.stack([norm, loss_there.to(norm.dtype)]))

        def outcome() -> tuple[float, bool]:
            values = copy.wait()
            return float(values[0]), bool(values.isfinite().all())

        return outcome


def _fused(masters: Masters, optimizer: StoredAdamW) -> Any | None:
    """The kernel that takes the step; None: plain torch does, as on a CPU and on several ranks."""
    devices = {master.device.type for master in masters.parameters.values()}
    if devices != {"cuda"} or masters.sharding.ranks.world > 1:
        return None
    from penstock.model.kernels.adamw_kernels import AdamWStep

    rounded = {masters.parameters[name]: parameter for name, parameter in masters.rounded.items()}
    return AdamWStep(optimizer, rounded) if AdamWStep.fits(optimizer, rounded) else None
