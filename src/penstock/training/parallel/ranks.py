"""Trainer ranks: their axes, reductions over them, and each rank's share of the work.

Ranks form a mesh of the axes of `train.parallel`: ranks of one data index hold one copy of the model and
work on the same groups, the data axis divides the groups. The rest of the trainer reaches other ranks
only through `Ranks`; with a single rank its methods return their argument. gloo on CPUs, NCCL on GPUs.
The launcher starts the processes and sets the variables that torch.distributed reads (RANK,
WORLD_SIZE, MASTER_ADDR, MASTER_PORT). `sharding.py` lays a model over the ranks.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from penstock.config import ParallelConfig
from penstock.weights.broadcast import connect_store, is_loopback, open_store
from penstock.weights.digest import DIGEST_BYTES, combine_digests, digest_of, digests_of

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Axis:
    """This rank's place along one axis of the mesh."""

    index: int = 0
    size: int = 1
    group: Any = None  # the process group of the ranks along this axis; None: no other rank

    @property
    def is_first(self) -> bool:
        return self.index == 0


class Ranks:
    """This process among the trainer ranks."""

    def __init__(
        self, rank: int = 0, world: int = 1, parallel: ParallelConfig | None = None
    ) -> None:
        self.rank = rank
        self.world = world
        self.parallel = parallel or ParallelConfig()
        self.data_rank = self.parallel.data_index(rank, world)
        self.data_world = world // self.parallel.copies
        self.mesh: Any = None  # torch's DeviceMesh
        self.shard_mesh: Any = None  # of ranks over which FSDP2 splits what this rank holds
        self.pipeline = Axis()
        self.context = Axis()
        self.tensor = Axis()

    @classmethod
    def from_environment(
        cls, device: torch.device, parallel: ParallelConfig | None = None
    ) -> Ranks:
        """Join the process group that the environment describes, or return a single rank."""
        world = int(os.environ.get("WORLD_SIZE", "1"))
        if world == 1:
            return cls()
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if not dist.is_initialized():
            _join(int(os.environ["RANK"]), world, "nccl" if device.type == "cuda" else "gloo")
        ranks = cls(dist.get_rank(), dist.get_world_size(), parallel)
        ranks._make_mesh(device.type)
        return ranks

    def _make_mesh(self, device_type: str) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        axes = self.parallel
        shape = {"pipeline": axes.pipeline, "data": self.data_world}
        shape |= {"context": axes.context, "tensor": axes.tensor}
        names = tuple(shape)
        self.mesh = init_device_mesh(device_type, tuple(shape.values()), mesh_dim_names=names)
        self.pipeline = self._axis("pipeline")
        self.context, self.tensor = self._axis("context"), self._axis("tensor")
        self.shard_mesh = self.mesh["data"]
        if axes.context > 1:
            self.shard_mesh = self.mesh["data", "context"]._flatten("shard")

    def _axis(self, name: str) -> Axis:
        part = self.mesh[name]
        return Axis(part.get_local_rank(), part.size(), part.get_group())

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def sum(self, values: np.ndarray) -> np.ndarray:
        """The sum over the shares of the batch; ranks of one share have the same array."""
        if self.data_world == 1:
            return values
        return self._reduce(values, "SUM", None if self.mesh is None else self.mesh["data"])

    def sum_everywhere(self, values: np.ndarray) -> np.ndarray:
        """The sum of all ranks' arrays."""
        return self._reduce(values, "SUM")

    def max(self, values: np.ndarray) -> np.ndarray:
        """The largest value of the ranks' arrays, element by element."""
        return self._reduce(values, "MAX")

    def sum_of(self, number: float) -> float:
        """The sum of the ranks' numbers."""
        return float(self.sum(np.array([float(number)]))[0])

    def max_of(self, number: float) -> float:
        """The largest of the ranks' numbers."""
        return float(self.max(np.array([float(number)]))[0])

    def _reduce(self, values: np.ndarray, operation: str, mesh: Any = None) -> np.ndarray:
        if self.world == 1:
            return values
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        tensor = torch.tensor(values, dtype=torch.float64, device=device)
        group = None if mesh is None else mesh.get_group()
        dist.all_reduce(tensor, getattr(dist.ReduceOp, operation), group=group)
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
        store = open_store(address, limit_s, port, is_reserved=True)
    else:
        store = connect_store(address, port, limit_s)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world)


def rank_share(items: Sequence[T], ranks: Ranks) -> list[T]:
    """Every n-th item, so that mini-batches over all ranks are those of a single rank."""
    return list(items[ranks.data_rank :: ranks.data_world])


def digest_over(ranks: Ranks, weights: Iterable[tuple[str, torch.Tensor]]) -> str:
    """The digest of weights that every rank has. The ranks share the hashing, tensor by tensor."""
    if ranks.world == 1:
        return digest_of(weights)
    names: list[str] = []

    def share() -> Iterator[tuple[str, torch.Tensor]]:
        for number, (name, tensor) in enumerate(weights):
            names.append(name)
            if number % ranks.world == ranks.rank:
                yield name, tensor

    digests = digests_of(share())
    table = np.zeros((len(names), DIGEST_BYTES))
    for number in range(ranks.rank, len(names), ranks.world):
        table[number] = list(digests[names[number]])
    whole = ranks.sum_everywhere(table).astype(np.uint8)
    return combine_digests({name: row.tobytes() for name, row in zip(names, whole, strict=True)})
