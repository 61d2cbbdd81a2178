"""The trainer as the loop sees it: one or several rank workers that are restarted when they die.

`RankGroup` presents several rank workers as one worker (one rank alone is the worker itself): each rank
gets its share of a batch's groups (ranks of one copy of the model get the same share), and the end of one
rank ends all of them.
`RestartingTrainer` repeats a call after a restart; `restart_with` says how a new worker gets the state of
the old one (newest checkpoint, then redo from the journal).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import replace
from typing import Any, TypeVar

from penstock.config import Config, ParallelConfig
from penstock.errors import WorkerDied, WrongStep
from penstock.types import Batch, StepReport, WeightHandle
from penstock.waits import all_results, end_all
from penstock.workers.pool.pool import EnginePool
from penstock.workers.supervise.supervised import Call, Restarts, Supervised, Worker, nothing

_OTHERS_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 5.0
# Methods without a collective inside: no rank waits for one that failed.
_EACH_BY_ITSELF = ("write_snapshot", "progress")


def publishes_after(config: Config, step: int, total_steps: int) -> bool:
    """Whether the weights of this step are published to the engines."""
    return step % config.sync.every_steps == 0 or step == total_steps


class RankGroup:
    """See `Worker`: several trainer ranks as one."""

    can_be_killed = True

    def __init__(self, ranks: Sequence[Worker], parallel: ParallelConfig | None = None) -> None:
        self.name = "trainer"
        self._ranks = list(ranks)
        layout = parallel or ParallelConfig()
        self._share_of = [layout.data_index(number, len(ranks)) for number in range(len(ranks))]

    @property
    def place(self) -> str:
        return ", ".join(f"{rank.name} {rank.place}" for rank in self._ranks)

    async def call(self, method: str, *args: Any) -> Any:
        if method == "train":
            results = await self._each(
                [rank.call("train", share) for rank, share in self._shares(*args)]
            )
            shares = range(max(self._share_of) + 1)
            reports = [results[self._share_of.index(share)] for share in shares]
            turns = itertools.zip_longest(*(report.trained for report in reports))
            return replace(
                reports[0], trained=tuple(group for turn in turns for group in turn if group)
            )
        wait = all_results if method in _EACH_BY_ITSELF else self._each
        results = await wait([rank.call(method, *args) for rank in self._ranks])
        return tuple(results) if method == "progress" else results[0]

    def _shares(self, batch: Batch) -> list[tuple[Worker, Batch]]:
        """Give every n-th group to a share of the ranks, as `rank_share` in the trainer expects."""
        count = max(self._share_of) + 1
        return [
            (rank, replace(batch, groups=batch.groups[share::count]))
            for rank, share in zip(self._ranks, self._share_of, strict=True)
        ]

    async def _each(self, calls: Iterable[Awaitable[Any]]) -> list[Any]:
        """All answers. If one rank raises, kill the ranks that still wait for it in a collective.

        If a rank died, report that death: the other ranks' errors only follow from it.
        """
        tasks = [asyncio.ensure_future(call) for call in calls]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            faults = [fault for task in done if (fault := task.exception()) is not None]
            if not faults:
                return [task.result() for task in tasks]
            _, waiting = await asyncio.wait(tasks, timeout=_OTHERS_TIMEOUT_S)
            if waiting:
                await self.kill()
                raise WorkerDied(f"trainer: one rank failed and the others hung: {faults[0]}")
            every = [fault for task in tasks if (fault := task.exception()) is not None]
            raise next((fault for fault in every if isinstance(fault, WorkerDied)), faults[0])
        finally:
            await end_all(tasks)

    async def ended(self) -> str:
        tasks = [asyncio.create_task(rank.ended()) for rank in self._ranks]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            await end_all(tasks)

    async def stack(self) -> str:
        stacks = await asyncio.gather(*(rank.stack() for rank in self._ranks))
        return "\n".join(
            f"{rank.name}:\n{text}" for rank, text in zip(self._ranks, stacks, strict=True)
        )

    async def activity(self) -> float | None:
        spent = await asyncio.gather(*(rank.activity() for rank in self._ranks))
        known = [seconds for seconds in spent if seconds is not None]
        return sum(known) if known else None

    async def kill(self) -> None:
        await asyncio.gather(*(rank.kill() for rank in self._ranks))

    async def close(self) -> None:
        await asyncio.gather(*(rank.close() for rank in self._ranks))


def as_one_worker(ranks: Sequence[Worker], parallel: ParallelConfig) -> Worker:
    """The ranks of a trainer as one worker; a rank alone is that worker."""
    return ranks[0] if len(ranks) == 1 else RankGroup(ranks, parallel)


class TrainerClient:
    """The trainer as the loop sees it: every method is a call of a trainer worker, wherever it runs."""

    def __init__(self, call: Call) -> None:
        self._call = call

    async def train(self, batch: Batch) -> StepReport:
        """Do one update."""
        report: StepReport = await self._call("train", batch)
        return report

    async def publish(self) -> WeightHandle:
        """Copy the current weights out for the engines."""
        handle: WeightHandle = await self._call("publish")
        return handle

    async def engines_loaded(self) -> None:
        """Go on after the engines have loaded the weights of a step; colocated, they wake now."""

    async def snapshot(self, folder: str) -> tuple[int, str]:
        """Copy the whole training state, to be written to `folder`; return its step and digest."""
        identity: tuple[int, str] = await self._call("snapshot", folder)
        return identity

    async def write_snapshot(self) -> None:
        """Write that copy while training continues."""
        await self._call("write_snapshot")

    async def load(self, folder: str) -> tuple[int, str]:
        """Restore a snapshot; return its step and digest."""
        identity: tuple[int, str] = await self._call("load", folder)
        return identity

    async def identity(self) -> tuple[int, str]:
        """The policy version and the digest of its weights."""
        identity: tuple[int, str] = await self._call("identity")
        return identity

    async def is_exact(self) -> bool:
        """Whether the same step repeated here gives the same bits."""
        return bool(await self._call("is_exact"))

    async def adapters(self) -> str:
        """Which layers have adapters, in one line; empty if all weights are trained."""
        return str(await self._call("adapters"))

    async def request_stop(self) -> None:
        """Make a running `train` give up before it changes the weights."""
        await self._call("request_stop")


class RestartingTrainer(TrainerClient):
    """A trainer whose calls are repeated on the restored worker after a death."""

    def __init__(self, supervised: Supervised) -> None:
        super().__init__(self.call)
        self.supervised = supervised
        self._published: tuple[WeightHandle, Worker | None] | None = None  # newest, and its writer
        self._writing: asyncio.Task[WeightHandle] | None = None
        self._publishing = asyncio.Lock()

    def restart_with(
        self,
        restore: Callable[[TrainerClient], Awaitable[None]],
        start_context: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
        when_back: Callable[[], Awaitable[None]] = nothing,
    ) -> None:
        """From now on, restart a trainer that dies; `restore` brings it to its last state."""
        self._restore, self._unrestored = restore, self.supervised.worker
        self.supervised.restart_with(
            Restarts(
                prepare=lambda call: restore(TrainerClient(call)),
                start_context=start_context,
                when_back=when_back,
            )
        )

    async def restored(self) -> None:
        """Bring the worker to its last state; one that dies meanwhile is restarted, which restores it."""
        supervised = self.supervised

        async def call(method: str, *args: Any) -> Any:
            if supervised.worker is not self._unrestored:  # its successor was restored at its start
                raise WorkerDied("trainer: it was started again")
            return await supervised.call(method, *args)

        try:
            await self._restore(TrainerClient(call))
        except WorkerDied:
            await self.supervised.ready()

    async def call(self, method: str, *args: Any) -> Any:
        """Call the worker; if it dies, call the restored one."""
        while True:
            try:
                await self._publish_again()
                return await self.supervised.call(method, *args)
            except WorkerDied:
                await self.supervised.ready()

    async def train(self, batch: Batch) -> StepReport:
        """Train a step; a worker that is at another step is replaced and restored from the journal."""
        await self._written()
        try:
            report: StepReport = await self.call("train", batch)
        except WrongStep as error:
            if not self.supervised.can_restart:
                raise
            await self.supervised.replace(str(error))
            report = await self.call("train", batch)
        return report

    async def publish(self) -> WeightHandle:
        """As soon as engines may begin to read; `train` waits for the rest of the writing."""
        await self._written()
        handle: WeightHandle | None = await self.call("announce")
        if handle is None:
            handle = await super().publish()
        else:
            writing = self.supervised.call("publish")
            self._writing = asyncio.create_task(writing, name="write weights")
            self._writing.add_done_callback(lambda task: task.cancelled() or task.exception())
        self._published = (handle, self.supervised.worker)
        return handle

    async def _written(self) -> None:
        """Wait for a publication under way; one that died with its worker is repeated later."""
        if self._writing is not None:
            with contextlib.suppress(WorkerDied):
                await asyncio.shield(self._writing)
            self._writing = None

    async def _publish_again(self) -> None:
        """Let a restarted worker publish what it was restored to, before it trains anything.

        That is the version that its predecessor had published, or a later committed one. Where bits
        do not repeat, redone weights have another digest, and there are no others.
        """
        async with self._publishing:
            worker = self.supervised.worker
            if self._published is None or worker is None or worker is self._published[1]:
                return
            self._published = (await self.supervised.call("publish"), worker)

    async def renewed(self, handle: WeightHandle) -> WeightHandle:
        """A handle that can be read, in the place of one that cannot.

        Memory of a GPU ends with the process that reserved it. If the next worker is past the lost
        version, the handle is of that worker's version, as in a resumed run.
        """
        await self._written()
        while True:
            await self.supervised.ready()
            try:
                await self.supervised.call("progress")  # raises at once if the worker is dead
                await self._publish_again()
                break
            except WorkerDied:
                continue
        newest = handle if self._published is None else self._published[0]
        if newest.version != handle.version:
            self.supervised.events.replaced(newest.version, newest.digest)
        return newest

    async def write_snapshot(self) -> None:
        """Do not repeat this call after a death: the copied state was lost with the worker."""
        await self.supervised.call("write_snapshot")

    async def request_stop(self) -> None:
        """Ask the worker to stop; do without the answer of one that is dead or blocked."""
        if self.supervised.worker is not None:
            with contextlib.suppress(WorkerDied, TimeoutError):
                async with asyncio.timeout(_STOP_TIMEOUT_S):
                    await self.supervised.call("request_stop")

    async def close(self) -> None:
        """Close the worker, and end a publication whose answer never came."""
        await self.supervised.close()
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.wait([self._writing])


def reserve_port(address: str) -> socket.socket:
    """A bound socket for rank 0; its port is nobody else's until the socket is closed.

    Seconds pass between the choice of a port and the moment when rank 0 listens: other programs take ports
    meanwhile. The socket listens to nothing and allows sockets of the same user to bind the port too
    (SO_REUSEPORT), which `open_store` does.
    """
    family = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][0]
    reserved = socket.socket(family)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    reserved.bind((address, 0))
    return reserved


def port_of(reserved: socket.socket) -> int:
    """The port that the socket has."""
    return int(reserved.getsockname()[1])


T = TypeVar("T")


class ColocatedTrainer(TrainerClient):
    """A trainer that shares its GPUs with the engines: each offloads to the host while the other works.

        engines: pause, sleep | trainer: wake, train, sleep | publish | engines: load, wake, resume

    Running responses finish before the trainer takes the GPU and new ones wait, so no work is lost. If no
    publication follows a step, the engines wake with the weights that they had. A trainer that is restarted
    takes the GPU first. What is offloaded, and how, belongs to the parts.
    """

    def __init__(
        self, trainer: RestartingTrainer, engines: EnginePool, publishes: Callable[[int], bool]
    ) -> None:
        """publishes: whether `publish` follows a step."""
        super().__init__(trainer.call)
        self._trainer, self._supervised = trainer, trainer.supervised
        self._engines, self._publishes = engines, publishes
        self._handover = asyncio.Lock()
        self._engines_sleep = False
        self._needs_gpu = False  # a call that needs the GPU is under way
        self._restarting = False  # the worker needs the GPU to load the model and redo steps
        self._weights_due = False  # the engines wake after they have loaded new weights

    def restart_with(self, restore: Callable[[TrainerClient], Awaitable[None]]) -> None:
        """From now on, restart a trainer that dies; it takes the GPU first."""
        self._trainer.restart_with(restore, self._reserve_start, self._restarted)

    async def restored(self) -> None:
        await self._with_gpu(self._trainer.restored)
        await self._release_gpu()

    async def train(self, batch: Batch) -> StepReport:
        report = await self._with_gpu(lambda: self._trainer.train(batch))
        self._weights_due = self._publishes(batch.step)
        await self._release_gpu()
        return report

    async def load(self, folder: str) -> tuple[int, str]:
        identity = await self._with_gpu(lambda: self._trainer.load(folder))
        await self._release_gpu()
        return identity

    async def engines_loaded(self) -> None:
        self._weights_due = False
        await self._release_gpu()

    async def publish(self) -> WeightHandle:
        return await self._trainer.publish()

    async def write_snapshot(self) -> None:
        await self._trainer.write_snapshot()

    async def request_stop(self) -> None:
        await self._trainer.request_stop()

    async def close(self) -> None:
        await self._trainer.close()

    async def _with_gpu(self, act: Callable[[], Awaitable[T]]) -> T:
        """Do `act` while the engines sleep; repeat it if the worker dies before it has offloaded."""
        self._needs_gpu = True
        try:
            await self._acquire_gpu()
            while True:
                try:
                    await self._supervised.call("wake")
                    done = await act()
                    await self._supervised.call("sleep")
                    return done
                except WorkerDied:
                    await self._supervised.ready()
        finally:
            self._needs_gpu = False

    async def _acquire_gpu(self) -> None:
        async with self._handover:
            await self._engines.release_gpu()
            self._engines_sleep = True

    async def _release_gpu(self) -> None:
        """Let engines start and load; wake them, unless new weights are due first."""
        async with self._handover:
            if self._needs_gpu or self._restarting:
                return  # that call or restart releases the GPU when it ends
            self._engines.trainer_released_gpu()
            if self._engines_sleep and not self._weights_due:
                await self._engines.wake()
                await self._engines.resume()
                self._engines_sleep = False

    @asynccontextmanager
    async def _reserve_start(self) -> AsyncIterator[None]:
        """Acquire the GPU for a restart; a starting engine that needs us meanwhile lends it."""
        self._restarting = True
        await self._acquire_gpu()
        yield

    async def _restarted(self) -> None:
        if not self._needs_gpu:
            await self._supervised.call("sleep")
        self._restarting = False
        await self._release_gpu()
