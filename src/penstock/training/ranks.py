"""Trainer ranks: reductions over them, and each rank's share of the work.

The rest of the trainer reaches other ranks only through `Ranks`; with a single rank its methods
return their argument. gloo on CPUs, NCCL on GPUs. The launcher starts the processes and sets the
variables that torch.distributed reads (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT). `policy.py`
shards the model.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from penstock.weights.broadcast import connect_store, is_loopback, open_store
from penstock.weights.digest import DIGEST_BYTES, combine_digests
from penstock.weights.model_weights import digest_of, digests_of

T = TypeVar("T")


class Ranks:
    """This process among the trainer ranks."""

    def __init__(self, rank: int = 0, world: int = 1) -> None:
        self.rank = rank
        self.world = world

    @classmethod
    def from_environment(cls, device: torch.device) -> Ranks:
        """Join the process group that the environment describes, or return a single rank."""
        world = int(os.environ.get("WORLD_SIZE", "1"))
        if world == 1:
            return cls()
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if not dist.is_initialized():
            _join(int(os.environ["RANK"]), world, "nccl" if device.type == "cuda" else "gloo")
        return cls(dist.get_rank(), dist.get_world_size())

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def sum(self, values: np.ndarray) -> np.ndarray:
        """Return the sum of the ranks' arrays."""
        return self._reduce(values, "SUM")

    def max(self, values: np.ndarray) -> np.ndarray:
        """Return the largest value of the ranks' arrays, element by element."""
        return self._reduce(values, "MAX")

    def sum_of(self, number: float) -> float:
        """Return the sum of the ranks' numbers."""
        return float(self.sum(np.array([float(number)]))[0])

    def max_of(self, number: float) -> float:
        """Return the largest of the ranks' numbers."""
        return float(self.max(np.array([float(number)]))[0])

    def _reduce(self, values: np.ndarray, operation: str) -> np.ndarray:
        if self.world == 1:
            return values
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        tensor = torch.tensor(values, dtype=torch.float64, device=device)
        dist.all_reduce(tensor, getattr(dist.ReduceOp, operation))
        return tensor.cpu().numpy()


def _join(rank: int, world: int, backend: str) -> None:
    """Join the group at MASTER_ADDR; ranks of one machine use no other interface than its loopback."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if is_loopback(address):
        loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)
    limit_s = dist.default_pg_timeout.total_seconds()
    if rank == 0:
        store = open_store(address, limit_s, port)
    else:
        store = connect_store(address, port, limit_s)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world)


def rank_share(items: Sequence[T], ranks: Ranks) -> list[T]:
    """Return every world-th item, so that mini-batches over all ranks are those of a single rank."""
    return list(items[ranks.rank :: ranks.world])


def whole_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Gather the full tensor behind a shard; return a plain tensor as it is."""
    gather = getattr(tensor, "full_tensor", None)
    whole: torch.Tensor = tensor if gather is None else gather()
    return whole


def own_rows(tensor: torch.Tensor, ranks: Ranks) -> tuple[int, torch.Tensor]:
    """Return the number of this rank's first row, and its rows; all of an unsharded tensor."""
    if not hasattr(tensor, "device_mesh"):
        return 0, tensor
    whole: Any = tensor
    assert [placement.is_shard(0) for placement in whole.placements] == [True], "split by rows"
    rows_each = -(-len(tensor) // ranks.world)
    return min(ranks.rank * rows_each, len(tensor)), whole.to_local()


def digest_over(ranks: Ranks, weights: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Return the digest of weights that every rank has; each rank hashes every world-th tensor."""
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
