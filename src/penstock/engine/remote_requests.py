"""Requests that are being made elsewhere, each followed by a task of ours.

Engines that hand requests to vLLM or to a server share this: what has come so far is kept, so that an
abort returns it; a gate holds new requests outside during a pause or an update. Knows nothing of what
makes the tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from penstock.engine.protocol import FinishReason, Generation, GenerationRequest
from penstock.types import VersionSegment, extend_segments


@dataclass(slots=True, eq=False)
class RunningRequest:
    """One request; tokens are added as they come."""

    request: GenerationRequest
    inside: bool = False  # it passed the gate
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    segments: tuple[VersionSegment, ...] = ()
    task: asyncio.Task[Generation] | None = None

    def generation(self, reason: FinishReason, error: str = "") -> Generation:
        return Generation(
            request_id=self.request.request_id,
            token_ids=np.array(self.ids, np.int32),
            logprobs=np.array(self.logprobs, np.float32),
            segments=self.segments,
            finish_reason=reason,
            error=error,
        )

    def forget(self, tokens: int) -> None:
        """Take back all but the first `tokens` tokens."""
        del self.ids[tokens:], self.logprobs[tokens:]
        kept: tuple[VersionSegment, ...] = ()
        for segment in self.segments:
            length = min(segment.length, tokens)
            kept, tokens = extend_segments(kept, segment.version, length), tokens - length
        self.segments = kept


Follow = Callable[[RunningRequest], Awaitable[Generation]]


class InFlight:
    """The requests of one engine. `tokens` counts what they have brought since it was made."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()  # set: requests may go in
        self.tokens = 0
        self._running: dict[str, RunningRequest] = {}

    @property
    def inside(self) -> int:
        return sum(running.inside for running in self._running.values())

    @property
    def waiting(self) -> int:
        return len(self._running) - self.inside

    async def run(self, request: GenerationRequest, follow: Follow) -> Generation:
        """Wait for the gate, then follow the request; an abort returns what came until then."""
        running = RunningRequest(request)
        if request.request_id in self._running:
            return running.generation("error", f"request {request.request_id} is running already")
        if len(request.response_ids) >= request.sampling.max_tokens:
            return running.generation("length")
        running.task = asyncio.create_task(self._follow(running, follow))
        self._running[request.request_id] = running
        try:
            return await asyncio.shield(running.task)
        except asyncio.CancelledError:
            if running.task.cancelled():  # by abort, pause or close; not our caller's doing
                return running.generation("abort")
            running.task.cancel()
            raise
        finally:
            self._running.pop(request.request_id, None)

    async def _follow(self, running: RunningRequest, follow: Follow) -> Generation:
        await self.gate.wait()
        running.inside = True
        return await follow(running)

    def add(
        self, running: RunningRequest, ids: Sequence[int], logprobs: Sequence[float], version: int
    ) -> None:
        """New tokens, sampled under `version`."""
        running.ids.extend(ids)
        running.logprobs.extend(logprobs)
        running.segments = extend_segments(running.segments, version, len(ids))
        self.tokens += len(ids)

    async def abort(self, request_id: str) -> None:
        running = self._running.get(request_id)
        if running is not None and running.task is not None:
            running.task.cancel()
            await asyncio.wait([running.task])

    async def abort_all(self) -> None:
        await asyncio.gather(*(self.abort(request_id) for request_id in list(self._running)))

    async def wait_inside(self) -> None:
        """Until those that passed the gate have ended."""
        tasks = [r.task for r in self._running.values() if r.inside and r.task is not None]
        if tasks:
            await asyncio.wait(tasks)
