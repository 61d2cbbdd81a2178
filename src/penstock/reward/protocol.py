"""The protocol of rewards.

A reward judges one finished rollout against its prompt. A bad answer is a score, never an exception.
An exception is a fault (a dead server, a broken test case) and follows the failure policy.
"""

from __future__ import annotations

from typing import Protocol

from penstock.types import Prompt, Rollout, Score


class Reward(Protocol):
    """Consumes a finished rollout, produces a Score."""

    async def score(self, rollout: Rollout, prompt: Prompt) -> Score:
        """Judge one rollout. `rollout.text` is the response, `prompt` holds the right answer."""

    async def close(self) -> None:
        """End worker processes and connections."""
