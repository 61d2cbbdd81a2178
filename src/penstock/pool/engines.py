"""The engines of a run as one, whose workers may die and come back.

Requests of a worker that dies go to another engine at once; where none is left they wait for the
first that is back and are asked again, so a death costs time and no group. A worker serves again
only with the newest weights. Scheduling among living engines is the pool's business.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from penstock.engine.protocol import (
    EngineStats,
    Generation,
    GenerationRequest,
    InferenceEngine,
    PauseMode,
)
from penstock.errors import EngineError, PartFailed, RunError, UserError, WeightsGone, WorkerDied
from penstock.pool.distribution import Distribution
from penstock.pool.pool import EnginePool, NoEngineLeft, UpdateOrder
from penstock.supervise.supervised import Call, Supervised, nothing
from penstock.types import WeightHandle
from penstock.watch.waits import WaitKind, Waits

T = TypeVar("T")
Renew = Callable[[WeightHandle], Awaitable[WeightHandle]]
_TIMES_RENEWED = 3  # weights that cannot be read so often are a fault of the run
_TIMES_ASKED = 3  # a request that sees so many last engines die is a failure


class EngineWorker:
    """One supervised engine; its death is an EngineError, of requests a failed generation."""

    def __init__(self, supervised: Supervised, lost: set[str]) -> None:
        self.supervised = supervised
        self.readable: Callable[[WeightHandle], WeightHandle] = lambda handle: handle
        self._lost = lost  # requests that saw their worker die
        self.loaded: tuple[int, str] | None = None  # version and digest, by this worker
        self._tokens_of_dead, self._tokens = 0, 0

    async def _call(self, method: str, *args: Any) -> Any:
        try:
            return await self.supervised.call(method, *args)
        except WorkerDied as error:
            raise EngineError(str(error)) from error

    async def start(self) -> None:
        """The supervision has done it."""

    async def generate(self, request: GenerationRequest) -> Generation:
        return (await self.generate_many([request]))[0]

    async def generate_many(self, requests: list[GenerationRequest]) -> list[Generation]:
        try:
            made: list[Generation] = await self._call("generate_many", requests)
            return made
        except EngineError as error:
            self._lost.update(request.request_id for request in requests)
            return [_failed(request, str(error)) for request in requests]

    async def abort(self, request_id: str) -> None:
        if self.supervised.worker is not None:
            with contextlib.suppress(EngineError):  # what a dead one ran has ended with it
                await self._call("abort", request_id)

    async def pause(self, mode: PauseMode = "abort") -> None:
        await self._call("pause", mode)

    async def resume(self) -> None:
        await self._call("resume")

    async def update_weights(self, version: int, source: WeightHandle) -> str:
        """Weights that it holds already, or older ones than those, are not loaded again."""
        held = self.loaded
        if held is not None and (held[0] > version or held == (version, source.digest)):
            return held[1]
        self.loaded = None
        digest: str = await self._call("update_weights", version, self.readable(source))
        self.loaded = (version, digest)
        return digest

    async def sleep(self) -> None:
        await self._call("sleep")

    async def wake(self) -> None:
        await self._call("wake")

    async def stats(self) -> EngineStats:
        """Tokens are counted over all workers. An engine that died inside its worker ends it."""
        try:
            stats: EngineStats = await self._call("stats")
        except (EngineError, PartFailed) as error:
            serves = self.supervised.worker is not None  # else the next one is on its way
            if serves and self.supervised.can_restart:
                await self.supervised.replace(str(error))
            if isinstance(error, EngineError):
                raise
            raise EngineError(str(error)) from error
        self._tokens = stats.tokens_generated
        return replace(stats, tokens_generated=self._tokens + self._tokens_of_dead)

    async def close(self) -> None:
        await self.supervised.close()

    def came_back(self) -> None:
        self._tokens_of_dead, self._tokens = self._tokens_of_dead + self._tokens, 0


class Lent:
    """An engine that was set aside for one user; its death is an EngineError to that user."""

    def __init__(self, worker: EngineWorker, lost: set[str]) -> None:
        self._worker, self._lost = worker, lost

    async def generate_many(self, requests: list[GenerationRequest]) -> list[Generation]:
        made = await self._worker.generate_many(requests)
        lost = self._lost.intersection(request.request_id for request in requests)
        self._lost -= lost
        if lost:
            raise EngineError(f"{self._worker.supervised.name}: it died with {len(lost)} requests")
        if any(one.finish_reason == "error" for one in made):
            await self._worker.stats()  # raises where the engine died inside its worker
        return made

    async def stats(self) -> EngineStats:
        """Waits for a worker that is being started again."""
        if self._worker.supervised.worker is None:
            try:
                await self._worker.supervised.ready()
            except WorkerDied as error:
                raise EngineError(str(error)) from error
        return await self._worker.stats()


class Engines:
    """See `InferenceEngine`. Waits for: the first worker that is back. Woken by: the supervision."""

    def __init__(
        self,
        supervised: list[Supervised],
        waits: Waits,
        make: Callable[[int], Supervised] | None = None,
        distribution: Distribution | None = None,
        renew: Renew | None = None,
        *,
        slots: int = 64,
        update: UpdateOrder = "together",
        note: Callable[[str], None] = lambda line: None,
        first_loaded: Callable[[int, str], None] = lambda version, digest: None,
    ) -> None:
        """`distribution`: between nodes. `renew`: the handle of weights that are to be read again.

        `note` takes lines to the user; the others are as in `EnginePool`.
        """
        self._lost: set[str] = set()
        self._workers = [EngineWorker(one, self._lost) for one in supervised]
        members: list[InferenceEngine] = [*self._workers]
        self._pool = EnginePool(
            members,
            update=update,
            slots=slots,
            name_of=self._name_of,
            tell=note,
            first_loaded=first_loaded,
            stranded=self._lost,
        )
        self._waits, self._make = waits, make
        self._distribution, self._renew = distribution, renew
        self._retired: set[int] = set()
        self._scaling = asyncio.Lock()
        self._latest: tuple[int, WeightHandle] | None = None
        self._times_renewed = 0  # the newest weights
        self._switching = asyncio.Lock()  # an update, a return and a turn do not cross
        self._have_devices = asyncio.Event()  # not in the trainer's turn; asleep or awake else
        self._have_devices.set()
        self._awake = True
        self._starting: set[int] = set()  # again, until they serve
        self.when_loaded: Callable[[], Awaitable[None]] = nothing
        self._news = asyncio.Event()
        for index, one in enumerate(supervised):
            self._adopt(index, one)

    def _adopt(self, index: int, one: Supervised) -> None:
        one.start_context = partial(self._room, index)
        one.prepare = partial(self._load_newest, index)
        one.when_back = partial(self._take_back, index)
        one.when_given_up = self._news.set
        if self._distribution is not None:
            self._workers[index].readable = partial(self._distribution.copy_for, index)

    def _name_of(self, index: int) -> str:
        return self._workers[index].supervised.name

    # ---- one of them for itself

    @contextlib.asynccontextmanager
    async def set_aside(self) -> AsyncIterator[Lent | None]:
        """One engine that keeps its weights while the others get newer ones; None: there is one alone.

        It takes no other requests meanwhile. At the end it gets the newest weights and serves again.
        """
        async with self._switching:
            index = self._pool.set_aside()
        if index is None:
            yield None
            return
        try:
            yield Lent(self._workers[index], self._lost)
        except RunError:
            await self._take_in(index)
            raise
        await self._take_in(index)  # not where the run is ending

    async def _take_in(self, index: int) -> None:
        worker = self._workers[index]
        async with self._switching_in_turn():
            try:
                if worker.supervised.worker is not None:  # else it comes back with the newest
                    await self._catch_up(worker, index)
            except (EngineError, WorkerDied) as error:
                await worker.supervised.replace(f"it did not get the newest weights: {error}")
            self._pool.take_in(index)
        self._news.set()

    async def _catch_up(self, worker: EngineWorker, index: int) -> None:
        if self._latest is not None and worker.loaded != (self._latest[0], self._latest[1].digest):
            version, source = self._latest
            await worker.update_weights(version, await self._spread(source, lambda: [index]))

    # ---- more and fewer of them

    @property
    def count(self) -> int:
        """Engines that are meant to serve."""
        return len(self._serving())

    def _serving(self) -> list[int]:
        return [
            index
            for index, worker in enumerate(self._workers)
            if index not in self._retired and worker.supervised.given_up is None
        ]

    async def scale(self, count: int) -> list[Supervised]:
        """Start engines or drain the last ones until `count` serve; those that were started."""
        if count < 1 or self._make is None:
            raise UserError(f"producers: got {count}, allowed: 1 or more, in a run with workers")
        async with self._scaling:
            now = self._serving()
            for index in now[count:]:
                await self._drain(index)
            return [await self._add() for _ in range(count - len(now))]

    async def _add(self) -> Supervised:
        assert self._make is not None
        index = len(self._workers)
        one = self._make(index)
        async with self._room(index):
            await one.start()
            worker = EngineWorker(one, self._lost)
            self._workers.append(worker)
            self._pool.add(worker)
            self._adopt(index, one)
            await self._load_newest(index, one.call)
        await self._take_back(index)
        return one

    async def _drain(self, index: int) -> None:
        """What runs there finishes; what waited there is asked elsewhere."""
        self._pool.retire(index)
        self._retired.add(index)
        supervised = self._workers[index].supervised
        with contextlib.suppress(EngineError):  # it died meanwhile: the same end
            await self._workers[index].pause("wait")
        await supervised.close()
        supervised.given_up = WorkerDied(f"{supervised.name}: it was drained")

    async def _load_newest(self, index: int, call: Call) -> None:
        """Into a worker that does not serve yet; newer ones may be published meanwhile."""
        held = self._workers[index]
        held.loaded = None
        while self._latest is not None:
            version, source = self._latest
            try:
                spread = await self._spread(source, lambda: [index])
                await call("update_weights", version, held.readable(spread))
                held.loaded = (version, source.digest)
                return
            except WeightsGone:
                await self._make_readable(source)

    async def _spread(self, source: WeightHandle, engines: Callable[[], list[int]]) -> WeightHandle:
        """Where there are several nodes: with a copy on that of each of these engines."""
        if self._distribution is None:
            return source
        return await self._distribution.spread(source, engines)

    async def _make_readable(self, source: WeightHandle) -> None:
        """After WeightsGone: nothing to do where newer ones are there, else they come once more."""
        if self._latest is None or self._latest[1] is not source:
            return
        self._times_renewed += 1
        if self._renew is None or self._times_renewed > _TIMES_RENEWED:
            raise EngineError(f"weights of version {source.version} cannot be read by all engines")
        self._latest = (self._latest[0], await self._renew(source))

    async def _take_back(self, index: int) -> None:
        try:
            async with self._switching:
                self._workers[index].came_back()
                await self._pool.restart(index)
                if not self._awake:  # it takes its turn with the others
                    await self._workers[index].pause("wait")
                    await self._workers[index].sleep()
        finally:
            self._starts_no_more(index)

    @contextlib.asynccontextmanager
    async def _room(self, index: int) -> AsyncIterator[None]:
        """A start takes device memory: it waits for the end of the trainer's turn, the next for it."""
        if not self._have_devices.is_set():
            with self._waits.wait("driver", WaitKind.RESTART, f"engine-{index}, in its turn"):
                await self._have_devices.wait()
        self._starting.add(index)
        try:
            yield
        except BaseException:
            self._starts_no_more(index)
            raise

    def _starts_no_more(self, index: int) -> None:
        self._starting.discard(index)
        self._news.set()

    @contextlib.asynccontextmanager
    async def _switching_in_turn(self) -> AsyncIterator[None]:
        """Weights are loaded inside, also by engines that are still asleep."""
        while True:
            await self._have_devices.wait()
            async with self._switching:
                if self._have_devices.is_set():
                    yield
                    return

    async def _until_one_is_back(self) -> None:
        while not self._pool.alive:
            final = [worker.supervised.given_up for worker in self._workers]
            if all(final):
                raise EngineError(f"no engine is left: {final[0]}")
            self._news.clear()
            with self._waits.wait("driver", WaitKind.RESTART, "engines"):
                await self._news.wait()

    async def _on_a_living_one(self, act: Callable[[], Awaitable[T]]) -> T:
        while True:
            try:
                return await act()
            except NoEngineLeft:
                pass
            except EngineError:
                if self._pool.alive:
                    raise
            await self._until_one_is_back()

    async def start(self) -> None: ...

    async def generate(self, request: GenerationRequest) -> Generation:
        return (await self.generate_many([request]))[0]

    async def generate_many(self, requests: list[GenerationRequest]) -> list[Generation]:
        made = await self._pool.generate_many(requests)
        for _ in range(_TIMES_ASKED - 1):
            failed = [n for n, one in enumerate(made) if self._is_lost(one)]
            if not failed:
                break
            await self._until_one_is_back()
            again = await self._pool.generate_many([requests[n] for n in failed])
            for number, one in zip(failed, again, strict=True):
                made[number] = one
        self._lost.difference_update(request.request_id for request in requests)
        return made

    def _is_lost(self, generation: Generation) -> bool:
        """It failed because its engine died, or because none was left."""
        if generation.finish_reason != "error":
            return False
        return generation.request_id in self._lost or not self._pool.alive

    async def abort(self, request_id: str) -> None:
        await self._pool.abort(request_id)

    async def pause(self, mode: PauseMode = "abort") -> None:
        await self._on_a_living_one(lambda: self._pool.pause(mode))

    async def resume(self) -> None:
        await self._on_a_living_one(self._pool.resume)

    async def sleep(self, *, at_once: bool = False) -> None:
        """From here on the devices are not theirs; one that dies is started when they are again.

        Waits for: weights that are being loaded, engines that are starting (not `at_once`).
        """
        async with self._switching:
            self._have_devices.clear()
            self._awake = False
        while self._starting and not at_once:
            self._news.clear()
            with self._waits.wait("driver", WaitKind.RESTART, "engines"):
                await self._news.wait()
        with contextlib.suppress(NoEngineLeft):  # the dead hold nothing, and come back asleep
            await self._pool.sleep()

    def take_devices(self) -> None:
        """The trainer is done with them: engines may start and load weights, still asleep."""
        self._have_devices.set()

    async def wake(self) -> None:
        self.take_devices()

        async def wake_all() -> None:
            async with self._switching:
                await self._pool.wake()
                self._awake = True

        await self._on_a_living_one(wake_all)

    async def update_weights(self, version: int, source: WeightHandle) -> str:
        self._latest, self._times_renewed = (version, source), 0

        async def switch() -> str:
            async with self._switching_in_turn():
                spread = await self._spread(newest, lambda: self._pool.alive)
                return await self._pool.update_weights(version, spread)

        while True:
            newest = self._latest[1]
            try:
                digest = await self._on_a_living_one(switch)
                break
            except WeightsGone:
                await self._make_readable(newest)
        await self.when_loaded()
        return digest

    async def stats(self) -> EngineStats:
        return await self._on_a_living_one(self._pool.stats)

    async def close(self) -> None:
        await self._pool.close()


def _failed(request: GenerationRequest, reason: str) -> Generation:
    return Generation(
        request_id=request.request_id,
        token_ids=np.zeros(0, np.int32),
        logprobs=np.zeros(0, np.float32),
        segments=(),
        finish_reason="error",
        error=reason,
    )
