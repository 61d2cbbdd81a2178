"""Finds the answer in a response: the last answer tag, the last brace-matched box, the last code block.

Each function returns the answer's text and whether the response has the required form; none judges
the answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

# possessive repeats, so that no text of a model takes more than linear time
_BOX_OR_BRACE = re.compile(
    r"(?<!\\)\\++boxed\s*+\{|\\.|[{}]", re.DOTALL
)  # an escaped brace is content
_FENCE = re.compile(r"(?P<fence>`{3,}+|~{3,}+)\s*+(?P<language>[^\s`{]*+)[^`]*+$")
_PYTHON = frozenset({"python", "python3", "py", "py3"})


@dataclass(slots=True, frozen=True)
class Extract:
    """The answer that was found, or None; `note` says what is wrong with the response's form."""

    answer: str | None
    format_ok: bool
    note: str = ""


def tagged_answer(text: str, think_tag: str = "think", answer_tag: str = "answer") -> Extract:
    """The text of the last answer tag. Required: each tag once, in order, no text after."""
    tags = [f"<{answer_tag}>", f"</{answer_tag}>"]
    if think_tag:
        tags = [f"<{think_tag}>", f"</{think_tag}>", *tags]
    note = _tag_fault(text, tags)
    return Extract(_last_between(text, tags[-2], tags[-1]), not note, note)


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


def _last_between(text: str, opening: str, closing: str) -> str | None:
    end = text.rfind(closing)
    if end < 0:
        return None
    start = text.rfind(opening, 0, end)
    return None if start < 0 else text[start + len(opening) : end].strip()


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


def python_block(text: str) -> Extract:
    """The last fenced python block; without one, the last fence that names no language."""
    blocks = list(_fenced_blocks(text))
    python = [body for language, body in blocks if language in _PYTHON]
    candidates = python or [body for language, body in blocks if not language]
    if not candidates:
        return Extract(None, False, "no fenced python block")
    return Extract(candidates[-1], True)


def _fenced_blocks(text: str) -> Iterator[tuple[str, str]]:
    fence, language, body = "", "", list[str]()
    for line in text.split("\n"):
        bare = line.strip()
        if fence and bare.startswith(fence) and not bare.strip(fence[0]):
            yield language, "\n".join(body) + "\n"
            fence = ""
        elif fence:
            body.append(line)
        elif match := _FENCE.match(bare):
            fence, language, body = match["fence"], match["language"].lower(), []
