"""Several supervised engines as one `InferenceEngine`.

Owns the states of the engines: which serve, start, are lent or dead, and with which weights. The way of a
request through the pool is in `requests.py`; how a worker is started belongs to `workers/`, when it is
restarted to `workers/supervise/`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeVar

from penstock.engine.protocol import EngineStats, Generation, GenerationRequest, PauseMode
from penstock.errors import EngineError, EnginesLost, PartFailed, UserError, WorkerDied
from penstock.types import WeightHandle
from penstock.waits import WaitKind, all_results
from penstock.workers.pool.requests import (
    MOVES,
    Engine,
    EngineState,
    Generate,
    PromptBatch,
    Requests,
    Scheduler,
    empty_answer,
)
from penstock.workers.pool.weights import NewestWeights, NodeCopies, Renew
from penstock.workers.supervise.supervised import Call, Restarts, Supervised, SupervisionCallbacks

T = TypeVar("T")
UpdateOrder = Literal["together", "rolling"]
UNKNOWN_SLOTS = 64  # requests to give to an engine that does not say how many it runs at once


class EnginePool:
    """See `InferenceEngine`. An engine is in one of these states:

    starting   no worker serves: it died, or was just added. The supervision starts a worker, loads the
               newest weights (`_prepare`) and moves it to serving (`_join`), or gives it up: dead.
    serving    takes requests. A call that finds the worker dead moves it to starting.
    dead       the supervision gave up, the engine failed in this process, or `scale` drained it. Final.

    Asleep is a state of the whole pool (`sleep`, `release_gpu`, `wake`): serving engines hold no GPU memory and no request
    is bound. An engine that is back meanwhile goes to sleep too.

    Requests wait for: room at an engine, or one that serves. Woken by: answers, engines that join or resume.
    """

    def __init__(
        self,
        supervised: list[Supervised],
        events: SupervisionCallbacks,
        make: Callable[[int], Supervised] | None = None,
        copies: NodeCopies | None = None,
        renew: Renew | None = None,
        *,
        generate: Generate | None = None,
        slots: int = 0,
        update: UpdateOrder = "together",
        shares_gpu: bool = False,
    ) -> None:
        """Build the pool of workers that have started.

        events: told when an engine has confirmed weights, by its answer or by tokens sampled from them.
        make: returns a further engine, by its index. copies: one copy of the weights per node.
        renew: publishes weights again that cannot be read. slots: requests that an engine runs at once; 0: ask it.
        generate: gets the answers of one engine, where a plain call is not enough.
        shares_gpu: with the trainer: engines wake, start and load in their turn.
        """
        self._events, self._make, self._generate = events, make, generate
        self._weights = NewestWeights(copies, renew, events.confirmed)
        self._update = update
        self._engines: list[Engine] = []
        self._asks_for_slots = not slots
        self._scheduler = Scheduler(self._engines, slots or UNKNOWN_SLOTS)
        self._requests = Requests(
            self._engines,
            self._scheduler,
            ask=self._ask,
            until_one_serves=self._until_one_serves,
            note=events.note,
        )
        self._scaling = asyncio.Lock()
        self._switching = asyncio.Lock()  # held to load weights, to join, to fall asleep, to wake
        self._gpu_released = asyncio.Event()  # not set: the trainer holds the GPU
        self._gpu_released.set()
        self._starts: set[Engine] = set()  # engines that start or are drained
        self._asleep = False
        self._shares_gpu = shares_gpu
        self._changed = asyncio.Event()  # a state, a reserved start or a waiting request changed
        for worker in supervised:
            self._adopt(Engine(supervised=worker, index=len(self._engines)))

    def _adopt(self, engine: Engine) -> None:
        self._engines.append(engine)
        engine.supervised.restart_with(
            Restarts(
                prepare=partial(self._prepare, engine),
                start_context=partial(self._reserve_start, engine),
                when_back=partial(self._join, engine),
                when_given_up=partial(self._given_up, engine),
            )
        )
        if engine.supervised.given_up is not None:  # its worker died while others started
            self._given_up(engine)

    # ---- states

    @property
    def serving(self) -> list[int]:
        """Indices of the engines that take requests."""
        return [engine.index for engine in self._engines if engine.serves]

    @property
    def count(self) -> int:
        """The number of engines that are not dead."""
        return len(self._engines) - len(self._in(EngineState.DEAD))

    def _in(self, *states: EngineState) -> list[Engine]:
        return [engine for engine in self._engines if engine.state in states]

    def _move(self, engine: Engine, state: EngineState, reason: str = "") -> None:
        """Move an engine to another state and update its requests; the only place that does so."""
        assert state in MOVES[engine.state], f"{engine.state} -> {state}"
        engine.state, engine.reason = state, reason
        engine.serves = state is EngineState.SERVING
        engine.ended = state is EngineState.DEAD
        if not self._in(EngineState.SERVING):
            self._requests.unqueue_all()
        self._requests.bind_queued()
        self._changed.set()

    def _lost(self, engine: Engine) -> None:
        """Note that a call found the worker dead, unless its successor serves already."""
        if engine.serves and engine.supervised.worker is None:
            self._move(engine, EngineState.STARTING)

    def _given_up(self, engine: Engine) -> None:
        if not engine.ended:
            self._move(engine, EngineState.DEAD, str(engine.supervised.given_up))

    async def _until_one_serves(self, batch: PromptBatch | None = None) -> None:
        """Wait until an engine serves, or `batch` has ended; raise EnginesLost if all are dead."""
        while not any(engine.serves for engine in self._engines):
            if batch is not None and (not batch.left or self._requests.closed):
                return
            if not self.count:
                reasons = [engine.reason for engine in self._in(EngineState.DEAD)]
                raise EnginesLost("no engine is left: " + "; ".join(reasons))
            await self._change("engines")

    async def _change(self, what: str) -> None:
        """Wait until a state, a reserved start or a waiting request changes."""
        self._changed.clear()
        with self._events.waits.wait("driver", WaitKind.RESTART, what):
            await self._changed.wait()

    # ---- starting

    @contextlib.asynccontextmanager
    async def _reserve_start(self, engine: Engine) -> AsyncIterator[None]:
        """Wait until the trainer has released the GPU, then reserve this engine's start."""
        if engine.serves:
            self._move(engine, EngineState.STARTING)
        await self._reserve_gpu(engine)
        try:
            yield
        except BaseException:  # a failed or cancelled start: the trainer must not wait for it
            self._end_start(engine)
            raise

    @contextlib.asynccontextmanager
    async def _lend_gpu(self, engine: Engine, call: Call) -> AsyncIterator[None]:
        """Free a starting engine's GPU memory while it waits for a trainer that may need it to start."""
        if not self._shares_gpu:
            yield
            return
        await call("sleep")
        self._end_start(engine)
        yield
        await self._reserve_gpu(engine)
        await call("wake")

    async def _reserve_gpu(self, engine: Engine) -> None:
        what = f"{engine.name}, until the trainer releases the GPU"
        while not self._gpu_released.is_set():  # the trainer may take it back before we run
            with self._events.waits.wait("driver", WaitKind.RESTART, what):
                await self._gpu_released.wait()
        self._starts.add(engine)

    def _end_start(self, engine: Engine) -> None:
        self._starts.discard(engine)
        self._changed.set()

    async def _prepare(self, engine: Engine, call: Call) -> None:
        """Load the newest weights into a worker that does not serve yet."""
        engine.loaded = None
        engine.generated_before += engine.generated
        engine.generated = 0
        await self._weights.renewing(
            lambda: self._weights.load_newest(engine, call), partial(self._lend_gpu, engine, call)
        )

    async def _join(self, engine: Engine) -> None:
        """Let a prepared engine serve, with weights that were published meanwhile."""

        async def join() -> None:
            async with self._switching:
                if engine.state is not EngineState.STARTING:
                    return
                await self._weights.load_newest(engine, engine.supervised.call)
                if self._asleep:
                    await engine.supervised.call("pause", "wait")
                    await engine.supervised.call("sleep")
                if engine.state is EngineState.STARTING:  # not drained during the load
                    self._move(engine, EngineState.SERVING)

        try:
            lend_gpu = partial(self._lend_gpu, engine, engine.supervised.call)
            await self._weights.renewing(join, lend_gpu)
        finally:
            self._end_start(engine)

    # ---- scaling

    async def scale(self, count: int) -> list[Supervised]:
        """Start engines, or drain the last ones, until `count` serve; return those that started."""
        if count < 1 or self._make is None:
            raise UserError(f"producers: got {count}, allowed: 1 or more, in a run with workers")
        async with self._scaling:
            now = [engine for engine in self._engines if not engine.ended]
            for engine in now[count:]:
                if not engine.ended:  # it may have died while another was drained
                    await self._drain(engine)
            return [await self._add(self._make) for _ in range(count - len(now))]

    async def _add(self, make: Callable[[int], Supervised]) -> Supervised:
        index = len(self._engines)
        engine = Engine(
            supervised=make(index), index=index, state=EngineState.STARTING, serves=False
        )
        async with self._reserve_start(engine):
            await engine.supervised.start()
            if self._requests.closed:  # the run ended meanwhile
                await engine.supervised.close()
                raise EngineError(f"{engine.name}: the run has ended")
            self._adopt(engine)
            await self._prepare(engine, engine.supervised.call)
        await self._join(engine)
        return engine.supervised

    async def _drain(self, engine: Engine) -> None:
        """Let the engine's running requests finish, then close it."""
        self._move(engine, EngineState.DEAD, f"{engine.name}: it was drained")
        self._starts.add(engine)
        try:
            with contextlib.suppress(EngineError, WorkerDied):  # a dead engine ends the same way
                await engine.supervised.call("pause", "wait")
            await engine.supervised.close()
        finally:
            self._end_start(engine)
        engine.supervised.retire("it was drained")

    # ---- requests

    async def generate(self, request: GenerationRequest) -> Generation:
        return (await self.generate_many([request]))[0]

    def generate_many(
        self, requests: list[GenerationRequest]
    ) -> Coroutine[Any, Any, list[Generation]]:
        return self._requests.generate_many(requests)

    async def abort(self, request_id: str) -> None:
        await self._requests.abort(request_id)
        self._changed.set()

    async def _ask(
        self, engine: Engine, requests: list[GenerationRequest]
    ) -> tuple[list[Generation], bool]:
        """What requests get from an engine, and whether it died; those that failed with it can be retried.

        Raise an error of its part if the engine lives.
        """
        try:
            if self._generate is None:
                answers = await engine.supervised.call("generate_many", requests)
            else:
                answers = await self._generate(engine, requests)
        except (WorkerDied, PartFailed, EngineError) as error:
            if isinstance(error, WorkerDied):
                self._lost(engine)
            died = isinstance(error, WorkerDied) or not await self._is_alive(engine)
            if isinstance(error, PartFailed) and not died:
                raise
            return [empty_answer(r.request_id, "error", str(error)) for r in requests], died
        if engine.loading is not None:
            self._weights.sampled(engine.loading, answers)
        has_failed = any(generation.finish_reason == "error" for generation in answers)
        return answers, has_failed and not await self._is_alive(engine)

    # ---- all engines

    async def start(self) -> None:
        """Ask the engines, which the launcher has started, how many requests each runs at once."""
        if self._asks_for_slots:
            await self._each(self._stats_of, self._in(EngineState.SERVING))

    async def pause(self, mode: PauseMode = "abort") -> None:
        """Pause all engines. Requests that wait for an engine stay queued, or end (`abort`)."""
        self._scheduler.hold(True)
        if mode == "abort":
            self._end_waiting()
        await self._at_least_one(lambda: self._call_serving("pause", mode))

    async def resume(self) -> None:
        self._scheduler.hold(False)
        await self._call_serving("resume")  # an engine that is back later is not paused
        self._requests.bind_queued()

    async def sleep(self) -> None:
        async with self._switching:
            self._asleep = True
        await self._call_serving("sleep")  # dead engines need not answer: they hold no GPU memory

    async def release_gpu(self) -> None:
        """Finish running requests and sleep until `wake`; let no engine start or load meanwhile.

        Waits for: weights that are being loaded, engines that start or are drained. Needs no engine that serves.
        """
        self._scheduler.hold(True)
        async with self._switching:
            self._gpu_released.clear()
            self._asleep = True
        await self._until_none_starts()
        await self._call_serving("pause", "wait")
        await self._call_serving("sleep")
        await self._until_none_starts()  # `scale` may have begun to drain one meanwhile

    async def _until_none_starts(self) -> None:
        while self._starts:
            await self._change("engines")

    def trainer_released_gpu(self) -> None:
        """Let engines start and load weights again, still asleep."""
        self._gpu_released.set()

    async def wake(self) -> None:
        """Wake the engines that sleep; those that are back later do not fall asleep."""
        self.trainer_released_gpu()
        async with self._switching:
            self._asleep = False
            await self._call_serving("wake")

    async def stats(self) -> EngineStats:
        """Sums; the version is the oldest one that new requests are sampled with."""
        all_stats = await self._at_least_one(
            lambda: self._each(self._stats_of, self._in(EngineState.SERVING))
        )
        oldest = min(all_stats, key=lambda stats: stats.policy_version)
        return EngineStats(
            policy_version=oldest.policy_version,
            digest=oldest.digest,
            running=sum(stats.running for stats in all_stats),
            waiting=sum(stats.waiting for stats in all_stats) + self._scheduler.waiting,
            tokens_generated=sum(stats.tokens_generated for stats in all_stats),
            busy_s=sum(stats.busy_s for stats in all_stats),
            paused=any(stats.paused for stats in all_stats),
            batch_invariant=all(stats.batch_invariant for stats in all_stats),
        )

    async def close(self) -> None:
        self._requests.close()
        self._end_waiting()
        for engine in self._engines:
            if not engine.ended:
                self._move(engine, EngineState.DEAD, f"{engine.name}: it was closed")
        await asyncio.gather(*(engine.supervised.close() for engine in self._engines))
        await self._requests.aborts_sent()

    def _end_waiting(self) -> None:
        self._requests.end_waiting()
        self._changed.set()

    async def _stats_of(self, engine: Engine) -> EngineStats:
        """Ask one engine, and count the tokens of all its workers.

        End the worker if the engine inside it is dead, and raise WorkerDied.
        """
        worker = engine.supervised.worker
        try:
            stats: EngineStats = await engine.supervised.call("stats")
        except WorkerDied:
            self._lost(engine)
            raise
        except (EngineError, PartFailed) as error:
            if engine.supervised.worker is worker:  # otherwise a restarted worker serves already
                reason = str(error).removeprefix(f"{engine.name}: ")
                logged = isinstance(error, PartFailed)  # by its worker
                notes = [] if logged else getattr(error, "__notes__", [])
                await engine.supervised.replace(reason, traceback="\n".join(notes))
                self._lost(engine)
            raise WorkerDied(str(error)) from error
        engine.generated = stats.tokens_generated
        if self._asks_for_slots and stats.slots and stats.slots != engine.slots:
            engine.slots = stats.slots
            self._scheduler.set_slots(engine.index, stats.slots)
        return replace(stats, tokens_generated=engine.generated + engine.generated_before)

    async def _is_alive(self, engine: Engine) -> bool:
        return bool(await self._each(self._stats_of, [engine]))

    async def _call_serving(self, method: str, *args: Any) -> list[Any]:
        return await self._each(
            lambda engine: engine.supervised.call(method, *args), self._in(EngineState.SERVING)
        )

    async def _at_least_one(self, call: Callable[[], Awaitable[list[T]]]) -> list[T]:
        """Repeat a call of several engines until one of them has answered; return the answers."""
        while not (answers := await call()):
            await self._until_one_serves()
        return answers

    async def _each(self, call: Callable[[Engine], Awaitable[T]], engines: list[Engine]) -> list[T]:
        """The answers of all engines that live; raise any other error after all answered."""

        async def ask(engine: Engine) -> list[T]:
            try:
                return [await call(engine)]
            except WorkerDied:
                self._lost(engine)
                return []
            except (EngineError, PartFailed):
                if await self._is_alive(engine):
                    raise
                return []

        return [answer for answers in await all_results(map(ask, engines)) for answer in answers]

    # ---- weights

    async def update_weights(self, version: int, source: WeightHandle) -> str:
        """Load weights into all engines that serve, together or one after another (`rolling`)."""
        assert version == source.version
        self._weights.publish(source)
        digests = await self._at_least_one(lambda: self._weights.renewing(self._load_all))
        return digests[0]

    async def _load_all(self) -> list[str]:
        async with self._switching_with_gpu():
            handle = self._weights.handle
            assert handle is not None
            engines = self._in(EngineState.SERVING)
            rounds = [engines] if self._update == "together" else [[engine] for engine in engines]

            def load(engine: Engine) -> Awaitable[str]:
                return self._weights.load(engine, handle, engine.supervised.call)

            return [digest for some in rounds for digest in await self._each(load, some)]

    @contextlib.asynccontextmanager
    async def _switching_with_gpu(self) -> AsyncIterator[None]:
        """Hold the lock while the trainer does not hold the GPU."""
        while True:
            await self._gpu_released.wait()
            async with self._switching:
                if self._gpu_released.is_set():
                    yield
                    return
