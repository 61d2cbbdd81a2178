"""An engine that makes tokens at a pace of its own, in slots, on the event loop's clock.

A token depends only on the request's seed and the token's position, as with a real engine on a CPU:
a response is the same on every engine and for any number of interruptions.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from penstock.engine.protocol import (
    EngineStats,
    FinishReason,
    Generation,
    GenerationRequest,
    PauseMode,
    SamplingParams,
)
from penstock.errors import EngineError
from penstock.types import VersionSegment, WeightHandle, extend_segments


def tokens_of(seed: int, start: int, stop: int) -> np.ndarray:
    return ((np.arange(start, stop) * 7919 + seed % 997 * 104729) % 997).astype(np.int32)


def logprobs_of(seed: int, start: int, stop: int) -> np.ndarray:
    return (-tokens_of(seed, start, stop) / 997).astype(np.float32)


def request_of(
    name: str, prompt: int, *, seed: int = 0, length: int = 10, longest: int = 1000
) -> GenerationRequest:
    """Return a request that gets `length` tokens."""
    return GenerationRequest(
        request_id=name,
        prompt_ids=np.array([prompt, length], np.int32),
        sampling=SamplingParams(max_tokens=longest, min_tokens=length),
        seed=seed,
    )


def length_of(request: GenerationRequest) -> int:
    return request.sampling.min_tokens


@dataclass(eq=False)
class _Run:
    request: GenerationRequest
    answer: asyncio.Future[Generation]
    left: int
    at: float = 0.0  # time up to which tokens were counted, or at which the prefill ends
    made: int = 0
    segments: tuple[VersionSegment, ...] = ()
    timer: asyncio.TimerHandle | None = None


@dataclass(eq=False)
class PacedEngine:
    """Makes one token per `token_s` in each slot; `set_pace()` changes that at any time."""

    token_s: float
    slots: int = 4
    prefill_s: float = 0.0  # seconds per token of prompt and partial response
    load_s: float = 0.0  # seconds to load weights
    version: int = 0
    tokens: int = 0
    calls: int = 0
    begun: dict[str, int] = field(default_factory=dict)  # request -> times that it got a slot
    on_begin: Callable[[str], None] = lambda name: None
    length: Callable[[GenerationRequest], int] = length_of
    dead: bool = False
    paused: bool = False
    _running: dict[str, _Run] = field(default_factory=dict)
    _waiting: deque[_Run] = field(default_factory=deque)
    _idle: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def names(self) -> set[str]:
        return {*self._running, *(run.request.request_id for run in self._waiting)}

    async def start(self) -> None:
        self.dead = self.paused = False

    async def generate(self, request: GenerationRequest) -> Generation:
        self.calls += 1
        loop = asyncio.get_running_loop()
        run = _Run(request, loop.create_future(), self.length(request) - len(request.response_ids))
        if self.dead:
            return self._made(run, "error", "it is dead")
        if request.request_id in self.names:
            return self._made(run, "error", "running already")
        self._waiting.append(run)
        self._admit()
        try:
            return await run.answer
        except asyncio.CancelledError:
            if self._find(request.request_id) is run:
                self._finish(run, "abort")
            raise

    async def generate_many(self, requests: list[GenerationRequest]) -> list[Generation]:
        return list(await asyncio.gather(*(self.generate(request) for request in requests)))

    def _admit(self) -> None:
        now = asyncio.get_running_loop().time()
        while self._waiting and len(self._running) < self.slots and not self.paused:
            run = self._waiting.popleft()
            request = run.request
            self._running[request.request_id] = run
            self.begun[request.request_id] = self.begun.get(request.request_id, 0) + 1
            self.on_begin(request.request_id)
            known = len(request.prompt_ids) + len(request.response_ids)
            run.at = now + known * self.prefill_s
            self._time(run)

    def _time(self, run: _Run) -> None:
        loop = asyncio.get_running_loop()
        if run.timer is not None:
            run.timer.cancel()
        due = run.at + (run.left - run.made) * self.token_s
        run.timer = loop.call_at(due, self._finish, run, "stop")

    def _count(self, run: _Run, whole: bool = False) -> None:
        """Count the tokens made since the last call."""
        now = asyncio.get_running_loop().time()
        new = run.left - run.made if whole else int((now - run.at) / self.token_s + 1e-9)
        new = max(0, min(new, run.left - run.made))
        run.made += new
        run.at += new * self.token_s
        run.segments = extend_segments(run.segments, self.version, new)
        self.tokens += new

    def _finish(self, run: _Run, reason: FinishReason) -> None:
        if run.timer is not None:
            run.timer.cancel()
        name = run.request.request_id
        if self._running.pop(name, None) is not None:
            self._count(run, whole=reason == "stop")
        else:
            self._waiting.remove(run)
        if not run.answer.done():
            run.answer.set_result(self._made(run, reason, "it died" if self.dead else ""))
        if not self._running:
            self._idle.set()
        if not self.dead:
            self._admit()

    def _made(self, run: _Run, reason: FinishReason, error: str = "") -> Generation:
        seed, start = run.request.seed, len(run.request.response_ids)
        made = 0 if reason == "error" else run.made
        return Generation(
            request_id=run.request.request_id,
            token_ids=tokens_of(seed, start, start + made),
            logprobs=logprobs_of(seed, start, start + made),
            segments=run.segments if made else (),
            finish_reason=reason,
            error=error,
        )

    def _find(self, name: str) -> _Run | None:
        waiting = (run for run in self._waiting if run.request.request_id == name)
        return self._running.get(name) or next(waiting, None)

    def _count_all(self) -> None:
        for run in self._running.values():
            self._count(run)

    def set_pace(self, token_s: float) -> None:
        self._count_all()
        self.token_s = token_s
        for run in self._running.values():
            self._time(run)

    def die(self) -> None:
        self.dead = True
        for run in [*self._running.values(), *self._waiting]:
            self._finish(run, "error")
        self._idle.set()

    async def abort(self, request_id: str) -> None:
        """Abort the request; the requests of a dead engine have ended with it."""
        run = self._find(request_id)
        if run is not None:
            self._finish(run, "abort")

    async def pause(self, mode: PauseMode = "abort") -> None:
        self._check()
        self.paused = True
        if mode == "abort":
            for run in [*self._running.values(), *self._waiting]:
                self._finish(run, "abort")
        while mode == "wait" and self._running:
            self._idle.clear()
            await self._idle.wait()

    async def resume(self) -> None:
        self._check()
        self.paused = False
        self._admit()

    async def update_weights(self, version: int, source: WeightHandle | None = None) -> str:
        self._check()
        await asyncio.sleep(self.load_s)
        self._check()
        self._count_all()
        self.version = version
        return f"digest-{version}"

    async def sleep(self) -> None: ...

    async def wake(self) -> None: ...

    async def stats(self) -> EngineStats:
        self._check()
        self._count_all()
        return EngineStats(
            policy_version=self.version,
            digest=f"digest-{self.version}",
            running=len(self._running),
            waiting=len(self._waiting),
            tokens_generated=self.tokens,
            busy_s=0.0,
            paused=self.paused,
        )

    async def close(self) -> None:
        for run in [*self._running.values(), *self._waiting]:
            self._finish(run, "abort")
        self.dead = True

    def _check(self) -> None:
        if self.dead:
            raise EngineError("it is dead")
