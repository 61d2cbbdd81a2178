"""An engine for benchmarks of the driver: it answers at once, so that only the driver costs time."""

from __future__ import annotations

import resource
from pathlib import Path

import numpy as np

from penstock.engine.protocol import EngineStats, Generation, GenerationRequest, Generations
from penstock.types import VersionSegment

FACTORY = f"{Path(__file__).resolve()}:InstantEngine"


class InstantEngine:
    """An engine in a worker that answers at once with random tokens."""

    def __init__(self, tokens: int, slots: int = 0) -> None:
        self._tokens, self._slots, self._made = tokens, slots, 0
        self._random = np.random.default_rng(0)

    async def generate_many(self, requests: list[GenerationRequest]) -> list[Generation]:
        self._made += len(requests) * self._tokens
        return Generations(
            Generation(
                request_id=request.request_id,
                token_ids=self._random.integers(3, 60, self._tokens, dtype=np.int32),
                logprobs=np.zeros(self._tokens, np.float32),
                segments=(VersionSegment(0, self._tokens),),
                finish_reason="stop",
            )
            for request in requests
        )

    async def stats(self) -> EngineStats:
        return EngineStats(
            policy_version=0,
            digest="",
            running=0,
            waiting=0,
            tokens_generated=self._made,
            busy_s=0.0,
            slots=self._slots,
        )


def cpu_s(who: int) -> float:
    used = resource.getrusage(who)
    return used.ru_utime + used.ru_stime
