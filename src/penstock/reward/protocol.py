"""The protocol of rewards.

A reward judges one finished rollout against its prompt. A bad answer is a score, never an exception.
An exception is a fault (a dead server, a broken test case) and follows the failure policy.
"""

from __future__ import annotations

from typing import Protocol, Self

from pydantic import model_validator

from penstock.config import Section
from penstock.types import Prompt, Rollout, Score


class ValueOptions(Section):
    """The values of a reward that knows right from wrong."""

    right: float = 1.0
    """Value of a right answer, or of a program that passes all tests."""
    wrong: float = 0.0
    """Value of a wrong or missing answer, or of a program that passes no test."""

    @model_validator(mode="after")
    def _right_is_better(self) -> Self:
        if self.right < self.wrong:
            raise ValueError(
                f"option right: got {self.right}, allowed: at least wrong = {self.wrong}"
            )
        return self


class Reward(Protocol):
    """Consumes a finished rollout, produces a Score."""

    async def score(self, rollout: Rollout, prompt: Prompt) -> Score:
        """Judge one rollout. `rollout.text` is the response, `prompt` holds the right answer."""

    async def close(self) -> None:
        """End worker processes and connections."""
