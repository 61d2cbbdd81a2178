"""An engine without a model that holds every second group until an update, an abort or the end of a step.

So a run has responses in flight at every weight update, whatever the speed of the machine. For runs with
`launch.kind = "inline"`: the tracker that ends a step lives in the same process.
"""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

import numpy as np

from penstock.config import Config
from penstock.engine.protocol import EngineStats, Generation, GenerationRequest, PauseMode
from penstock.inspection.track.logs import RunInfo
from penstock.types import VersionSegment, WeightHandle

HELD_ENGINE = "stages.held_engine:HeldEngine"  # as a config names it
DEAF_ENGINE = "stages.held_engine:DeafEngine"
STEP_ENDS = "stages.held_engine:StepEnds"
HALF = 2  # tokens of a held response before and after it is held


class HeldEngine:
    """A response has four tokens; those of odd groups wait after two of them, at their first try."""

    running: ClassVar[list[HeldEngine]] = []

    def __init__(self) -> None:
        self.version, self.digest, self.tokens = -1, "", 0
        self._held: dict[str, asyncio.Future[bool]] = {}  # False: aborted
        self._seen: set[str] = set()

    @classmethod
    def from_config(cls, config: Config, **parts: Any) -> HeldEngine:
        cls.running[:] = [cls()]
        return cls.running[0]

    async def start(self) -> None: ...

    async def generate(self, request: GenerationRequest) -> Generation:
        rollout_id = request.request_id.split("/")[0]
        is_odd = int(rollout_id.split(":")[1].split(".")[0]) % 2 == 1
        segments = [VersionSegment(version=self.version, length=HALF)]
        if len(request.response_ids):
            return self._made(request, segments, "stop")
        if not is_odd or rollout_id in self._seen:
            return self._made(request, segments * 2, "stop")
        self._seen.add(rollout_id)
        self._held[request.request_id] = held = asyncio.get_running_loop().create_future()
        try:
            finished = await held
        finally:
            del self._held[request.request_id]
        if finished:
            segments.append(VersionSegment(version=self.version, length=HALF))
        return self._made(request, segments, "stop" if finished else "abort")

    def _made(
        self, request: GenerationRequest, segments: list[VersionSegment], reason: Any
    ) -> Generation:
        at, length = len(request.response_ids), sum(segment.length for segment in segments)
        self.tokens += length
        rng = np.random.default_rng([request.seed, at])
        return Generation(
            request_id=request.request_id,
            token_ids=rng.integers(1, 20, length).astype(np.int32),
            logprobs=-rng.random(length).astype(np.float32),
            segments=tuple(segments),
            finish_reason=reason,
        )

    async def generate_many(self, requests: list[GenerationRequest]) -> list[Generation]:
        return list(await asyncio.gather(*(self.generate(request) for request in requests)))

    def release(self) -> None:
        """Let all held responses finish."""
        for held in self._held.values():
            if not held.done():
                held.set_result(True)

    async def abort(self, request_id: str) -> None:
        held = self._held.get(request_id)
        if held is not None and not held.done():
            held.set_result(False)

    async def pause(self, mode: PauseMode = "abort") -> None: ...

    async def resume(self) -> None: ...

    async def update_weights(self, version: int, source: WeightHandle) -> str:
        self.version, self.digest = version, source.digest
        self.release()
        return self.digest

    async def sleep(self) -> None: ...

    async def wake(self) -> None: ...

    async def stats(self) -> EngineStats:
        return EngineStats(
            policy_version=self.version,
            digest=self.digest,
            running=len(self._held),
            waiting=0,
            tokens_generated=self.tokens,
            busy_s=0.0,
        )

    async def close(self) -> None:
        for request_id in list(self._held):
            await self.abort(request_id)


class DeafEngine(HeldEngine):
    """Ignores aborts, so that a pause ends at its time-out."""

    async def abort(self, request_id: str) -> None: ...

    async def close(self) -> None:
        self.release()


class StepEnds:
    """A tracker that lets held responses finish after each step, before the engine gets its weights."""

    def __init__(self, info: RunInfo) -> None: ...

    def log_step(self, step: int, metrics: dict[str, float]) -> None:
        HeldEngine.running[0].release()

    def log_eval(self, step: int, metrics: dict[str, float]) -> None: ...

    def note(self, text: str) -> None: ...

    def close(self) -> None: ...
