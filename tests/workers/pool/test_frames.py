"""The way of a group to its engine is short: a reader follows it through few functions."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import numpy as np
import pytest

from penstock.config import SamplingConfig
from penstock.rollout.agent.single_turn import SingleTurn
from penstock.types import Prompt, Rollout, Score
from stages.fake_engine import FakeEngine
from stages.supervised import EngineCrew, FakeWorker

MOST = 6  # from an agent loop to the call of a worker; the group runner adds one


class NoReward:
    needs_group = False

    async def score_each(self, rollouts: list[Rollout], prompts: list[Prompt]) -> list[Score]:
        return [Score(0.0) for _ in rollouts]


def our_functions() -> list[str]:
    """Return the functions of ours that wait for the caller, the outermost first."""
    names, frame = [], sys._getframe(1)
    while frame is not None:
        if "/src/penstock/" in frame.f_code.co_filename:
            names.append(frame.f_code.co_qualname)
        frame = frame.f_back  # type: ignore[assignment]
    return names[::-1]


def test_a_group_passes_few_functions_on_its_way_to_a_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    passed: list[list[str]] = []
    answer = FakeWorker.call

    async def call(self: FakeWorker, method: str, *args: Any) -> Any:
        if method == "generate_many":
            passed.append([*our_functions(), "ProcessWorker.call"])
        return await answer(self, method, *args)

    monkeypatch.setattr(FakeWorker, "call", call)

    async def main() -> None:
        crew = EngineCrew([FakeEngine(), FakeEngine()])
        pool = await crew.start()
        loop = SingleTurn(
            engine=pool, reward=NoReward(), sampling=SamplingConfig(), decode=lambda ids: ""
        )
        prompt = Prompt(prompt_id="p", messages=(), token_ids=np.array([1], np.int32))
        rollouts = [
            Rollout(rollout_id=f"r{n}", prompt=prompt, prompt_ids=prompt.token_ids, seed=n)
            for n in range(4)
        ]
        await loop.generate_group(rollouts)
        await pool.close()

    asyncio.run(main())
    (functions,) = passed
    assert len(functions) <= MOST, functions
    pool_side = [name for name in functions if not name.startswith("SingleTurn")]
    assert len(pool_side) <= 4, functions
