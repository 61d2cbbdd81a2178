"""Weights: their identity (digest), their memory, and the way from trainer to engines.

A new way to move weights is one file that keeps `protocol.py` and one entry in `SYNC_KINDS`. May
import config, errors and types. When to publish is decided by the loop, which engine loads by the pool.
"""

from __future__ import annotations

from penstock.config import Config
from penstock.errors import UserError

SHARED = "auto"  # memory that processes of one machine share: the GPU's or the host's
DELTA = "delta"  # `collective`, with only what changed between two versions sent from node to node
SYNC_KINDS = {  # what each launcher can use; `auto` is the first
    "local": (SHARED, "shared_memory", "cuda_ipc", "collective", DELTA),
    "ray": ("collective", DELTA),
    "inline": ("in_process",),
}


def sync_kind(config: Config) -> str:
    """The weight sync of a built-in launcher; raise a UserError if `sync.kind` does not fit it."""
    kind, allowed = config.sync.kind, SYNC_KINDS[config.launch.kind]
    if kind == "auto":
        return allowed[0]
    if kind not in allowed:
        names = ", ".join(dict.fromkeys(("auto", *allowed)))
        raise UserError(
            f"sync.kind: got {kind!r} with launch.kind = {config.launch.kind}, allowed: {names}"
        )
    return kind
