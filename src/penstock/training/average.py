"""A second copy of the trained weights that follows them: a reference that moves, and the average to export.

Held in the masters' format and layout, so that adapters and shards are averaged as they are, and a checkpoint holds
it beside the optimizer's moments. To score or to write with it, the policy takes it over for that time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from penstock.config import TrainConfig
from penstock.training.optimizer import Masters
from penstock.training.parallel.sharding import local
from penstock.training.policy import Policy

REFERENCE, EMA = "reference", "ema"  # the names of the two in a checkpoint


class Average:
    """decay x average + (1 - decay) x weights, after every `every`-th step; it begins as the weights."""

    def __init__(self, masters: Masters, *, decay: float, every: int = 1) -> None:
        self._masters, self._decay, self._every = masters, decay, every
        self.tensors = {
            name: master.detach().clone() for name, master in masters.parameters.items()
        }

    def follow(self, step: int) -> None:
        """Take in the weights after a step."""
        if step % self._every == 0:
            self._move(1.0 - self._decay)

    def restart(self) -> None:
        """Begin again as the present weights."""
        self._move(1.0)

    def _move(self, share: float) -> None:
        own, weights = self.tensors.values(), self._masters.parameters.values()
        with torch.no_grad():
            torch._foreach_lerp_([local(o) for o in own], [local(w) for w in weights], share)

    @contextlib.contextmanager
    def in_place(
        self, policy: Policy, current: Callable[[Tensor], Tensor] = lambda tensor: tensor
    ) -> Iterator[None]:
        """Let the policy have these weights inside the context; its own come back bit for bit.

        `current`: where a tensor is now, if it may be offloaded.
        """
        parameters = self._masters.parameters | self._masters.rounded
        targets = {name: current(local(parameters[name].detach())) for name in self.tensors}
        kept = {name: target.clone() for name, target in targets.items()}
        policy.release()
        for name, target in targets.items():
            target.copy_(local(current(self.tensors[name])))
        try:
            yield
        finally:
            policy.release()
            for name, target in targets.items():
                target.copy_(kept[name])


def averages(config: TrainConfig, masters: Masters) -> dict[str, Average]:
    """The averages that a run keeps, by name."""
    kept = {}
    if config.reference_moves:
        every = config.reference_every or 1
        kept[REFERENCE] = Average(masters, decay=config.reference_decay, every=every)
    if config.ema_decay:
        kept[EMA] = Average(masters, decay=config.ema_decay)
    return kept
