"""Decides within microseconds, without a worker, whether an answer equals the right one.

Text and plain numbers are compared here; a pair that needs algebra gives None and goes to the
symbolic comparison (`math_pool.py`). Texts past a limit are never parsed, so no call takes long.
"""

from __future__ import annotations

import re

from penstock.reward.quantity import clean, read_quantity, same_quantity

MAX_ANSWER_CHARS = 1000  # a longer answer is right only if it is the same text

_INTEGER = re.compile(r"[+-]?\d{1,18}", re.ASCII)
_OUTER_TEXT = re.compile(r"\\(?:text|textbf|textrm|mathrm|mathbf|mbox|boxed|fbox)\s*\{([^{}]*)\}")
_SPACES = re.compile(r"\s+")
_CHOICE = re.compile(r"\(?([A-Za-z])[).]?")
_WORDS = re.compile(r"(?=.*[^\W\d_]{4})[^\W\d_]+(?: [^\W\d_]+)*")  # too long for a product


def decide(gold: str, answer: str) -> bool | None:
    """Return whether the answers are equal; None if only algebra can tell."""
    gold, answer = gold.strip(), answer.strip()
    if gold == answer:
        return bool(gold)
    if not gold or not answer:
        return False
    if _INTEGER.fullmatch(gold) and _INTEGER.fullmatch(answer):
        return int(gold) == int(answer)
    if len(answer) > max(MAX_ANSWER_CHARS, 2 * len(gold)):
        return False
    return _decide_cleaned(_unwrap(clean(gold)), _unwrap(clean(answer)))


def _unwrap(text: str) -> str:
    """Remove a \\text{...} or \\boxed{...} around the whole answer."""
    while match := _OUTER_TEXT.fullmatch(text):
        text = clean(match.group(1))
    return text


def _decide_cleaned(gold: str, answer: str) -> bool | None:
    left, right = _SPACES.sub("", gold), _SPACES.sub("", answer)
    if not left or not right:
        return False
    if left == right:
        return True
    gold_quantity = read_quantity(gold)
    has_unit = gold_quantity is not None and bool(gold_quantity.unit)
    answer_quantity = read_quantity(answer, letter_units=has_unit)
    if gold_quantity and answer_quantity:
        return same_quantity(gold_quantity, answer_quantity)
    if gold_quantity and not _could_be_a_number(answer):
        return False
    return _decide_text(gold, answer)


def _could_be_a_number(answer: str) -> bool:
    return "\\" in answer or any(map(str.isnumeric, answer))


def _decide_text(gold: str, answer: str) -> bool | None:
    gold_choice, answer_choice = _CHOICE.fullmatch(gold), _CHOICE.fullmatch(answer)
    if gold_choice and answer_choice and gold_choice.group(1) == answer_choice.group(1):
        return True
    if _WORDS.fullmatch(gold):
        words = _SPACES.sub(" ", gold).casefold(), _SPACES.sub(" ", answer).casefold()
        if words[0] == words[1]:
            return True
        if _WORDS.fullmatch(answer):
            return False
    if len(gold) > 1 and gold.isalpha() and gold.casefold() == answer.casefold():
        return True
    return None
