"""Measure how long new weights take from the trainer to every engine, compared with a plain copy.

    python benchmarks/weight_sync.py [--gb 0.5 2] [--producers 1 4] [--paths shared_memory ...]

This process is the trainer; every producer is a process that copies what it fetched into its own weights,
as an engine does. `publish` is how long the trainer waits; `all` ends when the last producer has its copy.
The share is that of memcpy: bytes / seconds / bandwidth. `collective` is `sync.kind=collective` on one
machine; in `two nodes` all producers are on another node: two distributors with the loopback network
between them.

    python benchmarks/weight_sync.py --device cuda --paths shared_memory cuda_ipc

puts the weights of the trainer and of all producers on one GPU and compares with a copy on that GPU.

    python benchmarks/weight_sync.py --delta [--lr 1e-6 5e-6] [--updates 4]
    python benchmarks/weight_sync.py --delta --versions runs/NAME/checkpoints/step-*/model

sends successive versions to another node whole and as deltas (`sync.kind=delta`), and prints bytes and seconds of both.

    python benchmarks/weight_sync.py --nodes 1 3 7 [--gb 0.5]

sends weights to so many other nodes, each a distributor process of this machine, and prints when the first, half and all of them have a copy.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import socket
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from penstock.config import LaunchConfig
from penstock.files import weight_folder
from penstock.types import WeightHandle
from penstock.waits import Waits
from penstock.weights.in_process import InProcessSync
from penstock.weights.shared_memory import SharedMemorySync
from penstock.workers.part_factories import DISTRIBUTOR
from penstock.workers.pool.weights import NodeCopies
from penstock.workers.processes.process_worker import ProcessWorker
from penstock.workers.supervise.supervised import SupervisionCallbacks

TENSOR_BYTES = 32 * 2**20
PATHS = ("in_process", "shared_memory", "collective", "two nodes")
GPU_PATHS = ("cuda_ipc",)
ROUNDS, WARM_UP = 6, 2  # the warm-up touches both weight buffers


def make_weights(gigabytes: float, device: str = "cpu") -> list[tuple[str, torch.Tensor]]:
    count = max(1, round(gigabytes * 1e9 / TENSOR_BYTES))
    shape = (TENSOR_BYTES // 4,)
    return [(f"layer.{n}", torch.full(shape, float(n), device=device)) for n in range(count)]


def finished_at(device: str) -> float:
    """Return the time at which all copies are done."""
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter()


def memcpy_bandwidth(gigabytes: float, device: str, threads: int = 1) -> float:
    """Return the bytes per second of a copy between memory that was touched before."""
    torch.set_num_threads(threads)
    source, target = make_weights(gigabytes, device), make_weights(gigabytes, device)
    best = float("inf")
    for _ in range(4):
        started = finished_at(device)
        for (_, one), (_, other) in zip(source, target, strict=True):
            other.copy_(one)
        best = min(best, finished_at(device) - started)
    torch.set_num_threads(1)
    return sum(tensor.nbytes for _, tensor in source) / best


def stream_bandwidth(count: int = 1 << 29, piece: int = 1 << 23) -> float:
    """Return the bytes per second of one TCP stream over the loopback."""
    listener = socket.create_server(("127.0.0.1", 0))
    receiver = multiprocessing.Process(target=_receive, args=(listener.getsockname(), count, piece))
    receiver.start()
    link, _ = listener.accept()
    data, best = memoryview(os.urandom(piece) * (count // piece)), float("inf")
    for _ in range(4):
        started = time.perf_counter()
        for first in range(0, count, piece):
            link.sendall(data[first : first + piece])
        link.recv(1)
        best = min(best, time.perf_counter() - started)
    link.close()
    receiver.join()
    return count / best


def _receive(address: tuple[str, int], count: int, piece: int) -> None:
    target = memoryview(bytearray(count))
    with socket.create_connection(address) as link:
        for _ in range(4):
            got = 0
            while got < count:
                got += link.recv_into(target[got : got + piece])
            link.send(b".")


def producer(index: int, orders: Any, done: Any, device: str) -> None:
    """Fetch and copy the weights of each handle, until None."""
    torch.set_num_threads(1)
    sync = SharedMemorySync()
    own: dict[str, torch.Tensor] = {}
    while (handle := orders.get()) is not None:
        take(sync.fetch(handle), own, device)
        done.put(index)


def take(fetched: Any, own: dict[str, torch.Tensor], device: str = "cpu") -> None:
    for name, tensor in fetched:
        if name in own:
            own[name].copy_(tensor)
        else:
            own[name] = tensor.to(device, copy=True)
    finished_at(device)


def memory_needed(kind: str, size: int, producers: int) -> int:
    """Return the bytes of the trainer's weights, two buffers on each node and each producer's copy."""
    return size * (3 + producers + (2 if kind.startswith("two nodes") else 0))


def memory_available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable"):
            return int(int(line.split()[1]) * 1024 * 0.9)
    return 2**63


def seconds_stolen() -> float:
    """Return for how long the host of this virtual machine ran something else on its cores."""
    cpu = Path("/proc/stat").read_text().splitlines()[0].split()
    return int(cpu[8]) / os.sysconf("SC_CLK_TCK")


Round = Callable[[int], tuple[float, float]]  # version -> seconds of publish, seconds of all


def best_of(one_round: Round) -> tuple[float, float]:
    counted = [one_round(version) for version in range(1, ROUNDS + 1)][WARM_UP:]
    return min(publish for publish, _ in counted), min(all_s for _, all_s in counted)


def one_after_the_other(
    publish: Callable[[int], WeightHandle], deliver: Callable[[WeightHandle], Any]
) -> Round:
    def one_round(version: int) -> tuple[float, float]:
        started = time.perf_counter()
        handle = publish(version)
        published = time.perf_counter()
        deliver(handle)
        return published - started, time.perf_counter() - started

    return one_round


class Nodes:
    """Distributes weights to the nodes of the producers; distributors are processes of this machine."""

    def __init__(self, kind: str, producers: int, logs: Path) -> None:
        self._logs = logs
        self._delta = kind.endswith("delta")
        self._num_received = 0
        self._loop = asyncio.new_event_loop()
        self.copies: NodeCopies | None = None
        if kind not in ("shared_memory", "cuda_ipc"):
            callbacks = SupervisionCallbacks(waits=Waits(), note=lambda text: None)
            self.copies = NodeCopies(self._spawn, LaunchConfig(), callbacks)
            for index in range(producers):
                apart = f"node {index}" if kind == "nodes" else "other"
                self.copies.place_engine(index, "here" if kind == "collective" else apart)

    async def _spawn(self, name: str, node: str, folder: str) -> ProcessWorker:
        log = self._logs / f"{name}.log"
        settings = (folder, node, "127.0.0.1", self._delta)
        how: dict[str, Any] = {"log_path": log, "threads": 1, "timeout_s": 120}
        return await ProcessWorker.start(name, DISTRIBUTOR, *settings, **how)

    def received(self) -> int:
        """Return the bytes that the nodes have received since the last call."""
        assert self.copies is not None
        workers = self.copies.supervised.values()
        before, self._num_received = (
            self._num_received,
            sum(self._loop.run_until_complete(worker.call("progress")) for worker in workers),
        )
        return self._num_received - before

    def for_each(self, handle: WeightHandle, producers: int) -> list[WeightHandle]:
        """Return the handle for each producer, once its node has a copy."""
        spread = self.copies
        if spread is None:
            return [handle] * producers

        async def each() -> list[WeightHandle]:
            asked = (spread.copy_for(index, handle) for index in range(producers))
            return list(await asyncio.gather(*asked))

        return self._loop.run_until_complete(each())

    def times(self, handle: WeightHandle, producers: int) -> list[float]:
        """Return when the node of each producer has a copy."""
        copies = self.copies
        assert copies is not None

        async def one(index: int) -> float:
            await copies.copy_for(index, handle)
            return time.perf_counter()

        async def each() -> list[float]:
            return list(await asyncio.gather(*map(one, range(producers))))

        return self._loop.run_until_complete(each())

    def close(self) -> None:
        class Here:
            async def call(self, method: str) -> None: ...

        trainer: Any = Here()
        if self.copies is not None:
            self._loop.run_until_complete(self.copies.close(trainer))
        self._loop.close()


def with_processes(kind: str, weights: Any, producers: int, device: str) -> tuple[float, float]:
    """Measure as a run works: the handle goes out first, producers read while `publish` writes."""
    folder = weight_folder()
    context = multiprocessing.get_context("spawn")
    orders, done = [context.Queue() for _ in range(producers)], context.Queue()
    workers = [
        context.Process(target=producer, args=(n, orders[n], done, device), daemon=True)
        for n in range(producers)
    ]
    for worker in workers:
        worker.start()
    logs = tempfile.TemporaryDirectory()
    sync, nodes = (
        SharedMemorySync(folder.path, node="here", on_device=kind == "cuda_ipc"),
        Nodes(kind, producers, Path(logs.name)),
    )

    def tell(handle: WeightHandle) -> None:
        for queue, own in zip(orders, nodes.for_each(handle, producers), strict=True):
            queue.put(own)

    def one_round(version: int) -> tuple[float, float]:
        started = time.perf_counter()
        handle = sync.announce(version, "")
        telling = None if handle is None else threads.submit(tell, handle)
        handle = sync.publish(version, "", weights)
        published = time.perf_counter()
        if telling is None:
            tell(handle)
        else:
            telling.result()
        for _ in orders:
            done.get()
        return published - started, time.perf_counter() - started

    threads = ThreadPoolExecutor(1)  # a copy for another node is sent while the trainer writes
    try:
        return best_of(one_round)
    finally:
        threads.shutdown()
        for queue in orders:
            queue.put(None)
        for worker in workers:
            worker.join()
        nodes.close()
        sync.close()
        folder.remove()
        logs.cleanup()


def in_process(weights: Any) -> tuple[float, float]:
    own: dict[str, torch.Tensor] = {}
    sync = InProcessSync()
    return best_of(
        one_after_the_other(
            lambda version: sync.publish(version, "", weights), lambda h: take(sync.fetch(h), own)
        )
    )


def to_nodes(gigabytes: float, count: int) -> None:
    """Measure the way to several nodes."""
    folder, weights = weight_folder(), make_weights(gigabytes)
    size = sum(tensor.nbytes for _, tensor in weights) / 1e9
    with tempfile.TemporaryDirectory() as logs:
        sync, nodes = SharedMemorySync(folder.path, node="here"), Nodes("nodes", count, Path(logs))
        rounds = []
        for version in range(ROUNDS):
            handle = sync.publish(version, "", weights)
            began = time.perf_counter()
            rounds.append([one - began for one in sorted(nodes.times(handle, count))])
        nodes.close()
        sync.close()
        folder.remove()
    best = min(rounds[WARM_UP:], key=lambda one: one[-1])
    print(
        f"{size:.2f} GB to {count} nodes: first {best[0]:.2f} s, half {best[(count - 1) // 2]:.2f} s, "
        f"all {best[-1]:.2f} s ({size * count / best[-1]:.2f} GB/s received in all)",
        flush=True,
    )


def deltas(arguments: argparse.Namespace) -> None:
    from weight_delta import compare, folders, updates

    if arguments.versions:
        compare("folders", folders(arguments.versions), Nodes)
        return
    for lr in arguments.lr:
        compare(f"lr {lr:g}", updates(lr, arguments.updates), Nodes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gb", type=float, nargs="+", default=[0.5, 2.0])
    parser.add_argument("--producers", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--paths", nargs="+", default=list(PATHS), choices=PATHS + GPU_PATHS)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--delta", action="store_true")
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-6, 5e-6])
    parser.add_argument("--updates", type=int, default=4)
    parser.add_argument("--versions", type=Path, nargs="+")
    parser.add_argument("--nodes", type=int, nargs="+")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.nodes:
        for gigabytes in arguments.gb:
            for count in arguments.nodes:
                to_nodes(gigabytes, count)
        return
    if arguments.delta:
        deltas(arguments)
        return
    device = arguments.device
    for gigabytes in arguments.gb:
        bandwidth = memcpy_bandwidth(gigabytes, device)
        line = f"{gigabytes:g} GB: memcpy {bandwidth / 1e9:.1f} GB/s"
        if device == "cpu":
            both = memcpy_bandwidth(gigabytes, device, 2)
            line += f" with one thread, {both / 1e9:.1f} GB/s with two"
            line += f"; one TCP stream over the loopback {stream_bandwidth() / 1e9:.1f} GB/s"
        print(line, flush=True)
        weights = make_weights(gigabytes, device)
        size = sum(tensor.nbytes for _, tensor in weights)
        for kind in arguments.paths:
            for producers in arguments.producers if kind != "in_process" else [1]:
                if memory_needed(kind, size, producers) > memory_available():
                    print(f"  {kind:<15} {producers} producers  not enough memory", flush=True)
                    continue
                began, stolen = time.perf_counter(), seconds_stolen()
                if kind == "in_process":
                    publish_s, all_s = in_process(weights)
                else:
                    publish_s, all_s = with_processes(kind, weights, producers, device)
                share = (seconds_stolen() - stolen) / (time.perf_counter() - began)
                print(
                    f"  {kind:<15} {producers} producers  publish {publish_s:7.4f} s "
                    f"({size / publish_s / bandwidth:4.0%} of memcpy)  all {all_s:7.4f} s "
                    f"({size * producers / all_s / bandwidth:4.0%} of memcpy, all copies)"
                    + (f"  the host took {share:.0%} of a core" if share > 0.01 else ""),
                    flush=True,
                )


if __name__ == "__main__":
    main()
