"""Broadcast of weights within a process group: rank 0 sends, all other ranks receive.

Used from a vLLM engine to its workers, and between the processes of a user
(`compat/producers.py`). The group is independent of any other torch.distributed group of its
members. gloo sends from host memory, NCCL from a GPU; tensors on another device are copied through a
bucket. A dead member ends a transfer after `timeout_s`.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

BUCKET_BYTES = 32 * 2**20
Shape = tuple[str, str, list[int]]  # name, dtype, shape


class WeightGroup:
    """One member of the group. Constructing it waits for all other members."""

    def __init__(
        self,
        rank: int,
        world: int,
        store: Any,
        timeout_s: float,
        *,
        name: str = "penstock-weights",
        backend: str = "gloo",
    ) -> None:
        """If the members meet on the loopback interface, gloo stays there too."""
        self._rank = rank
        self._store = store  # the members meet there, so it lives as long as the group
        self._device, self._staging = torch.device("cpu"), torch.empty(0, dtype=torch.uint8)
        self._group: Any
        prefixed, limit = dist.PrefixStore(name, store), timedelta(seconds=timeout_s)
        host = getattr(store, "host", "")
        if backend == "nccl":
            self._device = torch.device("cuda", torch.cuda.current_device())
            options: Any = dist.ProcessGroupNCCL.Options()
            options._timeout = limit
            self._group = dist.ProcessGroupNCCL(prefixed, rank, world, options)
        elif is_loopback(host):
            options = dist.ProcessGroupGloo._Options()
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
            options._timeout = limit
            self._group = dist.ProcessGroupGloo(prefixed, rank, world, options)
        else:
            self._group = dist.ProcessGroupGloo(prefixed, rank, world, limit)

    @classmethod
    def join(cls, rank: int, world: int, address: str, port: int, timeout_s: float) -> WeightGroup:
        """Join as one of the receivers, at the store that rank 0 has opened (`open_store`)."""
        return cls(rank, world, connect_store(address, port, timeout_s), timeout_s)

    def send(self, weights: Iterable[torch.Tensor]) -> None:
        """Send from rank 0; the others must call `receive` with the shapes of these tensors."""
        for tensor in weights:
            self._broadcast(tensor.detach().contiguous())

    def receive(self, shapes: Iterable[Shape], device: str = "cpu") -> dict[str, torch.Tensor]:
        """The tensors that rank 0 sends next, on `device`."""
        received = {}
        for name, dtype, shape in shapes:
            received[name] = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
            self._broadcast(received[name])
        return received

    def _broadcast(self, tensor: torch.Tensor) -> None:
        if tensor.numel():
            octets = tensor.view(-1).view(torch.uint8)
            for start in range(0, len(octets), BUCKET_BYTES):
                self._broadcast_bucket(octets[start : start + BUCKET_BYTES])

    def _broadcast_bucket(self, octets: torch.Tensor) -> None:
        """Send up to BUCKET_BYTES from rank 0, or fill them elsewhere; RuntimeError if a member is gone.

        One bucket at a time: others under way would keep the group of a dead member open until they
        time out.
        """
        bucket = octets
        if octets.device != self._device:
            if not len(self._staging):
                self._staging = torch.empty(BUCKET_BYTES, dtype=torch.uint8, device=self._device)
            bucket = self._staging[: len(octets)]
        if bucket is not octets and self._rank == 0:
            bucket.copy_(octets)
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self._group.broadcast([bucket], options).wait()
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        if bucket is not octets and self._rank != 0:
            octets.copy_(bucket)


def open_store(
    address: str, timeout_s: float, port: int = 0, *, is_reserved: bool = False, **more: Any
) -> Any:
    """Open the store at which the members of a group meet; the others connect to `store.port`.

    It listens on that address alone: a store asks nobody who they are, and torch's own choice is every
    interface of the machine. is_reserved: the launcher keeps the port for it (`workers/supervise/trainer.py`).
    """
    family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
    listening = socket.create_server((address, port), family=family, reuse_port=is_reserved)
    return dist.TCPStore(
        address,
        listening.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listening.detach(),
        **more,
    )


def connect_store(address: str, port: int, timeout_s: float) -> Any:
    """Connect to a store that another member has opened."""
    return dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=timeout_s))


def is_loopback(address: str) -> bool:
    """Whether only processes of this machine can reach the address."""
    try:
        return address == "localhost" or ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
