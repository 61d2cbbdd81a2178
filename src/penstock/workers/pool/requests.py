"""The way of a request through the pool: queued, bound to an engine, answered or aborted.

The requests of one prompt go to one engine together, when it has room (`dispatch.py` decides, this file
acts). Requests of a dead engine are retried on another one, or wait for the first that serves again, so a
death costs time and no group. Knows engines by their index only; their states belong to `pool.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from penstock.engine.protocol import Generation, GenerationRequest
from penstock.workers.pool.dispatch import Dispatcher
from penstock.workers.pool.prompt_batch import PromptBatch

Generate = Callable[[int, list[GenerationRequest]], Awaitable[tuple[list[Generation], bool]]]
# A request fails after so many deaths of the only engine that served. More than launch.max_restarts by
# default: then the run stops with the reason of the deaths instead.
_LAST_ENGINE_DEATHS = 5


class Requests:
    """Consumes requests, produces generations. Waits for: room at an engine, or one that serves.

    Woken by: answers, engines that join, resume or load weights (`bind_queued`).
    """

    def __init__(
        self,
        engines: int,
        slots: int,
        *,
        generate: Generate,
        abort: Callable[[int, list[str]], Awaitable[None]],
        until_one_serves: Callable[[PromptBatch], Awaitable[None]],
        note: Callable[[str], None],
    ) -> None:
        """generate: returns the answers of an engine, and whether it died. abort: by request ids."""
        self.dispatcher = Dispatcher(engines, slots)
        self.closed = False
        self._generate, self._abort = generate, abort
        self._until_one_serves, self._note = until_one_serves, note
        self._batches: dict[str, PromptBatch] = {}  # request without an answer -> its batch
        self._aborting: set[asyncio.Task[None]] = set()
        self._slow: set[int] = set()  # engines that the user was told of

    async def generate_many(
        self, requests: list[GenerationRequest], *, least_version: int
    ) -> list[Generation]:
        shared, slots = requests[0].prompt_ids if requests else None, self.dispatcher.room.slots
        if 0 < len(requests) <= slots and all(one.prompt_ids is shared for one in requests):
            return await self._generate_batch(requests, least_version)  # a group, as most calls
        prompts: dict[bytes, list[int]] = {}
        for place, request in enumerate(requests):
            prompts.setdefault(request.prompt_ids.tobytes(), []).append(place)
        parts = [
            places[start : start + slots]
            for places in prompts.values()
            for start in range(0, len(places), slots)
        ]
        if len(parts) == 1:
            return await self._generate_batch(requests, least_version)
        batches = ([requests[place] for place in part] for part in parts)
        made = await asyncio.gather(*(self._generate_batch(one, least_version) for one in batches))
        results: dict[int, Generation] = {}
        for places, answers in zip(parts, made, strict=True):
            results.update(zip(places, answers, strict=True))
        return [results[place] for place in range(len(requests))]

    async def _generate_batch(
        self, requests: list[GenerationRequest], least_version: int
    ) -> list[Generation]:
        """Generate the responses of one prompt on one engine; if it dies, on another."""
        batch = PromptBatch.of(requests, least_version=least_version)
        self._batches.update((request.request_id, batch) for request in requests)
        began = False
        try:
            while batch.left and not self.closed:
                await self._until_one_serves(batch)
                if batch.left and await self._has_room(batch, first=began):
                    began = True
                    await self._run_on_engine(batch)
        finally:
            for request in requests:
                if self._batches.get(request.request_id) is batch:
                    del self._batches[request.request_id]
        batch.end("error", error="engine pool: it is closed")  # only requests that are still left
        return [batch.done[request.request_id] for request in requests]

    async def _has_room(self, batch: PromptBatch, *, first: bool) -> bool:
        """Wait until the batch is bound to an engine; False if it left the queue. Waits for: room."""
        loop = asyncio.get_running_loop()
        if self.dispatcher.offer(batch, loop.time(), first=first) is not None:
            return True
        batch.room = loop.create_future()
        self.bind_queued()
        try:
            return await batch.room
        except asyncio.CancelledError:
            if batch.engine is not None:  # bound and cancelled at the same time
                self._release(batch)
            raise
        finally:
            self.dispatcher.withdraw(batch)
            batch.room = None

    async def _run_on_engine(self, batch: PromptBatch) -> None:
        """Generate what is left of the batch on the engine that it is bound to."""
        assert batch.engine is not None
        batch.end("abort", batch.aborted)  # aborted after it was bound and before it is sent
        index, made, died = batch.engine, list[Generation](), False
        try:
            if batch.left:
                made, died = await self._generate(index, batch.left)
        except asyncio.CancelledError:  # the engine would go on with what nobody waits for
            self._abort_later(index, [request.request_id for request in batch.left])
            raise
        finally:
            whole = all(one.finish_reason not in ("error", "abort") for one in made)
            self._release(batch, [len(one.token_ids) for one in made] if whole else [])
        if died and not any(other != index for other in self.dispatcher.serving):
            batch.last_engine_deaths += 1
        batch.take(made, retry_failed=died and batch.last_engine_deaths < _LAST_ENGINE_DEATHS)
        batch.end("abort", batch.aborted)
        self._tell_if_slow(index)

    def close(self) -> None:
        """Answer nothing any more: what is left ends with an error."""
        self.closed = True

    # ---- the queue

    def bind_queued(self) -> None:
        """Bind queued requests for as long as engines have room."""
        if self.dispatcher.waiting:
            for work in self.dispatcher.bindings(asyncio.get_running_loop().time()):
                assert isinstance(work, PromptBatch)
                work.wake(True)

    def unqueue_all(self) -> None:
        """Let queued requests wait for an engine that serves."""
        for work in self.dispatcher.waiters():
            assert isinstance(work, PromptBatch)
            self._unqueue(work)

    def _release(self, batch: PromptBatch, lengths: list[int] | None = None) -> None:
        self.dispatcher.release(batch, asyncio.get_running_loop().time(), lengths or ())
        self.bind_queued()

    def _unqueue(self, batch: PromptBatch) -> None:
        self.dispatcher.withdraw(batch)
        batch.wake(False)

    def _tell_if_slow(self, index: int) -> None:
        fastest = None if index in self._slow else self.dispatcher.slower_than(index)
        if fastest is not None:
            self._slow.add(index)
            pace, best = (self.dispatcher.members[n].pace for n in (index, fastest))
            self._note(
                f"engine-{index}: it is slow, {pace:.3g} tokens/s for a response where "
                f"engine-{fastest} makes {best:.3g}; a sync batch waits for it"
            )

    # ---- aborts

    async def abort(self, request_id: str) -> None:
        """End one request: at once if it waits, else by its engine, also one that is being drained."""
        batch = self._batches.get(request_id)
        if batch is None:
            return
        batch.aborted.add(request_id)
        if batch.engine is None:
            self._end(batch, [request_id])
        elif batch.room is None:  # else it is bound and not sent yet: it is never sent
            await self._abort(batch.engine, [request_id])

    def end_waiting(self) -> None:
        """End all requests that wait for an engine."""
        for batch in dict.fromkeys(self._batches.values()):
            if batch.engine is None:
                self._end(batch)

    def _end(self, batch: PromptBatch, names: list[str] | None = None) -> None:
        batch.end("abort", names)
        if not batch.left:
            self._unqueue(batch)

    def _abort_later(self, index: int, names: list[str]) -> None:
        task = asyncio.ensure_future(self._abort(index, names))
        self._aborting.add(task)
        task.add_done_callback(self._aborting.discard)

    async def aborts_sent(self) -> None:
        """Wait for the aborts of cancelled callers."""
        await asyncio.gather(*self._aborting, return_exceptions=True)
