"""Weights by broadcast between processes that a user joined into a group.

For producers that are driven from Python; a run has its own way (`sync/`). Rank 0 of a group sends,
all others receive. Several groups, of different members, may be open in one process.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from penstock.errors import UserError


def join_group(
    world_size: int,
    rank: int,
    backend: str = "gloo",
    name: str = "default",
    where: str = "env://",
    timeout_s: float = 600.0,
) -> Any:
    """A torch.distributed process group; waits for the others, so long at most.

    `where` is the same for all members: env:// reads MASTER_ADDR and MASTER_PORT, or tcp://HOST:PORT
    of rank 0.
    """
    import torch.distributed as dist

    if backend not in ("gloo", "nccl"):
        raise UserError(f"collective group {name}: backend got {backend!r}, allowed: gloo, nccl")
    if not 0 <= rank < world_size:
        raise UserError(f"collective group {name}: rank got {rank}, allowed: 0 to {world_size - 1}")
    limit = timedelta(seconds=timeout_s)
    if where.startswith("tcp://"):
        host, _, port = where.removeprefix("tcp://").rpartition(":")
        store = dist.TCPStore(host, int(port), world_size, rank == 0, limit, multi_tenant=True)
    else:
        store, _, _ = next(dist.rendezvous(where, rank, world_size, timeout=limit))
    own = dist.PrefixStore(name, store)
    if backend == "nccl":
        return dist.ProcessGroupNCCL(own, rank, world_size)
    return dist.ProcessGroupGloo(own, rank, world_size, limit)


def send_state_dict(group: Any, state_dict: Mapping[str, Any]) -> None:
    """From rank 0 to all others; returns when they have it."""
    import torch

    tensors = {name: tensor.detach().contiguous() for name, tensor in state_dict.items()}
    entries = [(name, str(t.dtype)[6:], list(t.shape)) for name, t in tensors.items()]
    device = next(iter(tensors.values())).device if tensors else "cpu"
    text = torch.frombuffer(bytearray(json.dumps(entries).encode()), dtype=torch.uint8).to(device)
    _broadcast(group, torch.tensor([len(text)], device=device))
    _broadcast(group, text)
    for tensor in tensors.values():
        _broadcast(group, tensor)


def receive_state_dict(group: Any, device: str = "cpu") -> dict[str, Any]:
    """What rank 0 sends next."""
    import torch

    size = torch.zeros(1, dtype=torch.long, device=device)
    _broadcast(group, size)
    text = torch.zeros(int(size), dtype=torch.uint8, device=device)
    _broadcast(group, text)
    made = {}
    for name, dtype, shape in json.loads(bytes(text.tolist())):
        made[name] = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
        _broadcast(group, made[name])
    return made


def _broadcast(group: Any, tensor: Any) -> None:
    import torch.distributed as dist

    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    if tensor.numel():
        group.broadcast([tensor], options).wait()
