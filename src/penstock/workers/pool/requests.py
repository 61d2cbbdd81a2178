"""The engines of a pool, and the way of a request to one of them: queued, bound, answered or aborted.

The requests of one prompt go to one engine together. `Scheduler` decides which engine takes which work, and
when: pure logic, with the time passed in. Work is bound to an engine only when that engine has a slot for it;
until then it waits, first come first served, so that a slow engine takes no more than it can finish. Among
engines with free slots, work goes to the one that would finish its outstanding tokens first; running work
is never moved (docs/workers.md has the measurements). A choice looks at every engine: it is made once for
a prompt.

`Requests` acts. Requests of a dead engine are retried on another one, or wait for the first that serves again, so a
death costs time and no group. Which state an engine is in is decided by `pool.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice
from operator import attrgetter

import numpy as np

from penstock.engine.protocol import FinishReason, Generation, GenerationRequest
from penstock.errors import RunError
from penstock.types import WeightHandle
from penstock.workers.supervise.supervised import Supervised

# A request fails after so many deaths of the only engine that served. More than launch.max_restarts by
# default: then the run stops with the reason of the deaths instead.
_LAST_ENGINE_DEATHS = 5

_MOST_SESSIONS = 1 << 16  # sessions to remember; one that is forgotten computes its context again


_NEWEST_SHARE = 0.2  # weight of the last answer in a running average
_AHEAD = 1.25  # requests to bind per request that can run, so that a free slot is refilled at once
_LEAST_FILL = 0.125
_UNKNOWN_FILL = 0.5
_REFUSALS = 256  # after so many skips in a row a slow engine gets work, to measure it again
_ALIKE = 1.5  # paces within this factor differ by the rows that engines happen to decode together
_SLOW = 4.0  # tell the user of an engine this many times slower than the fastest
_ANSWERS_TO_JUDGE = 4  # answers to measure before an engine is called slow
_LEAST_S = 1e-9  # an answer took at least so long: speeds stay finite


@dataclass(slots=True, eq=False, kw_only=True)
class PromptBatch:
    """Requests of one prompt, which go to one engine together; those in `left` have no answer yet."""

    size: int  # number of requests
    tokens: int  # the most that the requests can hold, prompts and responses
    holder: int | None = None  # the engine that made the session's last response
    engine: int | None = None  # the engine that the work is bound to
    is_queued: bool = False
    since: float = 0.0  # time at which it was bound
    ahead: int = 0  # outstanding tokens of the engine when this work was bound, its own included
    left: list[GenerationRequest] = field(default_factory=list)
    done: dict[str, Generation] = field(default_factory=dict)
    aborted: set[str] = field(default_factory=set)  # request ids that a caller aborted
    binding: asyncio.Future[bool] | None = None  # set while queued; False: left the queue
    last_engine_deaths: int = 0  # engines that died with this batch while no other engine served

    def end(
        self, reason: FinishReason, names: Collection[str] | None = None, error: str = ""
    ) -> None:
        """Answer requests of `left` (all of them, or those of `names`) with no tokens."""
        chosen = {request.request_id for request in self.left}
        if names is not None:
            chosen &= set(names)
        self.done.update((name, empty_answer(name, reason, error)) for name in chosen)
        self.left = [request for request in self.left if request.request_id not in chosen]

    def wake(self, is_bound: bool) -> None:
        if self.binding is not None and not self.binding.done():
            self.binding.set_result(is_bound)


@dataclass(slots=True, eq=False)
class EngineLoad:
    """One engine as the scheduler sees it."""

    serves: bool = True  # whether the engine takes work
    ended: bool = False  # it never takes work again
    slots: int = 0  # requests that it runs at once; 0: as many as every engine
    requests: int = 0  # requests bound to it
    tokens: int = 0  # tokens of these requests
    speed: float = 0.0  # outstanding tokens finished per second; 0: not measured yet
    pace: float = 0.0  # tokens per second of one response; known if the speed is
    answers: int = 0  # answers measured so far
    refused: int = 0  # skips in a row: work waited for another engine instead


class Scheduler:
    """Consumes offers and answers, produces bindings. While it is held, nothing is bound."""

    def __init__(self, engines: Sequence[EngineLoad], slots: int) -> None:
        """engines: by their index; more may be added, and each may cease to serve."""
        self.engines = engines
        self.slots = slots  # requests that an engine runs at once if it does not say
        self.held = False
        self.waiting = 0  # requests in the queue
        self.running = 0  # requests that are bound
        self._queue: deque[PromptBatch] = deque()
        self._speed = 0.0  # average of all engines
        self._fill = 0.0  # share of bound requests that still run; 0: unknown

    # ---- engines

    def set_slots(self, index: int, slots: int) -> None:
        """Note how many requests an engine runs at once; for engines that do not say, the fewest count."""
        self.engines[index].slots = slots
        self.slots = min(engine.slots for engine in self.engines if engine.slots)

    def hold(self, held: bool) -> None:
        """Bind nothing while `held`."""
        self.held = held

    def slower_than(self, index: int) -> int | None:
        """The fastest engine if this one makes responses several times slower, else None."""
        enough = _ANSWERS_TO_JUDGE
        measured = [each for each in self.engines if each.serves and each.answers >= enough]
        engine = self.engines[index]
        if engine not in measured:
            return None
        fastest = max(measured, key=attrgetter("pace"))
        return self.engines.index(fastest) if fastest.pace > _SLOW * engine.pace else None

    # ---- binding

    def offer(self, work: PromptBatch, now: float, *, first: bool = False) -> int | None:
        """Bind work now and return its engine, or queue it (`first`: at the head) and return None.

        The longer the queue, the more engines are worth using: call `bindings` after None.
        """
        if first or not self.waiting:
            index = self._choose(work)
            if index is not None:
                self._bind(work, index, now)
                return index
        work.is_queued = True
        self.waiting += work.size
        if first:
            self._queue.appendleft(work)
        else:
            self._queue.append(work)
        return None

    def bindings(self, now: float) -> Iterator[PromptBatch]:
        """Bind queued work for as long as engines have free slots; yield what was bound."""
        while self._queue:
            work = self._queue[0]
            if work.is_queued:
                index = self._choose(work)
                if index is None:
                    return
                self.withdraw(work)
                self._bind(work, index, now)
                self._queue.popleft()
                yield work
            else:
                self._queue.popleft()

    def withdraw(self, work: PromptBatch) -> None:
        """Take work out of the queue, if it is there."""
        if work.is_queued:
            work.is_queued = False
            self.waiting -= work.size

    def queued(self) -> list[PromptBatch]:
        return [work for work in self._queue if work.is_queued]

    def release(self, work: PromptBatch, now: float, lengths: Sequence[int] = ()) -> None:
        """Unbind work that left its engine; measure the engine by the `lengths` of its responses."""
        assert work.engine is not None
        engine, work.engine = self.engines[work.engine], None
        engine.requests -= work.size
        engine.tokens -= work.tokens
        self.running -= work.size
        if not lengths or now <= work.since:
            return
        seconds, longest = max(now - work.since, _LEAST_S), max(1, *lengths)
        speed = work.ahead / seconds
        engine.speed, self._speed = _average(engine.speed, speed), _average(self._speed, speed)
        engine.pace = _average(engine.pace, longest / seconds)
        engine.answers += 1
        self._fill = _average(self._fill, sum(lengths) / (len(lengths) * longest))

    def _bind(self, work: PromptBatch, index: int, now: float) -> None:
        engine = self.engines[index]
        engine.requests += work.size
        engine.tokens += work.tokens
        engine.refused = 0
        work.engine, work.since, work.ahead = index, now, engine.tokens
        self.running += work.size

    def _choose(self, work: PromptBatch) -> int | None:
        """The engine that takes this work now, by the seconds of work that it has; or None.

        The next turn of a session goes to the engine that holds the turns before, if it has a free slot.
        """
        if work.holder is not None and not self.held:
            holder = self.engines[work.holder]
            is_free = holder.requests < (holder.slots or self.slots)
            if holder.serves and is_free:
                return work.holder
        chosen = None if self.held else self._least_busy()
        if chosen is not None and chosen.pace and chosen.refused < _REFUSALS:
            least_pace = self._least_pace(work)
            if chosen.pace < least_pace:
                chosen.refused += 1
                chosen = self._least_busy(least_pace)
        return None if chosen is None else self.engines.index(chosen)

    def _least_busy(self, least_pace: float = 0.0) -> EngineLoad | None:
        """The engine with a free slot that would finish its tokens first.

        One that is not measured yet counts as fast as the average. More is bound than can run, by the share
        of bound requests that still runs: work is answered whole, and its first responses that end wait for
        its longest one. One engine alone has a queue of its own, so everything is bound to it.
        """
        chosen, least_s = None, math.inf
        slots, average = self.slots, self._speed or 1.0
        per_slot = _AHEAD / max(_LEAST_FILL, self._fill or _UNKNOWN_FILL)
        living = (engine for engine in self.engines if not engine.ended)
        if len([*islice(living, 2)]) == 1:
            per_slot = math.inf
        for engine in self.engines:
            is_full = engine.requests >= (engine.slots or slots) * per_slot
            if not engine.serves or is_full or 0 < engine.pace < least_pace:
                continue
            seconds = engine.tokens / (engine.speed or average)
            if seconds < least_s:
                chosen, least_s = engine, seconds
        return chosen

    def _least_pace(self, work: PromptBatch) -> float:
        """The pace below which the other engines would finish the queue before one response is made."""
        slots, fastest, together = self.slots, 0.0, 0.0
        for engine in self.engines:
            pace = engine.pace
            if pace and engine.serves:
                together += pace * (engine.slots or slots)
                if pace > fastest:
                    fastest = pace
        waiting = self.waiting if work.is_queued else self.waiting + work.size
        return 1 / max(1 / fastest + waiting / together, _ALIKE / fastest)


def _average(before: float, newest: float) -> float:
    return (1 - _NEWEST_SHARE) * before + _NEWEST_SHARE * newest if before else newest


class EngineState(StrEnum):
    """The state of one engine; `EnginePool` documents the moves."""

    STARTING = "starting"
    SERVING = "serving"
    DEAD = "dead"


MOVES = {
    EngineState.STARTING: {EngineState.SERVING, EngineState.DEAD},
    EngineState.SERVING: {EngineState.STARTING, EngineState.DEAD},
    EngineState.DEAD: set(),
}


@dataclass(slots=True, eq=False, kw_only=True)
class Engine(EngineLoad):
    """One engine: its supervised worker and what the pool knows of it."""

    supervised: Supervised
    index: int
    state: EngineState = EngineState.SERVING
    reason: str = ""  # why it is dead
    loaded: tuple[int, str] | None = None  # version and digest that its worker confirmed
    loading: WeightHandle | None = None  # what its worker was asked to load and has not confirmed
    generated: int = 0  # tokens that the current worker generated, from its last stats
    generated_before: int = 0  # tokens that its dead workers generated

    @property
    def name(self) -> str:
        return self.supervised.name


def empty_answer(request_id: str, reason: FinishReason, error: str = "") -> Generation:
    """A response without tokens."""
    return Generation(
        request_id=request_id,
        token_ids=np.zeros(0, np.int32),
        logprobs=np.zeros(0, np.float32),
        segments=(),
        finish_reason=reason,
        error=error,
    )


# What an engine answers to requests of one prompt.
Generate = Callable[[Engine, list[GenerationRequest]], Awaitable[list[Generation]]]

# Lets an engine generate: returns what the requests get, and whether the engine died.
Ask = Callable[[Engine, list[GenerationRequest]], Awaitable[tuple[list[Generation], bool]]]


async def abort_on(engine: Engine, request_ids: list[str]) -> None:
    for request_id in request_ids:
        with contextlib.suppress(RunError):  # a failed abort costs tokens and no more
            await engine.supervised.call("abort", request_id)


class Requests:
    """Consumes requests, produces generations. Waits for: a slot of an engine, or one that serves.

    Woken by: answers, engines that join, resume or load weights (`bind_queued`).
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        scheduler: Scheduler,
        *,
        ask: Ask,
        until_one_serves: Callable[[PromptBatch], Awaitable[None]],
        note: Callable[[str], None],
    ) -> None:
        """engines: by their index; more may be added."""
        self.closed = False
        self._engines, self._scheduler = engines, scheduler
        self._ask, self._until_one_serves, self._note = ask, until_one_serves, note
        self._batches: dict[str, PromptBatch] = {}  # request without an answer -> its batch
        self._holders: dict[str, int] = {}  # session -> engine of its last response, oldest first
        self._aborting: set[asyncio.Task[None]] = set()
        self._slow: set[int] = set()  # engines that the user was told of

    async def generate_many(self, requests: list[GenerationRequest]) -> list[Generation]:
        """Generate the responses of one prompt on one engine, and if it dies, on another.

        More requests than an engine runs at once are generated in parts.
        """
        most = self._scheduler.slots
        if not 0 < len(requests) <= most:
            parts = [requests[start : start + most] for start in range(0, len(requests), most)]
            made = await asyncio.gather(*map(self.generate_many, parts))
            return [generation for part in made for generation in part]
        session = requests[0].session
        batch = PromptBatch(
            size=len(requests),
            tokens=sum(request.num_tokens for request in requests),
            holder=self._holders.get(session),
            left=requests,
        )
        self._batches.update((request.request_id, batch) for request in requests)
        began = False
        try:
            while batch.left and not self.closed:
                await self._until_one_serves(batch)
                if not batch.left or not await self._bind(batch, first=began):
                    continue
                began = True
                assert batch.engine is not None
                engine, answers, died = self._engines[batch.engine], list[Generation](), False
                if batch.aborted:  # after it was bound, before it is sent
                    batch.end("abort", batch.aborted)
                try:
                    if batch.left:
                        answers, died = await self._ask(engine, batch.left)
                except asyncio.CancelledError:  # the engine would go on with what nobody waits for
                    self._abort_later(engine, [request.request_id for request in batch.left])
                    raise
                finally:
                    self._release(batch, answers)
                self._keep(batch, engine, answers, died)
                if session:
                    self._holders.pop(session, None)
                    self._holders[session] = engine.index
                    if len(self._holders) > _MOST_SESSIONS:
                        del self._holders[next(iter(self._holders))]
        finally:
            for request in requests:
                if self._batches.get(request.request_id) is batch:
                    del self._batches[request.request_id]
        if batch.left:
            batch.end("error", error="engine pool: it is closed")
        return [batch.done[request.request_id] for request in requests]

    async def _bind(self, batch: PromptBatch, *, first: bool) -> bool:
        """Wait until the batch is bound to an engine; False if it left the queue. Waits for: a slot."""
        loop = asyncio.get_running_loop()
        if self._scheduler.offer(batch, loop.time(), first=first) is not None:
            return True
        batch.binding = loop.create_future()
        self.bind_queued()
        try:
            return await batch.binding
        except asyncio.CancelledError:
            if batch.engine is not None:  # bound and cancelled at the same time
                self._release(batch)
            raise
        finally:
            self._scheduler.withdraw(batch)
            batch.binding = None

    def _keep(
        self, batch: PromptBatch, engine: Engine, answers: list[Generation], died: bool
    ) -> None:
        """Keep what an engine answered; what failed with its death is left for another one."""
        if died and not any(other.serves for other in self._engines if other is not engine):
            batch.last_engine_deaths += 1
        batch.done.update((answer.request_id, answer) for answer in answers)
        failed = []
        if died and batch.last_engine_deaths < _LAST_ENGINE_DEATHS:
            failed = [r for r in batch.left if batch.done[r.request_id].finish_reason == "error"]
        for request in failed:
            del batch.done[request.request_id]
        batch.left = failed
        if batch.aborted:
            batch.end("abort", batch.aborted)
        fastest = None if engine.index in self._slow else self._scheduler.slower_than(engine.index)
        if fastest is not None:
            self._slow.add(engine.index)
            pace, best = (self._scheduler.engines[n].pace for n in (engine.index, fastest))
            self._note(
                f"engine-{engine.index}: it is slow, {pace:.3g} tokens/s for a response where "
                f"engine-{fastest} makes {best:.3g}; a sync batch waits for it"
            )

    def close(self) -> None:
        """Answer nothing any more: what is left ends with an error."""
        self.closed = True

    # ---- the queue

    def bind_queued(self) -> None:
        """Bind queued requests for as long as engines have free slots."""
        if self._scheduler.waiting:
            for batch in self._scheduler.bindings(asyncio.get_running_loop().time()):
                batch.wake(True)

    def unqueue_all(self) -> None:
        """Let queued requests wait for an engine that serves."""
        for batch in self._scheduler.queued():
            self._unqueue(batch)

    def _release(self, batch: PromptBatch, answers: Sequence[Generation] = ()) -> None:
        """Unbind a batch; if all its responses have ended, measure the engine by their lengths."""
        whole = all(answer.finish_reason not in ("error", "abort") for answer in answers)
        lengths = [len(answer.token_ids) for answer in answers] if whole else []
        self._scheduler.release(batch, asyncio.get_running_loop().time(), lengths)
        self.bind_queued()

    def _unqueue(self, batch: PromptBatch) -> None:
        self._scheduler.withdraw(batch)
        batch.wake(False)

    # ---- aborts

    async def abort(self, request_id: str) -> None:
        """End one request: at once if it waits, else by its engine, also one that is being drained."""
        batch = self._batches.get(request_id)
        if batch is None:
            return
        batch.aborted.add(request_id)
        if batch.engine is None:
            self._end(batch, [request_id])
        elif batch.binding is None:  # else it is bound and not sent yet: it is never sent
            await abort_on(self._engines[batch.engine], [request_id])

    def end_waiting(self) -> None:
        """End all requests that wait for an engine."""
        for batch in dict.fromkeys(self._batches.values()):
            if batch.engine is None:
                self._end(batch)

    def _end(self, batch: PromptBatch, names: list[str] | None = None) -> None:
        batch.end("abort", names)
        if not batch.left:
            self._unqueue(batch)

    def _abort_later(self, engine: Engine, names: list[str]) -> None:
        task = asyncio.ensure_future(abort_on(engine, names))
        self._aborting.add(task)
        task.add_done_callback(self._aborting.discard)

    async def aborts_sent(self) -> None:
        """Wait for the aborts of cancelled callers."""
        await asyncio.gather(*self._aborting, return_exceptions=True)
