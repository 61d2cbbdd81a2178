"""The transformers engine with response lengths from a distribution, for `pipeline_real.py`.

Each request gets min_tokens = max_tokens from a log-normal distribution, seeded by the request's seed.
Every call of `stats` (once per training step) appends to the file `meter` what the engine's thread did.
Everything else is the transformers engine, unchanged.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from penstock.config import Config
from penstock.engine.protocol import EngineStats, Fetch, Generation, GenerationRequest
from penstock.engine.transformers.engine import TransformersEngine
from penstock.engine.transformers.mailbox import Inbox, Order


@dataclass(slots=True, frozen=True, kw_only=True)
class Skew:
    """The [engine.options] of this engine, beside those of the transformers engine."""

    sigma: float = 0.0
    mean_tokens: float = 64.0
    most_tokens: int = 640
    meter: str = ""  # file for what the engine's thread did

    def length(self, seed: int) -> int:
        middle = np.log(self.mean_tokens) - self.sigma**2 / 2
        drawn = np.random.default_rng(seed).lognormal(middle, self.sigma)
        return int(np.clip(round(drawn), 1, self.most_tokens))


class TimedInbox(Inbox):
    """An inbox that counts how long the thread waited for work."""

    def __init__(self) -> None:
        super().__init__()
        self.slept_s = 0.0

    def take(self, *, wait: bool) -> Order | None:
        if not wait:
            return super().take(wait=False)
        began = time.perf_counter()
        order = super().take(wait=True)
        self.slept_s += time.perf_counter() - began
        return order


class SkewedEngine(TransformersEngine):
    """See `InferenceEngine`."""

    skew = Skew()

    @classmethod
    def from_config(cls, config: Config, *, fetch: Fetch, index: int = 0) -> Self:
        given = dict(config.engine.options)
        own = {name: given.pop(name) for name in Skew.__dataclass_fields__ if name in given}
        engine_config = config.engine.model_copy(update={"options": given})
        plain = config.model_copy(update={"engine": engine_config})
        engine = super().from_config(plain, fetch=fetch, index=index)
        engine.skew = Skew(**own)
        return engine

    def _reset(self) -> None:
        super()._reset()
        self._inbox: Any = TimedInbox()
        self._steps: list[
            tuple[float, float, int, int]
        ] = []  # seconds, CPU seconds, rows, new requests
        self._switch_s, self._switches = 0.0, 0

    async def generate_many(self, requests: list[GenerationRequest]) -> list[Generation]:
        drawn = [self.skew.length(request.seed) for request in requests]
        return await super().generate_many(
            [
                replace(one, sampling=replace(one.sampling, min_tokens=n, max_tokens=n))
                for one, n in zip(requests, drawn, strict=True)
            ]
        )

    def _step(self) -> None:
        tokens, waiting = self._tokens_generated, len(self._waiting)
        began, cpu = time.perf_counter(), time.thread_time()
        super()._step()
        seconds, cpu_s = time.perf_counter() - began, time.thread_time() - cpu
        rows, new = self._tokens_generated - tokens, waiting - len(self._waiting)
        self._steps.append((round(seconds, 6), round(cpu_s, 6), rows, new))

    def _switch(self, *arguments: Any) -> str:
        began = time.perf_counter()
        digest = super()._switch(*arguments)
        self._switch_s += time.perf_counter() - began
        self._switches += 1
        return digest

    def _stats(self) -> EngineStats:
        if self.skew.meter:
            line = {
                "at": time.monotonic(),
                "pid": os.getpid(),
                "cpu_s": time.process_time(),
                "slept_s": self._inbox.slept_s,
                "switch_s": self._switch_s,
                "switches": self._switches,
                "steps": self._steps,
            }
            self._steps = []
            with Path(self.skew.meter).open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        return super()._stats()
