"""An engine that makes tokens at a steady pace on the event loop's clock, without a model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from penstock.engine.protocol import EngineStats, Generation, GenerationRequest, PauseMode
from penstock.types import VersionSegment, WeightHandle


@dataclass(eq=False)
class _Running:
    request: GenerationRequest
    left: int
    since: float
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    segments: list[VersionSegment] = field(default_factory=list)

    def advance(self, now: float, version: int, seconds_per_token: float) -> None:
        """Count the tokens made since the last call."""
        made = self.left if not seconds_per_token else int((now - self.since) / seconds_per_token)
        made = min(made, self.left)
        if made:
            self.segments.append(VersionSegment(version=version, length=made))
            self.left -= made
            self.since += made * seconds_per_token


class FakeEngine:
    """Makes `length(request)` tokens at a steady pace on the event loop's clock."""

    def __init__(
        self,
        *,
        length: Callable[[GenerationRequest], int] = lambda request: 4,
        seconds_per_token: float = 0.01,
        fail: Callable[[GenerationRequest], str] = lambda request: "",
        version: int = 0,
    ) -> None:
        self.version = version
        self.calls = 0
        self.tokens = 0
        self._length = length
        self._seconds = seconds_per_token
        self._fail = fail
        self._running: dict[str, _Running] = {}

    async def start(self) -> None: ...

    async def generate(self, request: GenerationRequest) -> Generation:
        self.calls += 1
        reason = self._fail(request)
        if reason == "raise":
            raise RuntimeError("engine raised")
        if reason:
            return self._generation(request, [], "error", reason)
        loop = asyncio.get_running_loop()
        left = max(0, self._length(request) - len(request.response_ids))
        run = _Running(request, left, loop.time())
        self._running[request.request_id] = run
        timer = loop.call_later(left * self._seconds, run.ended.set)
        try:
            await run.ended.wait()
        finally:
            timer.cancel()
            del self._running[request.request_id]
        aborted = loop.time() < run.since + run.left * self._seconds - 1e-9
        if not aborted and run.left:
            run.segments.append(VersionSegment(version=self.version, length=run.left))
        else:
            run.advance(loop.time(), self.version, self._seconds)
        return self._generation(request, run.segments, "abort" if aborted else "stop")

    def _generation(
        self,
        request: GenerationRequest,
        segments: list[VersionSegment],
        reason: Any,
        error: str = "",
    ) -> Generation:
        length = sum(segment.length for segment in segments)
        self.tokens += length
        at = len(request.response_ids)
        rng = np.random.default_rng([request.seed, at])
        return Generation(
            request_id=request.request_id,
            token_ids=rng.integers(1, 100, length).astype(np.int32),
            logprobs=-rng.random(length).astype(np.float32),
            segments=tuple(segments),
            finish_reason=reason,
            error=error,
        )

    async def generate_many(self, requests: list[GenerationRequest]) -> list[Generation]:
        return await asyncio.gather(*(self.generate(request) for request in requests))

    async def abort(self, request_id: str) -> None:
        if request_id in self._running:
            self._running[request_id].ended.set()

    async def pause(self, mode: PauseMode = "abort") -> None:
        for request_id in list(self._running):
            await self.abort(request_id)

    async def resume(self) -> None: ...

    async def update_weights(self, version: int, source: WeightHandle | None = None) -> str:
        now = asyncio.get_running_loop().time()
        for run in self._running.values():
            run.advance(now, self.version, self._seconds)
        self.version = version
        return f"digest-{version}"

    async def sleep(self) -> None: ...

    async def wake(self) -> None: ...

    async def stats(self) -> EngineStats:
        return EngineStats(
            policy_version=self.version,
            digest=f"digest-{self.version}",
            running=len(self._running),
            waiting=0,
            tokens_generated=self.tokens,
            busy_s=0.0,
        )

    async def close(self) -> None:
        await self.pause()
