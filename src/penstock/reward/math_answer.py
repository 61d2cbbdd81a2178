"""think_answer_tags and boxed: a response is right when its answer equals the prompt's.

Text and plain numbers are compared at once; other pairs go to worker processes, started at the first such pair.
A truncated response is never right.

Algebra on a model's text may never end or use all memory, and math-verify's own time-out works only in a main
thread. So each worker is a process: past the time-out it is killed and replaced, and only that answer counts as
wrong. Results are cached, because the rollouts of a group often give the same answer.

`python -m penstock.reward.math_answer [MEMORY_BYTES]` is the worker: one JSON line `[gold, answer]` in, one line
`1` or `0` out. It limits its own memory.
"""

from __future__ import annotations

import logging
import re
import resource
import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from penstock.errors import RewardError
from penstock.reward.equality import clean, decide
from penstock.reward.line_process import ProcessGone, ProcessPool, ProcessSlow, serve_lines
from penstock.reward.protocol import Extract, Reward, ValueOptions
from penstock.types import Prompt, Rollout, Score

# possessive repeats, so that no text of a model takes more than linear time
# an escaped brace is content
_BOX_OR_BRACE = re.compile(r"(?<!\\)\\++boxed\s*+\{|\\.|[{}]", re.DOTALL)


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

    Options = AnswerOptions

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


# -- symbolic comparisons in worker processes ---------------------------------------------------


START_TIMEOUT_S = 120.0
CACHE_SIZE = 8192
MEMORY_BYTES = 4 << 30  # address space of one worker
_LETTER = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]")  # of a name, not of a command such as \\frac


@dataclass(slots=True, frozen=True)
class Comparison:
    """Whether two answers are equal; `note` says why the comparison failed."""

    equal: bool
    note: str = ""


class MathPool:
    """Consumes pairs of answers, produces Comparisons; at most `workers` at a time."""

    def __init__(self, workers: int, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._workers = ProcessPool(
            [sys.executable, "-m", "penstock.reward.math_answer", str(MEMORY_BYTES)],
            workers,
            name="the symbolic comparison",
            start_timeout_s=START_TIMEOUT_S,
        )
        self._known: OrderedDict[tuple[str, str], Comparison] = OrderedDict()

    async def compare(self, gold: str, answer: str) -> Comparison:
        """Whether algebra finds the answers equal; an answer it cannot handle is not equal."""
        cached = self._known.get((gold, answer))
        if cached is not None:
            self._known.move_to_end((gold, answer))
            return cached
        comparison = self._known[gold, answer] = await self._ask(gold, answer)
        if len(self._known) > CACHE_SIZE:
            self._known.popitem(last=False)
        return comparison

    async def _ask(self, gold: str, answer: str) -> Comparison:
        for _ in range(2):  # another pair may have caused the first death
            async with self._workers.lend() as worker:
                try:
                    equal = await worker.ask([gold, answer], self._timeout_s, processor_time=True)
                    return Comparison(bool(equal))
                except ProcessSlow:
                    return Comparison(False, f"comparison took more than {self._timeout_s:g} s")
                except ProcessGone:
                    continue
        return Comparison(False, "comparison crashed its worker")

    async def close(self) -> None:
        """End every process."""
        await self._workers.close()


# -- the worker --------------------------------------------------------------------------------------


def compare(gold: str, answer: str) -> bool:
    """Whether math-verify finds the two equal; text that it cannot read is not equal."""
    from math_verify import verify

    sides = answer.split("=")
    if len(sides) > 1 and "=" not in gold and not _LETTER.search(sides[0]):
        return all(compare(gold, side) for side in sides)  # 6*7=42, but not 41=42
    expected, actual = _parse(gold), _parse(answer)
    if not expected or not actual:
        return False
    return bool(verify(expected, actual, timeout_seconds=None))


def _parse(text: str) -> list[Any]:
    from math_verify import parse

    cleaned = clean(text)
    parsed = parse(f"${cleaned}$", parsing_timeout=None)
    return parsed or parse(cleaned, parsing_timeout=None)


def main() -> None:
    """Serve until the input ends."""
    if len(sys.argv) > 1:
        limit = int(sys.argv[1])
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    logging.disable(logging.CRITICAL)
    serve_lines(_start)


def _start() -> Callable[[list[str]], int]:
    """Import everything and fill first-use tables before the pool counts the process as ready."""
    compare("x+1", "1+x")
    return _answer


def _answer(pair: list[str]) -> int:
    try:
        return int(compare(*pair))
    except Exception:  # a hostile answer may raise anything in the parser
        return 0


if __name__ == "__main__":
    main()
