"""State dicts by broadcast between processes that a user joined into a group.

For producers that are driven from Python; a run moves weights by itself (`weights/`). Rank 0 of a group
sends, all others receive. A process may be in several groups with different members.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from penstock.errors import UserError

if TYPE_CHECKING:
    from penstock.weights.broadcast import WeightGroup


def join_group(
    world_size: int,
    rank: int,
    backend: str = "gloo",
    name: str = "default",
    where: str = "env://",
    timeout_s: float = 600.0,
) -> WeightGroup:
    """Join a group; wait up to `timeout_s` for the other members.

    `where` is the same for all members: env:// reads MASTER_ADDR and MASTER_PORT, or tcp://HOST:PORT
    of rank 0.
    """
    import torch.distributed as dist

    from penstock.weights.broadcast import WeightGroup

    if backend not in ("gloo", "nccl"):
        raise UserError(f"collective group {name}: backend got {backend!r}, allowed: gloo, nccl")
    if not 0 <= rank < world_size:
        raise UserError(f"collective group {name}: rank got {rank}, allowed: 0 to {world_size - 1}")
    limit = timedelta(seconds=timeout_s)
    if where.startswith("tcp://"):
        host, _, port = where.removeprefix("tcp://").rpartition(":")
        store = _store(host, int(port), first=rank == 0, timeout_s=timeout_s)
    else:
        store, _, _ = next(dist.rendezvous(where, rank, world_size, timeout=limit))
    return WeightGroup(rank, world_size, store, timeout_s, name=name, backend=backend)


_OPENED: WeakValueDictionary[tuple[str, int], Any] = WeakValueDictionary()


def _store(host: str, port: int, *, first: bool, timeout_s: float) -> Any:
    """Connect to rank 0's store; rank 0 opens it, or shares that of its other groups."""
    from penstock.weights.broadcast import connect_store, open_store

    if not first:
        return connect_store(host, port, timeout_s)
    if (host, port) not in _OPENED:
        try:
            store = _OPENED[host, port] = open_store(host, timeout_s, port)
        except OSError as error:
            raise UserError(
                f"collective group: rank 0 got tcp://{host}:{port} ({error.strerror}), "
                "allowed: an address of its machine and a free port"
            ) from None
        return store
    return _OPENED[host, port]


def send_state_dict(group: WeightGroup, state_dict: Mapping[str, Any]) -> None:
    """Send a state dict from rank 0 to all others; return when it is sent."""
    import torch

    shapes = [(name, str(t.dtype)[6:], list(t.shape)) for name, t in state_dict.items()]
    text = torch.frombuffer(bytearray(json.dumps(shapes).encode()), dtype=torch.uint8)
    group.send([torch.tensor([len(text)]), text, *state_dict.values()])


def receive_state_dict(group: WeightGroup, device: str = "cpu") -> dict[str, Any]:
    """The state dict that rank 0 sends next, on `device`."""
    size = int(group.receive([("size", "int64", [1])])["size"])
    text = group.receive([("text", "uint8", [size])])["text"]
    return group.receive(json.loads(bytes(text.tolist())), device)
