"""Rewards that tests give to runs and agent loops."""

from __future__ import annotations

from collections.abc import Callable

from penstock.reward.protocol import Reward
from penstock.types import Prompt, Rollout, Score

ODD_REWARD = f"{__file__}:odd_reward"  # as a config names it


def odd_reward(rollout: Rollout, prompt: Prompt) -> float:
    """Differs within nearly every group, and depends on nothing but the tokens."""
    return float(int(rollout.response_ids.sum()) % 5) / 4


class CountingReward(Reward):
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
