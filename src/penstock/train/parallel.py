"""Trainer ranks: sums over them, sharding of the model, shares of a batch.

`Ranks` is all the rest of the trainer knows of them; alone it adds nothing and costs nothing. gloo
on CPUs, NCCL on GPUs. Who starts the processes is the launcher's business; it sets the variables
that torch.distributed reads (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from penstock.weights.digest import DIGEST_BYTES, combine_digests
from penstock.weights.model_weights import digest_of, digests_of

if TYPE_CHECKING:
    from penstock.train.policy import Policy

T = TypeVar("T")


class Ranks:
    """This process among the trainer ranks."""

    def __init__(self, rank: int = 0, world: int = 1) -> None:
        self.rank = rank
        self.world = world

    @classmethod
    def from_environment(cls, device: torch.device) -> Ranks:
        """Join the process group that the launcher described; alone where it described none."""
        world = int(os.environ.get("WORLD_SIZE", "1"))
        if world == 1:
            return cls()
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if not dist.is_initialized():
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        return cls(dist.get_rank(), dist.get_world_size())

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def sum(self, values: np.ndarray) -> np.ndarray:
        return self._reduce(values, "SUM")

    def max(self, values: np.ndarray) -> np.ndarray:
        return self._reduce(values, "MAX")

    def most(self, number: int) -> int:
        """The largest of the ranks' numbers."""
        return int(self.max(np.array([float(number)]))[0])

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.sum(np.zeros(1))

    def _reduce(self, values: np.ndarray, operation: str) -> np.ndarray:
        if self.world == 1:
            return values
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        tensor = torch.tensor(values, dtype=torch.float64, device=device)
        dist.all_reduce(tensor, getattr(dist.ReduceOp, operation))
        return tensor.cpu().numpy()


def rank_share(items: Sequence[T], ranks: Ranks) -> list[T]:
    """Every world-th item: the mini-batches of all ranks together are those of one."""
    return list(items[ranks.rank :: ranks.world])


def digest_over(ranks: Ranks, weights: Iterable[tuple[str, torch.Tensor]]) -> str:
    """The digest of weights that every rank has; each hashes every world-th tensor."""
    if ranks.world == 1:
        return digest_of(weights)
    names: list[str] = []

    def own() -> Iterator[tuple[str, torch.Tensor]]:
        for number, (name, tensor) in enumerate(weights):
            names.append(name)
            if number % ranks.world == ranks.rank:
                yield name, tensor

    digests = digests_of(own())
    table = np.zeros((len(names), DIGEST_BYTES))
    for number in range(ranks.rank, len(names), ranks.world):
        table[number] = list(digests[names[number]])
    whole = ranks.sum(table).astype(np.uint8)
    return combine_digests({name: row.tobytes() for name, row in zip(names, whole, strict=True)})


def shard(policy: Policy, ranks: Ranks, dtype: torch.dtype) -> None:
    """Split the parameters over the ranks (FSDP2): masters stay whole-precision, compute is `dtype`.

    Loss weights are already divided by sums over all ranks, so gradients are added, not averaged.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    device = policy.device.type
    mesh = init_device_mesh(device, (ranks.world,))
    master = next(policy.parameters()).dtype
    precision = MixedPrecisionPolicy(
        param_dtype=None if dtype == master else dtype, reduce_dtype=master
    )
    for layer in policy.layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(policy, mesh=mesh, mp_policy=precision)
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other for float32
