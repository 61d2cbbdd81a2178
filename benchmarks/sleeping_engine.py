"""An engine and a trainer that mostly sleep, for `twin.py`: set speeds, set lengths, real weights and processes.

Responses have lengths from a log-normal distribution, seeded by the request. A decode step of n rows takes
`step_s + n * row_s` by the clock of the worker's event loop. Weights are read and their digest is checked. The
algorithm is GRPO; its loss also sleeps for each token, so that other work on the machine changes little.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from penstock.config import Config
from penstock.data.sampler import stable_hash
from penstock.engine.protocol import Fetch
from penstock.run.twin.engine import ModelledEngine
from penstock.run.twin.profile import DecodeModel
from penstock.training.algo.method import GRPO, Surrogate, TokenView
from penstock.types import Prompt, Rollout, Score, WeightHandle


@dataclass(slots=True, frozen=True, kw_only=True)
class Pace:
    """The [engine.options] of this engine."""

    step_s: float = 0.08
    row_s: float = 5e-5
    prefill_s: float = 0.002
    mean_tokens: float = 40.0
    sigma: float = 0.0

    def length(self, name: str, most: int) -> int:
        drawn = np.random.default_rng(stable_hash(name)).lognormal(
            np.log(self.mean_tokens) - self.sigma**2 / 2, self.sigma
        )
        return int(np.clip(round(drawn), 1, most))


class SleepingEngine(ModelledEngine):
    """See `InferenceEngine`."""

    @classmethod
    def from_config(cls, config: Config, *, fetch: Fetch, index: int = 0) -> Self:
        pace, most = Pace(**config.engine.options), config.sampling.max_tokens
        decode = DecodeModel(
            step_s=pace.step_s,
            row_s=pace.row_s,
            prefill_s=pace.prefill_s,
            slots=config.engine.max_slots,
        )
        engine = cls(decode, lambda name: pace.length(name.partition("/")[0], most))
        engine._fetch = fetch
        return engine

    _fetch: Any

    async def update_weights(self, version: int, source: WeightHandle) -> str:
        from penstock.weights.digest import digest_of

        digest = await asyncio.to_thread(lambda: digest_of(self._fetch(source)))
        assert digest == source.digest, (digest, source.digest)
        return await super().update_weights(version, source)


class SleepingGRPO(GRPO):
    """GRPO whose loss takes a set time for each token."""

    TOKEN_S = 2e-3

    def surrogate(self, view: TokenView) -> Surrogate:
        time.sleep(self.TOKEN_S * len(view.logprobs_N))
        return super().surrogate(view)


class Differs:
    """A reward that differs within a group, so that every group has a gradient; it takes a moment."""

    async def score(self, rollout: Rollout, prompt: Prompt) -> Score:
        await asyncio.sleep(0.02)
        return Score(float(stable_hash(rollout.rollout_id) % 2))

    async def close(self) -> None: ...
