"""What the forward passes of a batch tell of each trained token, on its way from the device to the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from penstock.model.transfer import HostCopy
from penstock.training.pack import Pack
from penstock.training.parallel.ranks import Ranks


class PassLosses:
    """The losses of forward passes, on their way from the device to the host."""

    def __init__(self) -> None:
        self.losses: list[float] = []  # one per update, over all ranks; NaN: it had no tokens
        self.has_tokens = True  # in this update, on some rank
        self._passes: list[tuple[HostCopy, Tensor]] = []  # and where it was computed

    def add_loss(self, loss: Tensor) -> None:
        """Keep the loss of a pass; its copy to the host runs beside the work on the next pass."""
        self._passes.append((HostCopy(loss), loss))

    def loss(self) -> float:
        """Wait for the forward passes since `flush`; return the sum of their losses."""
        return float(sum(float(loss.wait()) for loss, _ in self._passes))

    def loss_there(self, device: torch.device) -> Tensor:
        """The same as a tensor on the device that computed it, without waiting."""
        zero = torch.zeros((), device=device)
        return torch.stack([zero, *(loss for _, loss in self._passes)]).sum()

    def flush(self) -> None:
        """Begin the next update."""
        self._passes.clear()


class TokenStats(PassLosses):
    """Figures of each trained token of the batch, from its first or its last forward pass."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__()
        self.logprob_N = np.full(num_tokens, np.nan)  # of the first pass
        self.entropy_N = np.full(num_tokens, np.nan)  # of the first pass
        self.before_update_N = np.zeros(num_tokens, dtype=bool)  # first pass was before any update
        self.ratio_N = np.full(num_tokens, np.nan)  # of the last pass
        self.clipped_N = np.full(num_tokens, np.nan)  # of the last pass
        self.kl_N = np.full(num_tokens, np.nan)  # of the last pass
        self.teacher_N = np.full(num_tokens, np.nan)  # of the last pass
        self._pending: list[tuple[np.ndarray, HostCopy, bool]] = []

    def add(self, pack: Pack, loss: Tensor, figures_XN: Tensor, *, before_update: bool) -> None:
        """Keep what `pack_loss` gives; its copy to the host runs beside the work on the next pack."""
        self._pending.append((pack.token_N, HostCopy(figures_XN), before_update))
        self.add_loss(loss.detach())

    def flush(self) -> None:
        """Keep the results since the last call: waits for forward passes, not for backward passes."""
        for index, figures_XN, before_update in self._pending:
            logprob, entropy, ratio, clipped, kl, teacher = figures_XN.wait().numpy()
            fresh = np.isnan(self.logprob_N[index])
            self.logprob_N[index] = np.where(fresh, logprob, self.logprob_N[index])
            self.entropy_N[index] = np.where(fresh, entropy, self.entropy_N[index])
            self.before_update_N[index] |= fresh & before_update
            self.ratio_N[index] = ratio
            self.clipped_N[index] = clipped
            self.kl_N[index] = kl
            self.teacher_N[index] = teacher
        self._pending.clear()
        super().flush()


class UpdateLoss:
    """The loss of the passes of one update: its parts, each times its weight; ask before the next update's passes."""

    def __init__(self, parts: Sequence[tuple[PassLosses, float]], ranks: Ranks) -> None:
        self._parts, self._ranks = parts, ranks
        self._known: float | None = None

    def __call__(self) -> float:
        """Wait for the forward passes; return the loss over all ranks, and keep that of each part."""
        if self._known is None:
            losses = self._ranks.sum(np.array([stats.loss() for stats, _ in self._parts]))
            self._known = 0.0
            for (stats, weight), loss in zip(self._parts, losses.tolist(), strict=True):
                stats.losses.append(loss if stats.has_tokens else np.nan)
                self._known += weight * loss
        return self._known

    def there(self, device: torch.device) -> Tensor:
        """This rank's loss on the device that computed it, without waiting."""
        losses = [weight * stats.loss_there(device) for stats, weight in self._parts]
        return torch.stack(losses).sum()


def mean_of_finite(values: list[float]) -> float:
    """The mean of the finite values; 0 if there is none."""
    finite = [value for value in values if np.isfinite(value)]
    return float(np.mean(finite)) if finite else 0.0
