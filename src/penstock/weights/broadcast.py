"""Weights sent from an engine to its workers over a gloo group: no shared memory is needed.

Rank 0 is the engine, the workers follow. The group is a process group of its own, beside whatever the
workers use among themselves; both sides walk the same list of names, dtypes and shapes. A member that
is gone ends a transfer after a bounded time.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

BUCKET_BYTES = 64 * 2**20
Shape = tuple[str, str, list[int]]  # name, dtype, shape


class WeightGroup:
    """One member; made on all sides at once, as each waits for the others."""

    def __init__(self, rank: int, world: int, store: Any, timeout_s: float) -> None:
        self._store = store
        self._group = dist.ProcessGroupGloo(
            dist.PrefixStore("penstock-weights", store), rank, world, timedelta(seconds=timeout_s)
        )

    @classmethod
    def join(cls, rank: int, world: int, address: str, port: int, timeout_s: float) -> WeightGroup:
        """A worker's side; the engine's store (`open_store`) says where they meet."""
        store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=timeout_s))
        return cls(rank, world, store, timeout_s)

    def send(self, weights: Iterable[torch.Tensor]) -> None:
        for tensor in weights:
            self._broadcast(tensor.detach().cpu().contiguous())

    def receive(self, shapes: Iterable[Shape]) -> dict[str, torch.Tensor]:
        received = {}
        for name, dtype, shape in shapes:
            received[name] = torch.empty(shape, dtype=getattr(torch, dtype))
            self._broadcast(received[name])
        return received

    def _broadcast(self, tensor: torch.Tensor) -> None:
        if not tensor.numel():
            return
        octets = tensor.view(-1).view(torch.uint8)
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        pending = [
            self._group.broadcast([octets[start : start + BUCKET_BYTES]], options)
            for start in range(0, len(octets), BUCKET_BYTES)
        ]
        for work in pending:
            work.wait()


def open_store(address: str, timeout_s: float) -> Any:
    """Where the members meet; `store.port` is what the workers are told."""
    return dist.TCPStore(
        address, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
    )
