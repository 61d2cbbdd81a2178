"""Responses that a model may write and that once stalled or broke a reader, in any size; and a test of growth.

Time is that of this thread's processor, the least of several tries: a busy machine changes nothing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

CALL = '<tool_call>{"name": "add", "arguments": {"a": %s}}</tool_call>'


def _repeated(piece: str, before: str = "", after: str = "") -> Callable[[int], str]:
    return lambda size: before + piece * (size // len(piece)) + after


def _nested(opening: str, closing: str, before: str = "", after: str = "") -> Callable[[int], str]:
    def text(size: int) -> str:
        depth = size // (len(opening) + len(closing))
        return before + opening * depth + closing * depth + after

    return text


_PIECES = {
    "tildes": "~",
    "backticks": "`",
    "fences": "```\n",
    "python fences": "```python\n",
    "mixed fences": "```\n~~~\n",
    "backslashes": "\\",
    "boxes that open": "\\boxed{",
    "boxes without a brace": "\\boxed ",
    "braces that open": "{",
    "braces that close": "}",
    "blanks": " ",
    "newlines": "\n",
    "line separators": "\u2028",
    "tabs and blanks": "\t ",
    "digits": "9",
    "groups of digits": "1,",
    "groups of three": "100,",
    "spaced groups": "100 ",
    "fractions": "1/",
    "dollars": "$",
    "texts": "\\text{",
    "fracs": "\\frac{1}",
    "powers": "9^",
    "words": "ab ",
    "units": "5 cm/",
    "accents": "\u0301",
    "zero bytes": "\0",
    "escape codes": "\x1b[2J",
    "directions": "\u202e",
    "lone surrogates": "\ud800",
    "markup": "<script>alert(1)</script>",
    "closing markup": "</script>",
    "think tags": "<think>",
    "closed think tags": "<think></think>",
    "ends of thoughts": "</think>",
    "answer tags": "<answer>",
    "closed answer tags": "<answer>1</answer>",
    "calls that open": "<tool_call>",
    "empty calls": "<tool_call></tool_call>",
    "calls": CALL % "1",
    "calls on lines": CALL % "1" + "\n",
    "calls after thoughts": "<think>a</think>" + CALL % "1",
    "turns": "<|im_end|><|im_start|>user\n",
    "turns of the test policy": "<eos><turn>user\n",
}
TEXTS: dict[str, Callable[[int], str]] = {
    **{name: _repeated(piece) for name, piece in _PIECES.items()},
    "ligatures": lambda size: "\ufdfa" * (size // 18),  # one becomes eighteen characters
    "tildes and a backtick": _repeated("~", after="`"),
    "a fence's line": _repeated("x", before="```", after="`"),
    "a fence's blanks": _repeated(" ", before="```", after="`"),
    "a python block": _repeated("x = 1\n", before="```python\n", after="```"),
    "a box behind backslashes": _repeated("\\", after="boxed{1}"),
    "blanks in a box": _repeated(" ", before="\\boxed", after="{1}"),
    "a long box": _repeated("1+", before="\\boxed{", after="1}"),
    "a long answer": _repeated("1+", before="<think></think><answer>", after="1</answer>"),
    "a box in boxes": _nested("\\boxed{", "}"),
    "blanks before a call": _repeated(" ", after=CALL % "1"),
    "blanks before no call": _repeated(" ", after="<tool_cal"),
    "blanks in a call": _repeated(" ", before="<tool_call>", after="</tool_call>"),
    "a deep call": _nested("[", "]", before="<tool_call>", after="</tool_call>"),
    "a deep argument": _nested("[", "]", before=CALL.partition("%s")[0], after="}}</tool_call>"),
    "a deep object": _nested('{"a":', "}", before=CALL.partition("%s")[0], after="1}}</tool_call>"),
    "a long number in a call": _repeated(
        "9", before=CALL.partition("%s")[0], after="}}</tool_call>"
    ),
    "surrogates in a call": _repeated(
        "\\ud800", before=CALL.partition("%s")[0] + '"', after='"}}</tool_call>'
    ),
    "a name of surrogates": _repeated(
        "\\ud800", before='<tool_call>{"name": "', after='"}</tool_call>'
    ),
    "a long thought": _repeated("a", before="<think>", after="</think>"),
    "deep json": _nested("[", "]"),
    "deep objects": _nested('{"a":', "}"),
    "quoted json": lambda size: json.dumps(json.dumps("\\" * (size // 4))),
}
SIZES = (1_600, 6_400, 25_600, 102_400)
FACTOR = 6.0  # most growth of the time for a text four times as large; its square for sixteen times
FIRST_S = 0.1  # most time for the first size
LEAST_S = 0.002  # below it a time says nothing about growth


def check_growth(
    action: Callable[[Any], object],
    make: Callable[[int], object],
    sizes: Sequence[int] = SIZES,
    first_s: float = FIRST_S,
) -> None:
    """Fail unless the action on sixteen times the text takes less than 6 x 6 times the processor time.

    Memory of a large text may cost half as much again as that of a small one, so no step is judged alone.
    """
    times: list[float] = []
    for number, size in enumerate(sizes):
        allowed = first_s
        if times:  # the second size has only a step of four behind it
            allowed = FACTOR ** min(number, 2) * max(times[max(0, number - 2)], LEAST_S)
        least = _least_time(action, make(size), allowed)
        assert least <= allowed, (
            f"{size} characters: {least:.3f} s of processor time, allowed: {allowed:.3f} s"
        )
        times.append(least)


def _least_time(action: Callable[[Any], object], text: object, enough: float) -> float:
    """The least processor time of two tries, or of up to six until it is short enough."""
    times: list[float] = []
    while len(times) < 2 or (min(times) > enough and len(times) < 6):
        start = time.thread_time()
        action(text)
        times.append(time.thread_time() - start)
    return min(times)
