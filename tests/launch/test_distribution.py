"""Real distributors over gloo, each as if on a machine of its own: one copy a node, whoever dies."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.config import LaunchConfig
from penstock.edges import Edges
from penstock.errors import WeightsGone, WorkerDied
from penstock.launch.distribution import Distribution
from penstock.launch.remote import Remote
from penstock.launch.supervise import Surroundings
from penstock.sync.collective import BUCKET_BYTES, Distributor
from penstock.sync.shared_memory import SharedMemorySync, sweep_stale
from penstock.types import WeightHandle

COUNT = 2
SIZE = 10 * 2**20  # of each tensor, in numbers: 40 MiB, more than one bucket


def weights(value: int) -> Iterator[tuple[str, torch.Tensor]]:
    return ((f"w{n}", torch.full((SIZE,), float(value + n))) for n in range(COUNT))


class Mortal(Distributor):
    """Dies between two buckets where a file says so."""

    def __init__(self, folder: str, node: str, order: str) -> None:
        super().__init__(folder, node=node)
        self._order = Path(order)

    def _broadcast(self, buffer: Any, key: Any, meeting: Any, rank: Any, *rest: Any) -> None:
        *others, wait_for = rest

        def wait_and_die(end: int) -> None:
            wait_for(end)
            if end > BUCKET_BYTES and self._order.exists():
                self._order.unlink()
                os.kill(os.getpid(), signal.SIGKILL)

        super()._broadcast(buffer, key, meeting, rank, *others, wait_and_die)


class Site:
    """A trainer on node a in this process; distributors are processes; nodes may be gone."""

    def __init__(self, folder: Path) -> None:
        self._logs = folder / "logs"
        self._logs.mkdir()
        (folder / "shm").mkdir()
        self.trainer = SharedMemorySync(folder / "shm", node="a")
        self.engine = SharedMemorySync()
        self.notes: list[str] = []
        self.started: list[str] = []
        self.gone: set[str] = set()
        around = Surroundings(edges=Edges(), note=self.notes.append)
        self.distribution = Distribution(self._spawn, LaunchConfig(), around)
        self.workers: dict[str, Remote] = {}

    async def _spawn(self, name: str, node: str, folder: str) -> Remote:
        if node in self.gone:
            raise WorkerDied(f"{name}: its node has left")
        self.started.append(node)
        self.workers[node] = await Remote.start(
            name,
            f"{__file__}:Mortal",
            folder,
            node,
            str(self._logs / f"kill-{node}"),
            log_path=self._logs / f"{name}.log",
            threads=1,
            timeout_s=120,
        )
        return self.workers[node]

    def kill_in_the_middle(self, node: str) -> None:
        (self._logs / f"kill-{node}").touch()

    async def spread(self, handle: WeightHandle, *engines: int) -> WeightHandle:
        return await self.distribution.spread(handle, lambda: list(engines))

    def check(self, spread: WeightHandle, *engines: int) -> None:
        """What these engines read is what was published under this version."""
        for engine in engines:
            own = self.distribution.copy_for(engine, spread)
            for number, (_, tensor) in enumerate(self.engine.fetch(own)):
                assert bool((tensor == spread.version + number).all())

    async def close(self) -> None:
        class Nobody:
            async def call(self, method: str) -> None: ...

        trainer: Any = Nobody()
        await self.distribution.close(trainer)


def broken_weights() -> Iterator[tuple[str, torch.Tensor]]:
    yield next(weights(6))
    raise MemoryError


def test_one_copy_for_each_node_whoever_dies_or_joins(tmp_path: Path) -> None:
    site = Site(tmp_path)
    for engine, node in enumerate("abbc"):
        site.distribution.settle(engine, node)

    async def story() -> None:
        first = await site.spread(site.trainer.publish(1, "d1", weights(1)), 0, 1, 2, 3)
        site.check(first, 0, 1, 2, 3)
        assert sorted(site.started) == ["a", "b", "c"]  # two engines of b share one copy

        held = list(site.engine.fetch(site.distribution.copy_for(1, first)))
        for version, node in ((2, "b"), (3, "a")):  # one that receives, the one that sends
            site.kill_in_the_middle(node)
            handle = site.trainer.publish(version, f"d{version}", weights(version))
            site.check(await site.spread(handle, 0, 1, 3), 0, 1, 3)
            assert site.started[-1] == node
            assert bool((held[0][1] == 1).all())  # what is held stays as it was

        site.distribution.settle(4, "d")  # a node joins
        joined = await site.spread(site.trainer.publish(4, "d4", weights(4)), 0, 1, 3, 4)
        site.check(joined, 0, 1, 3, 4)

        site.gone.add("c")  # a node leaves
        site.kill_in_the_middle("c")
        left = await site.spread(site.trainer.publish(5, "d5", weights(5)), 0, 1, 3, 4)
        site.check(left, 0, 1, 4)
        with pytest.raises(WeightsGone, match="have not reached node c"):
            site.distribution.copy_for(3, left)

        announced = site.trainer.announce(6, "d6")  # the trainer fails in the middle
        assert announced is not None
        sending = asyncio.create_task(site.spread(announced, 0, 1))
        with pytest.raises(MemoryError):
            await asyncio.to_thread(site.trainer.publish, 6, "d6", broken_weights())
        with pytest.raises(WeightsGone):
            await sending
        last = await site.spread(site.trainer.publish(7, "d7", weights(7)), 0, 1, 4)
        site.check(last, 0, 1, 4)
        folders = {node: Path(name) for node, name in site.distribution._folders.items()}
        await site.close()
        assert [node for node, folder in folders.items() if folder.exists()] == ["c"]
        sweep_stale(folders["c"].parent)  # as the next start does
        assert not folders["c"].exists()

    asyncio.run(story())
    text = "\n".join(site.notes)
    assert text.count("starting it again to send the weights (1 of") == 3
    assert "it cannot be started" in text
