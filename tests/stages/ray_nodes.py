"""A Ray cluster of several nodes on this machine, which may leave and join."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from penstock.run.job import Job


class Nodes:
    """The first node is the head; the others are known by their id."""

    def __init__(self, *num_cpus: int) -> None:
        import ray
        from ray.cluster_utils import Cluster

        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        self._size: dict[str, Any] = {"object_store_memory": 2**27, "include_dashboard": False}
        head = {"num_cpus": num_cpus[0], **self._size}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self._others: dict[str, Any] = {}
        self.ids = [self.join(count) for count in num_cpus[1:]]
        ray.init(address=self._cluster.address, log_to_driver=False, logging_level="error")

    def join(self, num_cpus: int, num_gpus: int = 0, **more: Any) -> str:
        """Add a node and return its id; sets signal handlers, so not in a thread."""
        size = {**self._size, **more}  # resources and labels too
        node = self._cluster.add_node(num_cpus=num_cpus, num_gpus=num_gpus, **size)
        self._others[str(node.node_id)] = node
        return str(node.node_id)

    def leave(self, node_id: str) -> None:
        self._cluster.remove_node(self._others.pop(node_id))

    def close(self) -> None:
        import ray

        ray.shutdown()
        self._cluster.shutdown()


@contextmanager
def lone_nodes(*num_cpus: int) -> Iterator[str]:
    """Start a cluster of such nodes, which this process does not join; yield its address.

    The label `place` of a node is first, second or third.
    """
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    size: dict[str, Any] = {"object_store_memory": 2**27, "include_dashboard": False}
    head, *others = (
        {"num_cpus": count, "labels": {"place": place}, **size}
        for count, place in zip(num_cpus, ("first", "second", "third"), strict=False)
    )
    cluster = Cluster(initialize_head=True, head_node_args=head)
    for other in others:
        cluster.add_node(**other)
    yield cluster.address
    cluster.shutdown()


def node_of(job: Job, name: str) -> str:
    """Return the node of a worker; of the first rank of the trainer."""
    worker: Any = job.workers.supervised[name].worker
    return str(getattr(worker, "_ranks", [worker])[0].node)
