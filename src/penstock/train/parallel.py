"""Trainer ranks: sums over them, sharding of the model, shares of a batch.

`Ranks` is all the rest of the trainer knows of them; alone it adds nothing and costs nothing. gloo
on CPUs, NCCL on GPUs. Who starts the processes is the launcher's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

T = TypeVar("T")


class Ranks:
    """This process among the trainer ranks."""

    def __init__(self, rank: int = 0, world: int = 1) -> None:
        self.rank = rank
        self.world = world

    def sum(self, values: np.ndarray) -> np.ndarray:
        return self._reduce(values, "SUM")

    def max(self, values: np.ndarray) -> np.ndarray:
        return self._reduce(values, "MAX")

    def _reduce(self, values: np.ndarray, operation: str) -> np.ndarray:
        if self.world == 1:
            return values
        import torch
        import torch.distributed as dist

        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        tensor = torch.tensor(values, dtype=torch.float64, device=device)
        dist.all_reduce(tensor, getattr(dist.ReduceOp, operation))
        return tensor.cpu().numpy()


def rank_share(items: Sequence[T], ranks: Ranks) -> list[T]:
    """Every world-th item: the mini-batches of all ranks together are those of one."""
    return list(items[ranks.rank :: ranks.world])
