"""Text that a model may write takes linear time in whatever finds or compares an answer, and never raises."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from penstock.reward.code import python_block
from penstock.reward.equality import clean, decide
from penstock.reward.math_answer import boxed_answer, tagged_answer
from stages.hostile_text import TEXTS, check_growth

READERS: dict[str, Callable[[str], object]] = {
    "python_block": python_block,
    "boxed_answer": boxed_answer,
    "tagged_answer": tagged_answer,
    "clean": clean,
    "decide": lambda text: decide("42", text),
    "decide a text": lambda text: decide("forty two", text),
    "decide by a long gold answer": lambda text: decide(text + "2", text + "1"),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_reader_of_answers_takes_linear_time(reader: str) -> None:
    for name, text in TEXTS.items():
        try:
            check_growth(READERS[reader], text)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None
