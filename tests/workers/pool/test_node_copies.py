"""One copy of the weights per node, with real distributors that die, and with others that hang."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config import LaunchConfig
from penstock.errors import RunError, WeightsGone, WorkerDied
from penstock.files import sweep
from penstock.run.twin.virtual_time import VirtualClock
from penstock.types import WeightHandle
from penstock.waits import Waits
from penstock.weights.protocol import Endpoint
from penstock.weights.shared_memory import SharedMemorySync
from penstock.workers.part_factories import DISTRIBUTOR
from penstock.workers.pool import weights as pool_weights
from penstock.workers.pool.weights import NodeCopies
from penstock.workers.processes.process_worker import ProcessWorker
from penstock.workers.supervise.supervised import SupervisionCallbacks

pytestmark = pytest.mark.usefixtures("warm_workers")

COUNT = 2
SIZE = 10 * 2**20  # of each tensor, in numbers: 40 MiB, more than one bucket
HANDLE = WeightHandle(
    version=1, digest="d", kind="shared_memory", location={"node": "a", "size": 100}
)


def weights(value: int) -> Iterator[tuple[str, torch.Tensor]]:
    return ((f"w{n}", torch.full((SIZE,), float(value + n))) for n in range(COUNT))


def broken_weights() -> Iterator[tuple[str, torch.Tensor]]:
    yield next(weights(6))
    raise MemoryError


class Nobody:
    """A trainer that has no weights to remove."""

    async def call(self, method: str) -> None: ...


TRAINER: Any = Nobody()


async def spread(
    copies: NodeCopies, handle: WeightHandle, engines: Iterable[int]
) -> list[WeightHandle]:
    """Return the copy of each engine; raise the first error after all have ended."""
    calls = (copies.copy_for(engine, handle) for engine in engines)
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if isinstance(result, WeightHandle)]


# ---- distributors in memory


class Scripted:
    """A distributor in memory that fails as its node's script says."""

    can_be_killed = True

    def __init__(self, name: str, node: str, scripts: dict[str, list[str]] | None = None) -> None:
        self.name, self.place, self.node = name, f"on {node}", node
        self._scripts = scripts or {}
        self._ended = asyncio.Event()

    async def call(self, method: str, *args: Any) -> Any:
        if self._ended.is_set():
            raise WorkerDied(f"{self.name}: it was closed")
        if method == "receive":
            await self._play(self.node)
            source = args[0]
            return replace(source, location={**source.location, "node": self.node}), 100
        if method == "endpoint":
            await self._play(f"answer of {self.node}")
        return Endpoint(folder="folder", address=self.node, port=1, token="")

    async def _play(self, role: str) -> None:
        await asyncio.sleep(0)
        script = self._scripts.get(role)
        fault = script.pop(0) if script else ""
        if fault == "dies":
            self._ended.set()
            raise WorkerDied(f"{self.name}: the worker ended unexpectedly")
        if fault == "fails":
            raise RunError("no weights from there: the connection was closed")
        if fault == "hangs":
            await self._ended.wait()
            raise WorkerDied(f"{self.name}: it was killed")

    async def ended(self) -> str:
        await self._ended.wait()
        return f"{self.name}: the worker ended"

    async def stack(self) -> str:
        return ""

    async def activity(self) -> float | None:
        return None

    async def kill(self) -> None:
        self._ended.set()

    async def close(self) -> None:
        self._ended.set()


@asynccontextmanager
async def copies_of(
    nodes: Iterable[str],
    worker: type[Scripted] = Scripted,
    *,
    scripts: dict[str, list[str]] | None = None,
    gone: Iterable[str] = (),
    notes: list[str] | None = None,
    max_restarts: int = 3,
    started: list[Scripted] | None = None,
) -> AsyncIterator[NodeCopies]:
    """Yield the copies of these nodes, one engine on each; distributors do not start on `gone` nodes."""

    async def spawn(name: str, node: str, folder: str) -> Any:
        if node in gone:
            raise WorkerDied(f"{name}: its node has left")
        distributor = worker(name, node, scripts)
        if started is not None:
            started.append(distributor)
        return distributor

    told = [] if notes is None else notes
    callbacks = SupervisionCallbacks(waits=Waits(), note=told.append)
    launch = LaunchConfig(max_restarts=max_restarts, restart_backoff_s=0)
    copies = NodeCopies(spawn, launch, callbacks)
    for engine, node in enumerate(nodes):
        copies.place_engine(engine, node)
    try:
        yield copies
    finally:
        await copies.close(TRAINER)


FAULTS = st.lists(st.sampled_from(["dies", "fails"]), max_size=2)


@given(
    rounds=st.lists(
        st.tuples(
            st.lists(st.sampled_from("abcd"), min_size=1, max_size=5),  # node of each engine
            st.dictionaries(st.sampled_from("abcd"), FAULTS, max_size=3),
            st.sets(st.sampled_from("bcd"), max_size=2),  # nodes that have left
        ),
        min_size=1,
        max_size=4,
    )
)
@settings(max_examples=80, deadline=None)
def test_whatever_fails_every_node_that_can_be_reached_gets_its_copy(rounds: list) -> None:
    """Two faults per publication are survived."""
    scripts: dict[str, list[str]] = {}
    gone: set[str] = set()
    started: list[Scripted] = []

    async def story() -> None:
        async with copies_of(
            "", scripts=scripts, gone=gone, max_restarts=1000, started=started
        ) as copies:
            for version, (nodes, faults, leaving) in enumerate(rounds, 1):
                scripts.clear()
                for node, planned in faults.items():
                    scripts[node] = planned[: 2 - sum(map(len, scripts.values()))]
                for engine, node in enumerate(nodes):
                    copies.place_engine(engine, node)
                gone.clear()
                known = {distributor.node for distributor in started}
                gone.update(node for node in leaving if node not in known)
                calls = (
                    copies.copy_for(engine, replace(HANDLE, version=version))
                    for engine in range(len(nodes))
                )
                results = await asyncio.gather(*calls, return_exceptions=True)
                for node, copy in zip(nodes, results, strict=True):
                    if node not in gone:
                        assert isinstance(copy, WeightHandle), copy
                        assert copy.location["node"] == node
                    else:
                        assert isinstance(copy, WeightsGone)

    asyncio.run(story())


def test_a_sender_that_hangs_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The receiver hears nothing and says so; the sender does not answer the driver either."""
    monkeypatch.setattr(pool_weights, "_ANSWER_TIMEOUT_S", 0.01)
    notes: list[str] = []
    scripts = {"b": ["fails"], "answer of a": ["", "hangs"]}

    async def story() -> None:
        async with copies_of("b", scripts=scripts, notes=notes) as copies:
            assert (await copies.copy_for(0, HANDLE)).location["node"] == "b"

    asyncio.run(story())
    assert any("distributor-2: it did not answer; starting it again (1 of 3)" in n for n in notes)


def test_another_node_sends_where_the_trainers_has_left() -> None:
    gone: set[str] = set()
    senders: list[str] = []
    started: list[Scripted] = []

    class Receiver(Scripted):
        async def call(self, method: str, *args: Any) -> Any:
            if method == "receive":
                senders.append(args[1].address)
            return await super().call(method, *args)

    async def story() -> None:
        async with copies_of("bc", Receiver, gone=gone, started=started) as copies:
            await copies.copy_for(0, HANDLE)
            gone.add("a")
            for distributor in started:
                if distributor.node == "a":
                    await distributor.kill()
            assert (await copies.copy_for(1, HANDLE)).location["node"] == "c"
            with pytest.raises(WeightsGone, match="no node is left that holds the newest weights"):
                await spread(copies, replace(HANDLE, version=2), [0, 1])

    asyncio.run(story())
    assert senders[0] == "a"
    assert senders[-1] == "b"


def test_distributors_that_start_together_have_names_of_their_own() -> None:
    notes: list[str] = []

    async def story() -> None:
        async with copies_of("bcd", notes=notes) as copies:
            await spread(copies, HANDLE, range(3))

    asyncio.run(story())
    names = [note.split(":")[0] for note in notes]
    assert sorted(names) == [f"distributor-{number}" for number in (1, 2, 3, 4)]


def test_an_engine_that_asks_at_the_end_of_a_run_starts_no_distributor() -> None:
    notes: list[str] = []
    started: list[Scripted] = []

    is_asked = asyncio.Event()

    class Receiver(Scripted):
        async def call(self, method: str, *args: Any) -> Any:
            if method == "receive":
                is_asked.set()
            return await super().call(method, *args)

    async def story() -> None:
        hangs = {"b": ["hangs"]}
        async with copies_of("b", Receiver, scripts=hangs, notes=notes, started=started) as copies:
            late = asyncio.create_task(copies.copy_for(0, HANDLE))
            await is_asked.wait()
        with pytest.raises(WeightsGone):
            await late

    asyncio.run(story())
    assert [distributor.node for distributor in started] == ["b", "a"]
    assert all("passes weights on" in note for note in notes)


class Timed(Scripted):
    """A distributor whose receiving takes the time that its node's link takes."""

    links: ClassVar[dict[str, float]] = {}
    ways: ClassVar[list[tuple[str, str]]] = []  # sender and receiver of each copy

    async def call(self, method: str, *args: Any) -> Any:
        if method == "receive":
            await asyncio.sleep(self.links.get(self.node, 1.0))
            self.ways.append((args[1].address, self.node))
        return await super().call(method, *args)


def spread_in_time(
    clock: VirtualClock,
    nodes: str,
    links: dict[str, float],
    scripts: dict[str, list[str]] | None = None,
) -> tuple[dict[str, float], list[tuple[str, str]]]:
    """Spread two publications; return when each node had the second, and the ways it took."""

    async def story() -> dict[str, float]:
        async with copies_of(nodes, Timed, scripts=scripts) as copies:
            arrived: dict[str, float] = {}
            Timed.links = {}
            await spread(copies, HANDLE, range(len(nodes)))
            Timed.links, began = links, clock.now
            Timed.ways.clear()

            async def receive(engine: int) -> None:
                copy = await copies.copy_for(engine, replace(HANDLE, version=2))
                arrived[copy.location["node"]] = clock.now - began

            await asyncio.gather(*map(receive, range(len(nodes))))
            return arrived

    return clock.run(story()), list(Timed.ways)


@pytest.fixture
def clock() -> Iterator[VirtualClock]:
    virtual = VirtualClock()
    yield virtual
    virtual.close()


def test_nodes_pass_the_weights_on_as_a_tree(clock: VirtualClock) -> None:
    """Eleven nodes and the trainer's: after each second every node with a copy has made two more."""
    times, ways = spread_in_time(clock, "bcdefghijkl", {})
    assert sorted(times.values()) == pytest.approx([1.0] * 2 + [2.0] * 6 + [3.0] * 3)
    assert max(Counter(source for source, _ in ways).values()) <= 6
    assert len(ways) == 11


def test_a_node_whose_sender_dies_gets_the_weights_from_another(clock: VirtualClock) -> None:
    times, ways = spread_in_time(clock, "bcdefg", {}, {"b": ["", "dies"]})
    assert set(times) == set("bcdefg")
    assert max(times.values()) <= 4.0
    assert len(ways) >= 6


# ---- real distributors in processes of their own

KILL_AFTER_BYTES = 10_000  # less than the delta of a bucket has


class Site:
    """A trainer on node a in this process, distributors in processes of their own; nodes can leave.

    What a distributor sends passes a proxy, which can kill the sender or the receiver on the way.
    """

    def __init__(self, folder: Path, *, sends_deltas: bool = False) -> None:
        self._logs, self._sends_deltas = folder / "logs", sends_deltas
        self._logs.mkdir()
        (folder / "shm").mkdir()
        self.trainer = SharedMemorySync(folder / "shm", node="a")
        self.engine = SharedMemorySync()
        self.notes: list[str] = []
        self.started: list[str] = []
        self.folders: dict[str, Path] = {}
        self.gone: set[str] = set()
        self.received: dict[int, list[int]] = {}  # version -> bytes of each copy
        self._workers: dict[str, ProcessWorker] = {}
        self._kill = ""
        self._proxies: list[asyncio.Server] = []
        callbacks = SupervisionCallbacks(waits=Waits(), note=self.notes.append)
        self.copies = NodeCopies(self._spawn, LaunchConfig(restart_backoff_s=0), callbacks)

    async def _spawn(self, name: str, node: str, folder: str) -> ProcessWorker:
        if node in self.gone:
            raise WorkerDied(f"{name}: its node has left")
        self.started.append(node)
        worker = self._workers[node] = await ProcessWorker.start(
            name,
            DISTRIBUTOR,
            folder,
            node,
            "127.0.0.1",
            self._sends_deltas,
            log_path=self._logs / f"{name}.log",
            threads=1,
            timeout_s=120,
        )
        call = worker.call
        endpoint = await call("endpoint")
        self.folders[node] = Path(endpoint.folder)
        proxy = await asyncio.start_server(
            lambda reader, writer: self._pass_on(endpoint, reader, writer), "127.0.0.1", 0
        )
        self._proxies.append(proxy)
        proxied = replace(endpoint, port=proxy.sockets[0].getsockname()[1])

        async def watched(method: str, *args: Any) -> Any:
            answer = proxied if method == "endpoint" else await call(method, *args)
            if method == "receive":
                self.received.setdefault(args[0].version, []).append(answer[1])
            return answer

        worker.call = watched  # type: ignore[method-assign]
        return worker

    async def _pass_on(
        self, endpoint: Endpoint, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        source, sender = await asyncio.open_connection(endpoint.address, endpoint.port)
        sender.write(await reader.readline())
        count = 0
        with contextlib.suppress(ConnectionError):
            while data := await source.read(1 << 20):
                count += len(data)
                if self._kill and count > KILL_AFTER_BYTES:
                    node, self._kill = self._kill, ""
                    os.kill(self._workers[node].pid, signal.SIGKILL)
                    break
                writer.write(data)
                await writer.drain()
        sender.close()
        writer.close()

    def kill_in_the_middle(self, node: str) -> None:
        self._kill = node

    async def spread(self, handle: WeightHandle, *engines: int) -> list[WeightHandle]:
        return await spread(self.copies, handle, engines)

    def check(self, copies: list[WeightHandle]) -> None:
        """Assert that engines read there what was published under this version."""
        for copy in copies:
            for number, (_, tensor) in enumerate(self.engine.fetch(copy)):
                assert bool((tensor == copy.version + number).all())

    async def close(self) -> None:
        await self.copies.close(TRAINER)
        for proxy in self._proxies:
            proxy.close()


SPARSE = 20 * 2**20  # bfloat16 numbers: 40 MiB, more than one bucket


def sparse(version: int) -> torch.Tensor:
    """Return weights of which each version changes one in a hundred, by one unit in the last place."""
    bits = torch.arange(SPARSE, dtype=torch.int32).mul_(7919).remainder_(1 << 14)
    for first in range(1, version + 1):
        bits[first::100] += 1
    return bits.to(torch.int16).view(torch.bfloat16)


@pytest.mark.slow
def test_deltas_give_every_node_the_same_bits_whoever_dies_or_joins_late(tmp_path: Path) -> None:
    site = Site(tmp_path, sends_deltas=True)
    for engine, node in enumerate("abc"):
        site.copies.place_engine(engine, node)

    async def publish(version: int, *engines: int) -> None:
        expected = sparse(version)
        handle = site.trainer.publish(version, f"d{version}", [("w", expected)])
        for copy in await site.spread(handle, *engines):
            ((_, tensor),) = site.engine.fetch(copy)
            assert torch.equal(tensor.view(torch.int16), expected.view(torch.int16))

    async def story() -> None:
        await publish(1, 0, 1)  # a cold start
        await publish(2, 0, 1)
        site.kill_in_the_middle("b")  # a receiver dies
        await publish(3, 0, 1)
        await publish(4, 0, 1)
        await publish(5, 0, 1, 2)  # a node joins late
        await publish(6, 0, 1, 2)
        site.kill_in_the_middle("a")  # the sender
        await publish(7, 0, 1, 2)
        await publish(8, 0, 1, 2)
        await site.close()

    asyncio.run(story())
    whole = 2 * SPARSE
    assert [max(site.received[version]) >= whole for version in range(1, 9)] == [
        *(True, False, True, False),  # start, delta, after the death, delta
        *(True, False, True, False),  # the late node, delta, after the death, delta
    ]
    sizes = [size for sizes in site.received.values() for size in sizes]
    assert all(size * 20 < whole for size in sizes if size < whole)
    (note,) = [note for note in site.notes if note.startswith("weights: ")]
    assert re.fullmatch(r"weights: the first delta was 0\.0\d+ MB of 41\.9 MB", note)


@pytest.mark.slow
def test_one_copy_for_each_node_whoever_joins_dies_or_leaves(tmp_path: Path) -> None:
    site = Site(tmp_path)
    for engine, node in enumerate("abbc"):
        site.copies.place_engine(engine, node)

    async def story() -> None:
        published = site.trainer.publish(1, "d1", weights(1))
        first = await site.spread(published, 0, 1, 2)
        site.check(first)
        assert sorted(site.started) == ["a", "b"]  # two engines of b share one copy
        site.check(await site.spread(published, 3))  # a node joins and gets the same
        assert sorted(site.started) == ["a", "b", "c"]

        held = list(site.engine.fetch(first[1]))
        for version, node in ((2, "b"), (3, "a")):  # a receiver, the sender
            site.kill_in_the_middle(node)
            handle = site.trainer.publish(version, f"d{version}", weights(version))
            site.check(await site.spread(handle, 0, 1, 3))
            assert site.started[-1] == node
            assert bool((held[0][1] == 1).all())  # tensors that are held do not change

        site.gone.add("c")  # a node leaves
        site.kill_in_the_middle("c")
        fifth = site.trainer.publish(5, "d5", weights(5))
        with pytest.raises(WeightsGone, match="have not reached node c"):
            await site.spread(fifth, 0, 1, 3)
        site.check(await site.spread(fifth, 0, 1))

        announced = site.trainer.announce(6, "d6")  # the trainer fails in the middle
        assert announced is not None
        sending = asyncio.create_task(site.spread(announced, 0, 1))
        with pytest.raises(MemoryError):
            await asyncio.to_thread(site.trainer.publish, 6, "d6", broken_weights())
        with pytest.raises(WeightsGone):
            await sending
        site.check(await site.spread(site.trainer.publish(7, "d7", weights(7)), 0, 1))
        await site.close()
        assert {node for node, folder in site.folders.items() if folder.exists()} <= {"c"}
        sweep(site.folders["c"].parent)  # as the next start does
        assert not site.folders["c"].exists()

    asyncio.run(story())
    text = "\n".join(site.notes)
    assert text.count("starting it again (1 of") == 3
    assert "weights do not reach node c" in text
