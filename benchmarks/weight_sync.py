"""How long new weights take from the trainer to every engine, against a plain copy of as many bytes.

    python benchmarks/weight_sync.py [--gb 0.5 2] [--producers 1 4] [--paths shared_memory ...]

The trainer's side is this process, every producer a process of its own that copies what it fetched
into weights of its own, as an engine does. `publish` is what the trainer waits for; `all` is from
there until the last producer has its copy. The share is of memcpy: bytes / all / memcpy bandwidth.
"""

from __future__ import annotations

import argparse
import multiprocessing
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from penstock.sync.collective import CollectiveSync
from penstock.sync.in_process import InProcessSync
from penstock.sync.object_store import ObjectStoreSync
from penstock.sync.shared_memory import SharedMemorySync, make_folder
from penstock.types import WeightHandle

TENSOR_BYTES = 32 * 2**20
PATHS = ("in_process", "shared_memory", "object_store", "collective")


def make_weights(gigabytes: float) -> list[tuple[str, torch.Tensor]]:
    count = max(1, round(gigabytes * 1e9 / TENSOR_BYTES))
    return [(f"layer.{n}", torch.full((TENSOR_BYTES // 4,), float(n))) for n in range(count)]


def memcpy_bandwidth(gigabytes: float) -> float:
    """Bytes per second of one thread that copies weights it has copied before."""
    source, target = make_weights(gigabytes), make_weights(gigabytes)
    best = float("inf")
    for _ in range(4):
        started = time.perf_counter()
        for (_, one), (_, other) in zip(source, target, strict=True):
            other.copy_(one)
        best = min(best, time.perf_counter() - started)
    return sum(tensor.nbytes for _, tensor in source) / best


def producer(kind: str, folder: str, index: int, orders: Any, done: Any) -> None:
    """Fetch and copy at each order, until an empty one."""
    torch.set_num_threads(1)
    sync = SharedMemorySync(folder) if kind == "shared_memory" else CollectiveSync(index)
    own: dict[str, torch.Tensor] = {}
    while (handle := orders.get()) is not None:
        take(sync.fetch(handle), own)
        done.put(index)


def take(fetched: Any, own: dict[str, torch.Tensor]) -> None:
    for name, tensor in fetched:
        if name in own:
            own[name].copy_(tensor)
        else:
            own[name] = tensor.clone()


def memory_needed(kind: str, size: int, producers: int) -> int:
    """The trainer's weights, two published copies, each producer's own; and what it receives."""
    received = 2 if kind == "collective" else 1
    return size * (3 + producers * received)


def memory_available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable"):
            return int(int(line.split()[1]) * 1024 * 0.9)
    return 2**63


Publish = Callable[[int], WeightHandle]


def measure(publish: Publish, deliver: Callable[[WeightHandle], None]) -> tuple[float, float]:
    """Best seconds of publish and of the whole, of the rounds after the first two."""
    best_publish = best_all = float("inf")
    for version in range(1, 6):
        started = time.perf_counter()
        handle = publish(version)
        published = time.perf_counter()
        deliver(handle)
        if version > 2:  # both sides of the double buffer have been touched
            best_publish = min(best_publish, published - started)
            best_all = min(best_all, time.perf_counter() - started)
    return best_publish, best_all


def with_processes(kind: str, weights: Any, producers: int) -> tuple[float, float]:
    folder = make_folder()
    context = multiprocessing.get_context("spawn")
    orders, done = [context.Queue() for _ in range(producers)], context.Queue()
    workers = [
        context.Process(target=producer, args=(kind, str(folder), n, orders[n], done))
        for n in range(producers)
    ]
    for worker in workers:
        worker.start()
    sync: Any = SharedMemorySync(folder) if kind == "shared_memory" else CollectiveSync()

    def deliver(handle: WeightHandle) -> None:
        if kind == "collective":
            handle = sync.open_group(handle, "all", list(range(producers)))
        for queue in orders:
            queue.put(handle)
        for _ in orders:
            done.get()

    try:
        return measure(lambda version: sync.publish(version, "", weights), deliver)
    finally:
        for queue in orders:
            queue.put(None)
        for worker in workers:
            worker.join()
        shutil.rmtree(folder)


def with_ray(weights: Any, producers: int) -> tuple[float, float]:
    import ray

    size = sum(tensor.nbytes for _, tensor in weights)
    ray.init(
        address="local",
        num_cpus=producers + 1,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=max(int(size * 3.5), 2**28),
    )

    class Producer:
        def __init__(self) -> None:
            torch.set_num_threads(1)
            self.own: dict[str, torch.Tensor] = {}

        def take(self, handle: WeightHandle) -> None:
            take(ObjectStoreSync().fetch(handle), self.own)

    engines = [ray.remote(Producer).options(num_cpus=1).remote() for _ in range(producers)]
    sync = ObjectStoreSync()

    def publish(version: int) -> WeightHandle:
        handle = sync.publish(version, "", weights)
        chunks = [ray.put(sync.chunk(number)) for number in range(handle.location)]
        return WeightHandle(version=version, digest="", kind="object_store", location=chunks)

    try:
        return measure(publish, lambda h: ray.get([one.take.remote(h) for one in engines]))
    finally:
        ray.shutdown()


def in_process(weights: Any) -> tuple[float, float]:
    sync, own = InProcessSync(), {}
    return measure(
        lambda version: sync.publish(version, "", weights), lambda h: take(sync.fetch(h), own)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gb", type=float, nargs="+", default=[0.5, 2.0])
    parser.add_argument("--producers", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--paths", nargs="+", default=list(PATHS), choices=PATHS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for gigabytes in arguments.gb:
        bandwidth = memcpy_bandwidth(gigabytes)
        print(f"{gigabytes:g} GB: memcpy {bandwidth / 1e9:.1f} GB/s (one thread)", flush=True)
        weights = make_weights(gigabytes)
        size = sum(tensor.nbytes for _, tensor in weights)
        for kind in arguments.paths:
            for producers in arguments.producers if kind != "in_process" else [1]:
                if memory_needed(kind, size, producers) > memory_available():
                    print(f"  {kind:<14} {producers} producers  not enough memory", flush=True)
                    continue
                if kind == "in_process":
                    publish_s, all_s = in_process(weights)
                elif kind == "object_store":
                    publish_s, all_s = with_ray(weights, producers)
                else:
                    publish_s, all_s = with_processes(kind, weights, producers)
                print(
                    f"  {kind:<14} {producers} producers  publish {publish_s:6.3f} s "
                    f"({size / publish_s / bandwidth:4.0%} of memcpy)  all {all_s:6.3f} s "
                    f"({size * producers / all_s / bandwidth:4.0%} of memcpy, all copies)",
                    flush=True,
                )


if __name__ == "__main__":
    main()
