"""The protocol of rewards, and how their options are read.

A reward judges finished rollouts against their prompts. A bad answer is a score, never an exception.
An exception is a fault (a dead server, a broken test case) and follows the failure policy. `read_options` turns
the `options` table of a reward into its settings; every mistake in it is one line that says what is allowed.
"""

from __future__ import annotations

import asyncio
import difflib
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeVar

from pydantic import ValidationError, model_validator

from penstock.config import Section
from penstock.errors import UserError
from penstock.types import Prompt, Rollout, Score

S = TypeVar("S", bound=Section)

AskPolicy = Callable[[Sequence[Mapping[str, str]], int, float], Awaitable[tuple[str, str]]]
"""Of messages, most tokens and temperature: the words of the run's own engines, and why they ended."""


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


@dataclass(slots=True, frozen=True)
class Extract:
    """The answer that was found, or None; `note` says what is wrong with the response's form."""

    answer: str | None
    format_ok: bool
    note: str = ""


class Reward(ABC):
    """Consumes finished rollouts, produces Scores. A reward that judges one by one defines `score` alone."""

    Options: ClassVar[type[Section] | None] = None
    """Model of the `options` table; the constructor then takes it and `max_tokens`."""
    lowest_when_truncated: ClassVar[bool] = False
    """A truncated response gets the lowest value; a negative weight would turn that round."""
    needs_group: bool = False
    """It compares the rollouts of a group: call `score_group`, not `score` or `score_each`."""
    fewest: int = 1
    """Responses that a group must have at least."""
    asks_policy: ClassVar[bool] = False
    """Its constructor takes `ask_policy`, too."""
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

    async def probe(self) -> None:
        """Ask what the reward depends on once; raise RewardError if it does not answer."""
        return

    async def close(self) -> None:
        """End worker processes and connections, if there are any."""
        return


def read_options(reward: str, model: type[S], options: Mapping[str, Any]) -> S:
    """The settings of a reward; raise a UserError for the first mistake."""
    check_option_names(reward, options, model.model_fields)
    try:
        return model.model_validate(dict(options))
    except ValidationError as error:
        first = error.errors()[0]
        message = first["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
        if first["type"] == "value_error":
            raise UserError(f"reward {reward}: {message}") from None
        name = ".".join(str(part) for part in first["loc"])
        raise UserError(
            f"reward {reward}: option {name}: got {first['input']!r}, allowed: {message}"
        ) from None


def check_option_names(reward: str, options: Iterable[str], allowed: Iterable[str]) -> None:
    """Refuse an option that the reward does not have, naming the nearest that it has."""
    names = sorted(allowed)
    for option in options:
        if option not in names:
            near = difflib.get_close_matches(option, names, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UserError(
                f"reward {reward}: got the unknown option {option!r}, "
                f"allowed: {', '.join(names) or 'none'}{hint}"
            )
