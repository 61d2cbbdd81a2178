"""One copy of the weights per node, with real distributors over gloo that die or hang."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
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
from penstock.weights.distributor import Distributor
from penstock.weights.shared_memory import SharedMemorySync
from penstock.workers.pool.node_copies import NodeCopies
from penstock.workers.processes.process_worker import ProcessWorker
from penstock.workers.supervise.supervised import SupervisionCallbacks

pytestmark = pytest.mark.usefixtures("warm_workers")

COUNT = 2
SIZE = 10 * 2**20  # of each tensor, in numbers: 40 MiB, more than one bucket


def weights(value: int) -> Iterator[tuple[str, torch.Tensor]]:
    return ((f"w{n}", torch.full((SIZE,), float(value + n))) for n in range(COUNT))


class Mortal(Distributor):
    """A distributor that dies between two buckets if a file tells it to."""

    def __init__(self, folder: str, node: str, order: str, backend: str) -> None:
        super().__init__(folder, node=node, backend=backend, keeps_base=True)
        self._order = Path(order)

    @contextmanager
    def _joined(self, *how: Any) -> Iterator[Any]:
        with super()._joined(*how) as link:
            yield MortalLink(link, self._order)


class MortalLink:
    """Passes the first two parts of a sending on, and dies before the third."""

    def __init__(self, link: Any, order: Path) -> None:
        self._link, self._order, self._parts = link, order, itertools.count(1)

    def each(self, calls: Iterable[Callable[[Any], Any]]) -> Iterator[Any]:
        return self._link.each(
            lambda group, call=call: call(MortalGroup(group, self._order, self._parts))
            for call in calls
        )


class MortalGroup:
    """One of the connections."""

    def __init__(self, group: Any, order: Path, parts: Iterator[int]) -> None:
        self._group, self._order, self._parts = group, order, parts

    def broadcast_bucket(self, octets: torch.Tensor) -> None:
        if next(self._parts) == 3 and self._order.exists():
            self._order.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        self._group.broadcast_bucket(octets)


class Site:
    """A trainer on node a in this process, distributors in processes of their own; nodes can leave."""

    def __init__(self, folder: Path, backend: str, *, sends_deltas: bool = False) -> None:
        self._backend = backend
        self._logs = folder / "logs"
        self._logs.mkdir()
        (folder / "shm").mkdir()
        self.trainer = SharedMemorySync(folder / "shm", node="a")
        self.engine = SharedMemorySync()
        self.notes: list[str] = []
        self.started: list[str] = []
        self.gone: set[str] = set()
        callbacks = SupervisionCallbacks(waits=Waits(), note=self.notes.append)
        self.copies = NodeCopies(self._spawn, LaunchConfig(), callbacks, sends_deltas=sends_deltas)
        self.workers: dict[str, ProcessWorker] = {}

    async def _spawn(self, name: str, node: str, folder: str) -> ProcessWorker:
        if node in self.gone:
            raise WorkerDied(f"{name}: its node has left")
        self.started.append(node)
        self.workers[node] = await ProcessWorker.start(
            name,
            f"{__file__}:Mortal",
            folder,
            node,
            str(self._logs / f"kill-{node}"),
            self._backend,
            log_path=self._logs / f"{name}.log",
            threads=1,
            timeout_s=120,
        )
        return self.workers[node]

    def kill_in_the_middle(self, node: str) -> None:
        (self._logs / f"kill-{node}").touch()

    async def spread(self, handle: WeightHandle, *engines: int) -> list[WeightHandle]:
        return await spread(self.copies, handle, engines)

    def check(self, copies: list[WeightHandle]) -> None:
        """Assert that engines read there what was published under this version."""
        for own in copies:
            for number, (_, tensor) in enumerate(self.engine.fetch(own)):
                assert bool((tensor == own.version + number).all())

    async def close(self) -> None:
        class Nobody:
            async def call(self, method: str) -> None: ...

        trainer: Any = Nobody()
        await self.copies.close(trainer)


async def spread(
    copies: NodeCopies, handle: WeightHandle, engines: Iterable[int]
) -> list[WeightHandle]:
    """Return the copy of each engine; raise the first error after all have ended."""
    asked = (copies.copy_for(engine, handle) for engine in engines)
    found = await asyncio.gather(*asked, return_exceptions=True)
    for one in found:
        if isinstance(one, BaseException):
            raise one
    return [one for one in found if isinstance(one, WeightHandle)]


def broken_weights() -> Iterator[tuple[str, torch.Tensor]]:
    yield next(weights(6))
    raise MemoryError


class Scripted:
    """A distributor in memory that fails as its node's script says."""

    def __init__(self, name: str, node: str, scripts: dict[str, list[str]]) -> None:
        self.name, self.place, self._node, self._scripts = name, f"on {node}", node, scripts
        self.closed = False
        self.held: tuple[int, str] | None = None
        self.made: dict[tuple[int, str], tuple[int, str]] = {}  # version -> base of its delta

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        if self.closed:
            raise WorkerDied(f"{self.name}: it was closed")
        if method in ("send", "receive"):
            base, to = args[-1], (args[0].version, args[0].digest)
            if method == "receive":
                assert base in (None, self.held), "a delta builds on what the member holds"
            elif base not in (
                None,
                self.held,
                self.made.get(to),
            ):  # sent whole to another meanwhile
                raise RunError("weights which a delta builds on are not here")
        script = self._scripts.get(self._node)
        if method in ("send", "receive") and script:
            fault = script.pop(0)
            if fault == "dies":
                raise WorkerDied(f"{self.name}: the worker ended unexpectedly")
            if fault == "fails":
                raise RunError("broadcast group-1 ended: Connection closed by peer")
            if fault == "hangs":
                await asyncio.Event().wait()
        if method in ("send", "receive"):
            await asyncio.sleep(0)
            self.held = to
            self.made = {to: base} if base is not None else self.made
        if method == "receive":
            return replace(args[0], location={**args[0].location, "node": self._node})
        answers = {"meeting": ("address", 1), "send": 1}
        return answers.get(method, "folder")

    async def close(self) -> None:
        self.closed = True


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
    notes: list[str] = []

    async def spawn(name: str, node: str, folder: str) -> Any:
        if node in gone:
            raise WorkerDied(f"{name}: its node has left")
        return Scripted(name, node, scripts)

    async def story() -> None:
        callbacks = SupervisionCallbacks(waits=Waits(), note=notes.append)
        unbounded = LaunchConfig(max_restarts=1000)
        copies = NodeCopies(spawn, unbounded, callbacks, sends_deltas=True)
        for version, (nodes, faults, leaving) in enumerate(rounds, 1):
            gone.clear()
            gone.update(leaving)
            for node in leaving:
                copies._workers.pop(node, None)
            scripts.clear()
            for node, planned in faults.items():
                scripts[node] = planned[: 2 - sum(map(len, scripts.values()))]
            for engine, node in enumerate(nodes):
                copies.place_engine(engine, node)
            handle = WeightHandle(
                version=version,
                digest="d",
                kind="shared_memory",
                location={"node": "a", "size": 100},
            )
            asked = (copies.copy_for(engine, handle) for engine in range(len(nodes)))
            found = await asyncio.gather(*asked, return_exceptions=True)
            for node, copy in zip(nodes, found, strict=True):
                if node not in gone:
                    assert isinstance(copy, WeightHandle), copy
                    assert copy.location["node"] == node
                else:
                    assert isinstance(copy, WeightsGone)

    asyncio.run(story())


def test_a_member_that_hangs_is_replaced_once_another_has_failed() -> None:
    """The others fail within the timeout of a bucket."""
    scripts = {"b": ["hangs"], "a": ["fails"]}
    notes: list[str] = []
    made: list[Scripted] = []

    async def spawn(name: str, node: str, folder: str) -> Any:
        made.append(Scripted(name, node, scripts))
        return made[-1]

    async def story() -> None:
        callbacks = SupervisionCallbacks(waits=Waits(), note=notes.append)
        copies = NodeCopies(spawn, LaunchConfig(), callbacks, others_timeout_s=0.01)
        copies.place_engine(0, "b")
        handle = WeightHandle(
            version=1, digest="d", kind="shared_memory", location={"node": "a", "size": 100}
        )
        assert (await copies.copy_for(0, handle)).location == {"node": "b", "size": 100}

    asyncio.run(story())
    assert [one.closed for one in made] == [True, False, False]
    assert "distributor-1: it did not answer; starting it again to send the weights" in notes[2]


def test_another_node_sends_where_the_trainers_has_left() -> None:
    gone: set[str] = set()
    sent: list[str] = []

    class Sender(Scripted):
        async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
            if method == "send":
                sent.append(self._node)
            return await super().call(method, *args, **kwargs)

    async def spawn(name: str, node: str, folder: str) -> Any:
        if node in gone:
            raise WorkerDied(f"{name}: its node has left")
        return Sender(name, node, {})

    async def story() -> None:
        callbacks = SupervisionCallbacks(waits=Waits(), note=lambda text: None)
        copies = NodeCopies(spawn, LaunchConfig(), callbacks)
        for engine, node in enumerate("bc"):
            copies.place_engine(engine, node)
        handle = WeightHandle(
            version=1, digest="d", kind="shared_memory", location={"node": "a", "size": 100}
        )
        await copies.copy_for(0, handle)
        gone.add("a")
        copies._workers.pop("a")
        assert (await copies.copy_for(1, handle)).location == {"node": "c", "size": 100}
        lost = replace(handle, version=2)
        with pytest.raises(WeightsGone, match="no node is left that holds the newest weights"):
            await spread(copies, lost, [0, 1])

    asyncio.run(story())
    assert sent == ["a", "b"]


def test_a_late_engine_that_asks_at_the_end_of_a_run_starts_no_distributor() -> None:
    notes: list[str] = []
    asked = asyncio.Event()

    class Held(Scripted):
        ended = asyncio.Event()

        async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
            if method == "receive":
                asked.set()
                await self.ended.wait()
                raise WorkerDied(f"{self.name}: it was closed")
            return await super().call(method, *args, **kwargs)

        async def close(self) -> None:
            await super().close()
            self.ended.set()

    async def spawn(name: str, node: str, folder: str) -> Any:
        return Held(name, node, {})

    async def story() -> None:
        callbacks = SupervisionCallbacks(waits=Waits(), note=notes.append)
        copies = NodeCopies(spawn, LaunchConfig(), callbacks, others_timeout_s=0.01)
        copies.place_engine(0, "b")
        handle = WeightHandle(
            version=1, digest="d", kind="shared_memory", location={"node": "a", "size": 100}
        )
        late = asyncio.create_task(copies.copy_for(0, handle))
        await asked.wait()
        await copies.close(Scripted("trainer", "a", {}))  # type: ignore[arg-type]
        with pytest.raises(WeightsGone):
            await late

    asyncio.run(story())
    assert len(notes) == 2
    assert all("passes weights on" in note for note in notes)


def test_a_delta_is_sent_where_both_hold_the_same_and_the_user_is_told_once() -> None:
    notes: list[str] = []
    bases: list[tuple[str, Any]] = []

    class Seen(Scripted):
        async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
            if method in ("send", "receive"):
                bases.append((self._node, args[-1]))
            return await super().call(method, *args, **kwargs)

    async def spawn(name: str, node: str, folder: str) -> Any:
        return Seen(name, node, {})

    async def story() -> None:
        callbacks = SupervisionCallbacks(waits=Waits(), note=notes.append)
        copies = NodeCopies(spawn, LaunchConfig(), callbacks, sends_deltas=True)
        copies.place_engine(0, "b")
        copies.place_engine(1, "c")
        handle = WeightHandle(
            version=1, digest="d", kind="shared_memory", location={"node": "a", "size": 100}
        )
        for version, engines in ((1, [0]), (2, [0]), (3, [0]), (3, [0, 1]), (4, [0, 1])):
            await spread(copies, replace(handle, version=version), engines)

    asyncio.run(story())
    first, second, third = (1, "d"), (2, "d"), (3, "d")
    assert bases == [
        *(("a", None), ("b", None)),  # the start
        *(("a", first), ("b", first)),
        *(("a", second), ("b", second)),
        *(("a", None), ("c", None)),  # a node joins and gets the whole weights
        *(("a", third), ("b", third), ("a", third), ("c", third)),
    ]
    assert [note for note in notes if "delta" in note] == [
        "weights: the first delta was 1e-06 MB of 0.0001 MB"
    ]


class Timed(Scripted):
    """A distributor whose receiving takes the time that its node's link takes."""

    links: ClassVar[dict[str, float]] = {}
    sent: ClassVar[list[tuple[float, str, str]]] = []  # when a copy was there, and on which way

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        if method == "receive":
            await asyncio.sleep(self.links.get(self._node, 1.0))
            source = args[0].location["node"]
            self.sent.append((asyncio.get_running_loop().time(), source, self._node))
        if method == "send":
            to = args[1].split("-")[1]
            await asyncio.sleep(self.links.get(to, 1.0))
        return await super().call(method, *args, **kwargs)


def spread_in_time(
    clock: VirtualClock, nodes: str, links: dict[str, float], scripts: dict[str, list[str]]
) -> tuple[dict[str, float], list[tuple[str, str]]]:
    """Spread two publications; return when each node had the second, and the ways it took."""

    async def spawn(name: str, node: str, folder: str) -> Any:
        return Timed(name, node, scripts if node in scripts else {})

    async def story() -> dict[str, float]:
        callbacks = SupervisionCallbacks(waits=Waits(), note=lambda text: None)
        copies = NodeCopies(spawn, LaunchConfig(), callbacks)
        for engine, node in enumerate(nodes):
            copies.place_engine(engine, node)
        found: dict[str, float] = {}
        first = WeightHandle(
            version=1, digest="d", kind="shared_memory", location={"node": "a", "size": 100}
        )
        Timed.links = {}
        await spread(copies, first, range(len(nodes)))
        Timed.links, began = links, clock.now
        Timed.sent.clear()

        async def one(engine: int) -> None:
            copy = await copies.copy_for(engine, replace(first, version=2))
            found[copy.location["node"]] = clock.now - began

        await asyncio.gather(*map(one, range(len(nodes))))
        return found

    times = clock.run(story())
    return times, [(source, node) for _, source, node in sorted(Timed.sent)]


@pytest.fixture
def clock() -> Iterator[VirtualClock]:
    made = VirtualClock()
    yield made
    made.close()


def test_nodes_pass_the_weights_on_as_a_tree(clock: VirtualClock) -> None:
    """Eleven nodes and the trainer's: after each second every node with a copy has made two more."""
    times, ways = spread_in_time(clock, "bcdefghijkl", {}, {})
    assert sorted(times.values()) == pytest.approx([1.0] * 2 + [2.0] * 6 + [3.0] * 3)
    assert max(Counter(source for source, _ in ways).values()) <= 6
    assert len(ways) == 11


def test_a_slow_node_delays_only_itself(clock: VirtualClock) -> None:
    times, _ = spread_in_time(clock, "bcdefghijkl", {"b": 100.0, "c": 100.0}, {})
    assert times.pop("b") >= 100.0
    assert times.pop("c") >= 100.0
    assert max(times.values()) <= 5.5  # two of them while the slow ones keep the only sender


def test_a_node_whose_sender_dies_gets_the_weights_from_another(clock: VirtualClock) -> None:
    times, ways = spread_in_time(clock, "bcdefg", {}, {"b": ["", "dies"]})
    assert set(times) == set("bcdefg")
    assert max(times.values()) <= 4.0
    assert len(ways) >= 6


SPARSE = 20 * 2**20  # bfloat16 numbers: 40 MiB, more than one bucket


def sparse(version: int) -> torch.Tensor:
    """Return weights of which each version changes one in a hundred, by one unit in the last place."""
    bits = torch.arange(SPARSE, dtype=torch.int32).mul_(7919).remainder_(1 << 14)
    for one in range(1, version + 1):
        bits[one::100] += 1
    return bits.to(torch.int16).view(torch.bfloat16)


@pytest.mark.slow
def test_deltas_give_every_node_the_same_bits_whoever_dies_or_joins_late(tmp_path: Path) -> None:
    site = Site(tmp_path, "gloo", sends_deltas=True)
    for engine, node in enumerate("abc"):
        site.copies.place_engine(engine, node)
    sent: Counter[int] = Counter()  # version -> most bytes of one sending
    spawn = site.copies._spawn

    async def counting(name: str, node: str, folder: str) -> ProcessWorker:
        worker = await spawn(name, node, folder)
        call = worker.call

        async def counted(method: str, *args: Any) -> Any:
            answer = await call(method, *args)
            if method == "send":
                sent[args[0].version] = max(sent[args[0].version], answer)
            return answer

        worker.call = counted
        return worker

    site.copies._spawn = counting

    async def publish(version: int, *engines: int) -> None:
        wanted = sparse(version)
        handle = site.trainer.publish(version, f"d{version}", [("w", wanted)])
        for copy in await site.spread(handle, *engines):
            ((_, found),) = site.engine.fetch(copy)
            assert torch.equal(found.view(torch.int16), wanted.view(torch.int16))

    async def story() -> None:
        await publish(1, 0, 1)  # a cold start
        await publish(2, 0, 1)
        site.kill_in_the_middle("b")  # a receiver dies between two buckets of a delta
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
    assert [sent[version] >= whole for version in sent] == [
        *(True, False, True, False),  # start, delta, after the death, delta
        *(True, False, True, False),  # the late node, delta, after the death, delta
    ]
    assert all(size * 20 < whole for size in sent.values() if size < whole)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["gloo", pytest.param("nccl", marks=pytest.mark.gpu)])
def test_one_copy_for_each_node_whoever_joins_dies_or_leaves(tmp_path: Path, backend: str) -> None:
    if backend == "nccl" and torch.cuda.device_count() < 4:
        pytest.skip("NCCL needs a GPU for each of the four processes")
    site = Site(tmp_path, backend)
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
        folders = {node: Path(name) for node, name in site.copies._folders.items()}
        await site.close()
        assert {node for node, folder in folders.items() if folder.exists()} <= {"c"}
        sweep(folders["c"].parent)  # as the next start does
        assert not folders["c"].exists()

    asyncio.run(story())
    text = "\n".join(site.notes)
    assert text.count("starting it again to send the weights (1 of") == 3
    assert "it cannot be started" in text
