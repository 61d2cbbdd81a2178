"""think_answer_tags and boxed: a response is right when its answer equals the prompt's.

Text and plain numbers are compared at once; other pairs go to worker processes with a time-out
(`math_pool.py`), started at the first such pair. A truncated response is never right.
"""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field

from penstock.errors import RewardError
from penstock.reward.equality import decide
from penstock.reward.math_pool import MathPool
from penstock.reward.protocol import Extract, Reward, ValueOptions
from penstock.types import Prompt, Rollout, Score

# possessive repeats, so that no text of a model takes more than linear time
_BOX_OR_BRACE = re.compile(
    r"(?<!\\)\\++boxed\s*+\{|\\.|[{}]", re.DOTALL
)  # an escaped brace is content


class AnswerOptions(ValueOptions):
    """Settings that both kinds of math rewards share."""

    format: Literal["gate", "add", "ignore"] = "gate"
    """gate: an answer in the wrong form is wrong; add: the right form adds format_value; ignore."""
    format_value: float = Field(0.1, ge=0)
    """Value that the right form adds if format = add."""
    equality: Literal["symbolic", "numeric", "exact"] = "symbolic"
    """symbolic: algebra decides; numeric: equal numbers or equal text; exact: equal text."""
    workers: int = Field(2, ge=1)
    """Most processes for symbolic comparisons; they start when one is needed."""
    timeout_s: float = Field(5.0, gt=0)
    """Processor time of one symbolic comparison; past it the answer is wrong."""


class TagOptions(AnswerOptions):
    think_tag: str = "think"
    """Name of the tag around the reasoning; empty: none is asked for."""
    answer_tag: str = Field("answer", min_length=1)
    """Name of the tag around the answer."""
    opened_in_prompt: bool = False
    """The prompt ends with the opening think tag, so the response starts after it."""


class BoxedOptions(AnswerOptions):
    pass


class MathAnswer(Reward):
    """Consumes finished rollouts, produces Scores; a subclass says where the answer is."""

    lowest_when_truncated = True

    def __init__(self, options: AnswerOptions, *, max_tokens: int) -> None:
        self._settings = options
        self._pool = MathPool(options.workers, options.timeout_s)

    def extract(self, text: str) -> Extract:
        raise NotImplementedError

    async def score(self, rollout: Rollout, prompt: Prompt) -> Score:
        """Judge the form and the answer."""
        if prompt.gt_answer is None:
            raise RewardError(f"prompt {prompt.prompt_id} has no gt_answer to compare with")
        if rollout.finish_reason == "length":
            return self._score(False, False, "truncated")
        extract = self.extract(rollout.text)
        if extract.answer is None:
            return self._score(extract.format_ok, False, extract.note or "no answer")
        right, note = await self._equal(prompt.gt_answer, extract.answer)
        notes = "; ".join(filter(None, (extract.note, note)))
        return self._score(extract.format_ok, right, notes, extract.answer)

    async def _equal(self, gold: str, answer: str) -> tuple[bool, str]:
        if self._settings.equality == "exact":
            return gold.strip() == answer.strip(), ""
        verdict = decide(gold, answer)
        if verdict is None and self._settings.equality == "symbolic":
            comparison = await self._pool.compare(gold, answer)
            return comparison.equal, comparison.note
        return bool(verdict), ""

    def _score(
        self, format_ok: bool, answer_ok: bool, note: str, parsed: str | None = None
    ) -> Score:
        settings = self._settings
        earned = answer_ok and (format_ok or settings.format != "gate")
        value = settings.right if earned else settings.wrong
        if settings.format == "add" and format_ok:
            value += settings.format_value
        return Score(
            value=value, format_ok=format_ok, answer_ok=answer_ok, note=note, parsed=parsed
        )

    async def close(self) -> None:
        """End the comparison workers, if any were started."""
        await self._pool.close()


class ThinkAnswerTags(MathAnswer):
    """<think>...</think> <answer>...</answer>: each tag once, in order, nothing after the last."""

    Options = TagOptions

    def __init__(self, options: TagOptions, *, max_tokens: int) -> None:
        super().__init__(options, max_tokens=max_tokens)
        self._think_tag, self._answer_tag = options.think_tag, options.answer_tag
        opened = options.opened_in_prompt and options.think_tag
        self._opening = f"<{options.think_tag}>" if opened else ""

    def extract(self, text: str) -> Extract:
        return tagged_answer(self._opening + text, self._think_tag, self._answer_tag)


class Boxed(MathAnswer):
    """The last brace-matched \\boxed{...}."""

    Options = BoxedOptions

    def extract(self, text: str) -> Extract:
        return boxed_answer(text)


def tagged_answer(text: str, think_tag: str = "think", answer_tag: str = "answer") -> Extract:
    """The text of the last answer tag. Required: each tag once, in order, no text after."""
    tags = [f"<{answer_tag}>", f"</{answer_tag}>"]
    if think_tag:
        tags = [f"<{think_tag}>", f"</{think_tag}>", *tags]
    note, (opening, closing) = _tag_fault(text, tags), tags[-2:]
    before, closed, _ = text.rpartition(closing)
    _, opened, answer = before.rpartition(opening)
    return Extract(answer.strip() if closed and opened else None, not note, note)


def _tag_fault(text: str, tags: list[str]) -> str:
    for tag in tags:
        count = text.count(tag)
        if count != 1:
            return f"{tag} appears {count} times, allowed: once"
    positions = [text.index(tag) for tag in tags]
    if positions != sorted(positions):
        return f"tags are out of order, allowed: {' '.join(tags)}"
    if not text.rstrip().endswith(tags[-1]):
        return f"text after {tags[-1]}"
    return ""


def boxed_answer(text: str) -> Extract:
    r"""The content of the last \boxed{...} whose braces match; a box within a box is part of it."""
    answer: tuple[int, int] | None = None
    open_braces: list[int] = []  # start of the content for a box, -1 for another brace
    for match in _BOX_OR_BRACE.finditer(text):
        token = match.group()
        if token == "}":
            start = open_braces.pop() if open_braces else -1
            if start >= 0:
                answer = (start, match.start())
        elif token.endswith("{") and (token == "{" or "boxed" in token):
            open_braces.append(-1 if token == "{" else match.end())
    if answer is None:
        return Extract(None, False, "no \\boxed{...} with matching braces")
    return Extract(text[answer[0] : answer[1]].strip(), True)
