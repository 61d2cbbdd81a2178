"""Rewards for the length of a response: soft overlong punishment and length shaping.

Both give their lowest value to a truncated response, so that running into the limit never pays. They
count sampled tokens, not the results of an agent's tools, and do not look at the text.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from penstock.config import Section
from penstock.reward.protocol import Reward
from penstock.types import Prompt, Rollout, Score


class SoftOverlongOptions(Section):
    scale: float = Field(1.0, ge=0)
    """Penalty of a truncated response; use the value of a right answer."""
    buffer_tokens: int = Field(0, ge=0)
    """Tokens before the limit over which the penalty grows; 0: min(1024, max_tokens / 4)."""
    max_tokens: int = Field(0, ge=0)
    """The limit in tokens; 0: sampling.max_tokens."""


class SoftOverlong(Reward):
    """Gives 0 up to `limit - buffer` tokens, then falls linearly to -scale at the limit."""

    Options = SoftOverlongOptions
    lowest_when_truncated = True

    def __init__(self, options: SoftOverlongOptions, *, max_tokens: int) -> None:
        self._scale = options.scale
        self._limit = options.max_tokens or max_tokens
        buffer = options.buffer_tokens or min(1024, self._limit // 4)
        self._buffer = min(max(1, buffer), self._limit)

    async def score(self, rollout: Rollout, prompt: Prompt) -> Score:
        length = rollout.longest_answer
        over = length - (self._limit - self._buffer)
        share = min(1.0, max(0.0, over / self._buffer))
        if rollout.finish_reason == "length":
            share = 1.0
        note = f"{length} of {self._limit} tokens" if share else ""
        return Score(value=-self._scale * share if share else 0.0, note=note)


class LengthOptions(Section):
    target_tokens: int = Field(0, ge=0)
    """Length that gets the full reward."""
    span_tokens: int = Field(0, ge=0)
    """Distance from the target at which the reward reaches 0; 0: sampling.max_tokens."""
    scale: float = Field(1.0, ge=0)
    """Reward of the target length."""
    shape: Literal["below", "around"] = "below"
    """below: any length up to the target gets the full reward; around: shorter ones get less."""

    @model_validator(mode="after")
    def _around_needs_a_target(self) -> Self:
        if self.shape == "around" and not self.target_tokens:
            raise ValueError("option target_tokens: got 0, allowed: above 0 with shape = around")
        return self


class LengthShaping(Reward):
    """Gives `scale` at the target length and falls linearly to 0 at `span_tokens` from it."""

    Options = LengthOptions
    lowest_when_truncated = True

    def __init__(self, options: LengthOptions, *, max_tokens: int) -> None:
        self._settings = options
        self._span = options.span_tokens or max_tokens

    async def score(self, rollout: Rollout, prompt: Prompt) -> Score:
        if rollout.finish_reason == "length":
            return Score(value=0.0, note="truncated")
        distance = rollout.num_sampled - self._settings.target_tokens
        if self._settings.shape == "below":
            distance = max(0, distance)
        return Score(value=self._settings.scale * max(0.0, 1.0 - abs(distance) / self._span))
