"""Weight publication: how updated weights reach the engines. Layer 4."""

from __future__ import annotations

WEIGHT_SYNCS = {
    "in_process": "penstock.sync.in_process:InProcessSync",
    "shared_memory": "penstock.sync.shared_memory:SharedMemorySync",
    "object_store": "penstock.sync.object_store:ObjectStoreSync",
    "collective": "penstock.sync.collective:Distributor",  # shared memory on each node, and these between
}
