"""One optimizer step: clips the gradient, changes the masters, rounds them into the model.

Sits between the backward passes (`consumer.py`) and `optimizer.py`. A non-finite loss or gradient changes no weight.
A gradient that is zero throughout changes none either: momentum alone must not move the weights. On one GPU these
decisions fall there (`kernels/adamw_kernels.py`), so that no launch waits for the host and the host for no kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from penstock.model.transfer import HostCopy
from penstock.training.metrics import UpdateLoss
from penstock.training.optimizer import Masters, clip_gradients

Outcome = Callable[[], tuple[float, bool]]  # (gradient norm, whether loss and norm are finite)


class UpdateStep:
    """Applies the gradients of the masters, and drops them."""

    def __init__(self, masters: Masters, optimizer: torch.optim.Optimizer, max_norm: float) -> None:
        self._masters, self._optimizer, self._max_norm = masters, optimizer, max_norm
        self._fused = _fused(masters, optimizer)

    def warm_up(self) -> None:
        """Compile what the first update needs."""
        if self._fused is not None:
            self._fused.warm_up()

    def apply(self, rate: float, loss: UpdateLoss) -> Outcome:
        """Make one step; return what tells how it went, when a GPU has come so far."""
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
        there = loss.there(norm.device)
        self._fused.launch(table, norm, there, self._max_norm)
        known = HostCopy(torch.stack([norm, there.to(norm.dtype)]))

        def outcome() -> tuple[float, bool]:
            values = known.wait()
            return float(values[0]), bool(values.isfinite().all())

        return outcome


def _fused(masters: Masters, optimizer: torch.optim.Optimizer) -> Any | None:
    """Return the kernel that takes the step; None: plain torch does, as on a CPU and on several ranks."""
    devices = {one.device.type for one in masters.parameters.values()}
    if devices != {"cuda"} or masters.sharding.ranks.world > 1:
        return None
    if type(masters) is not Masters:
        return None  # they round in their own way
    try:
        from penstock.model.kernels.adamw_kernels import AdamWStep
    except ImportError:  # CUDA without Triton
        return None
    rounded = {masters.parameters[name]: one for name, one in masters.rounded.items()}
    return AdamWStep(optimizer, rounded) if AdamWStep.fits(optimizer, rounded) else None
