"""Built-in tasks: a split that holds, an order that is fixed, answers that are right."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.data import builtin
from penstock.errors import UserError


def pairs(records: list[builtin.Record]) -> list[tuple[int, int]]:
    texts = [record["messages"][0]["content"].split("+") for record in records]
    return [(int(a), int(b)) for a, b in texts]


def test_every_two_digit_sum_is_on_exactly_one_side() -> None:
    train, heldout = pairs(builtin.addition("train")), pairs(builtin.addition("heldout"))
    assert len(set(train)) == len(train)
    assert len(set(heldout)) == len(heldout)
    assert not set(train) & set(heldout)
    assert len(train) + len(heldout) == 90 * 90
    assert 0.08 < len(heldout) / 8100 < 0.12


def test_no_heldout_sum_is_trained_the_other_way_round() -> None:
    train = set(pairs(builtin.addition("train")))
    assert not any((b, a) in train for a, b in pairs(builtin.addition("heldout")))


@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_the_split_does_not_depend_on_the_order_of_the_numbers(a: int, b: int) -> None:
    assert builtin.is_heldout(a, b) == builtin.is_heldout(b, a)


def test_the_split_is_the_same_on_every_machine() -> None:
    """The shipped policy was trained with this split: if it changed, held-out sums were trained on."""
    assert [record["messages"][0]["content"] for record in builtin.addition("heldout", size=3)] == [
        "69+69", "25+36", "99+97",
    ]  # fmt: skip


def test_answers_are_the_sums() -> None:
    records = builtin.addition("heldout")
    assert all(
        int(r["gt_answer"]) == a + b for r, (a, b) in zip(records, pairs(records), strict=True)
    )


def test_size_takes_the_first_of_the_same_order() -> None:
    assert builtin.addition("train", size=5) == builtin.addition("train")[:5]


def test_first_problems_are_a_fair_sample() -> None:
    """Problems are not sorted by size: the mean of the first 256 is close to the mean of all."""
    answers = [int(record["gt_answer"]) for record in builtin.addition("heldout")]
    assert abs(sum(answers[:256]) / 256 - sum(answers) / len(answers)) < 6


def test_names_and_splits() -> None:
    assert builtin.is_builtin("addition")
    assert builtin.is_builtin("addition:heldout")
    assert not builtin.is_builtin("data.jsonl")
    assert builtin.load("addition", {}) == builtin.load("addition:train", {})
    assert builtin.load("addition:heldout", {"size": 2}) == builtin.addition("heldout", size=2)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("addition:test", {}, "got 'addition:test', allowed: addition, addition:train"),
        ("addition", {"sise": 3}, "got 'sise', allowed: low, high, size"),
        ("addition", {"size": "3"}, "size of addition: got '3', allowed: a whole number"),
        ("addition", {"size": -1}, "got size=-1"),
        ("addition", {"low": 5, "high": 4}, "got low=5 high=4"),
        ("addition", {"low": 0, "high": 9999}, "allowed: at most 1000 numbers"),
    ],
)
def test_mistakes_are_named(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        builtin.load(name, options)
