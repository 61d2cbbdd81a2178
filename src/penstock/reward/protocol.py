"""The protocol of rewards.

A reward judges finished rollouts against their prompts. A bad answer is a score, never an exception.
An exception is a fault (a dead server, a broken test case) and follows the failure policy.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Self

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


class Reward(ABC):
    """Consumes finished rollouts, produces Scores. A reward that judges one by one defines `score` alone."""

    Options: ClassVar[type[Section] | None] = None
    """Model of the `options` table; the constructor then takes it and `max_tokens`."""
    lowest_when_truncated: ClassVar[bool] = False
    """A truncated response gets the lowest value; a negative weight would turn that round."""
    needs_group: bool = False
    """It compares the rollouts of a group: call `score_group`, not `score` or `score_each`."""
    fields: tuple[str, ...] = ()
    """Fields of the data that every record must have."""

    @abstractmethod
    async def score(self, rollout: Rollout, prompt: Prompt) -> Score:
        """Judge one rollout. `rollout.text` is the response, `prompt` holds the right answer."""

    async def score_each(
        self, rollouts: Sequence[Rollout], prompts: Sequence[Prompt]
    ) -> list[Score | BaseException]:
        """Judge rollouts one by one; where one cannot be judged, the error stands in its place."""
        calls = map(self.score, rollouts, prompts)
        return await asyncio.gather(*calls, return_exceptions=True)

    async def score_group(
        self, rollouts: Sequence[Rollout], prompts: Sequence[Prompt]
    ) -> list[Score]:
        """Judge the rollouts of one group; raise the first error once all calls have ended."""
        scores = []
        for outcome in await self.score_each(rollouts, prompts):
            if isinstance(outcome, BaseException):
                raise outcome
            scores.append(outcome)
        return scores

    async def close(self) -> None:
        """End worker processes and connections, if there are any."""
        return
