"""Fakes that several tests share: an engine and an agent loop on virtual time, prompts, rewards."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from penstock.engine.protocol import EngineStats, Generation, GenerationRequest, PauseMode
from penstock.produce.virtual_time import VirtualClock
from penstock.types import Prompt, Rollout, Score, Status, VersionSegment, WeightHandle

__all__ = [
    "CountingReward",
    "FakeAgentLoop",
    "FakeEngine",
    "VirtualClock",
    "finish_rollout",
    "make_prompt",
    "make_prompts",
]


def make_prompt(number: int = 0, length: int = 3) -> Prompt:
    return Prompt(
        prompt_id=f"data:{number}",
        messages=({"role": "user", "content": f"question {number}"},),
        token_ids=np.arange(1, length + 1),
        gt_answer=str(number),
        extra={"number": number},
    )


def make_prompts(count: int) -> list[Prompt]:
    return [make_prompt(number) for number in range(count)]


def finish_rollout(
    rollout: Rollout, *, version: int = 0, num_tokens: int = 4, reward: float = 1.0
) -> Rollout:
    """Give a rollout that is not finished the response and score of a finished one."""
    new = max(1, num_tokens - len(rollout.response_ids))
    rng = np.random.default_rng(rollout.seed)
    rollout.append(
        rng.integers(1, 100, new), -rng.random(new), [VersionSegment(version=version, length=new)]
    )
    rollout.finish_reason, rollout.text = "stop", "text"
    rollout.score = Score(reward)
    rollout.move_to(Status.COMPLETED)
    return rollout


class CountingReward:
    """Scores 1.0; `fail(rollout)` may return a reason to raise instead."""

    def __init__(self, fail: Callable[[Rollout], str] = lambda rollout: "") -> None:
        self.calls: list[str] = []
        self._fail = fail

    async def score(self, rollout: Rollout, prompt: Prompt) -> Score:
        self.calls.append(rollout.rollout_id)
        reason = self._fail(rollout)
        if reason:
            raise RuntimeError(reason)
        return Score(1.0, answer_ok=True)

    async def close(self) -> None: ...


@dataclass(eq=False)
class _Running:
    request: GenerationRequest
    left: int
    since: float
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    segments: list[VersionSegment] = field(default_factory=list)

    def advance(self, now: float, version: int, seconds_per_token: float) -> None:
        """Book the tokens that were made since the last look."""
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


class FakeAgentLoop:
    """Holds every group until the test decides: finish, fail, abort, raise."""

    def __init__(self) -> None:
        self.version = 0
        self.held: dict[str, tuple[list[Rollout], asyncio.Future[None]]] = {}
        self.calls = 0
        self.pauses = 0
        self.deaf = False  # does not hear aborts

    async def generate_group(
        self, rollouts: list[Rollout], *, enable_partial_rollout: bool = False
    ) -> list[Rollout]:
        self.calls += 1
        group_id = rollouts[0].rollout_id.rpartition(".")[0]
        decided: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.held[group_id] = (rollouts, decided)
        try:
            await decided
        finally:
            self.held.pop(group_id, None)
        return rollouts

    def finish(self, group_id: str, *, num_tokens: int = 4, reward: float = 1.0) -> None:
        rollouts, decided = self.held.pop(group_id)
        for rollout in rollouts:
            if rollout.status is not Status.COMPLETED:
                finish_rollout(rollout, version=self.version, num_tokens=num_tokens, reward=reward)
        decided.set_result(None)

    def fail(self, group_id: str, *, members: int = 1, reason: str = "broken") -> None:
        rollouts, decided = self.held.pop(group_id)
        for number, rollout in enumerate(rollouts):
            if rollout.status is Status.COMPLETED:
                continue
            if number < members:
                rollout.error = reason
                rollout.move_to(Status.FAILED)
            else:
                finish_rollout(rollout, version=self.version)
        if not any(rollout.status is Status.FAILED for rollout in rollouts):
            rollouts[0].move_to(Status.FAILED)
        decided.set_result(None)

    def raise_in(self, group_id: str) -> None:
        _, decided = self.held.pop(group_id)
        decided.set_exception(RuntimeError("the agent loop raised"))

    def abort(self, group_id: str, *, partial_tokens: int = 2) -> None:
        """Half of the members are done, the others keep `partial_tokens` more tokens."""
        rollouts, decided = self.held.pop(group_id)
        for number, rollout in enumerate(rollouts):
            if rollout.status is Status.COMPLETED:
                continue
            if number % 2:
                finish_rollout(rollout, version=self.version)
                continue
            if partial_tokens:
                rng = np.random.default_rng(rollout.seed)
                rollout.append(
                    rng.integers(1, 100, partial_tokens),
                    -rng.random(partial_tokens),
                    [VersionSegment(version=self.version, length=partial_tokens)],
                )
            rollout.finish_reason = "abort"
            rollout.move_to(Status.ABORTED)
        decided.set_result(None)

    async def pause(self) -> None:
        self.pauses += 1
        if not self.deaf:
            for group_id in list(self.held):
                self.abort(group_id)
