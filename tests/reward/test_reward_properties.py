"""A reward never raises on any text, and is the same for the same input."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.config import RewardConfig
from penstock.reward import VerifiableReward, build_reward
from penstock.reward.code import python_block
from penstock.reward.equality import decide
from penstock.reward.math_answer import Comparison, MathPool, boxed_answer, tagged_answer
from stages.reward_samples import prompt, rollout, tagged

GSM8K = Path(__file__).parents[3] / "shared" / "data" / "gsm8k"
PIECES = [
    "<think>",
    "</think>",
    "<answer>",
    "</answer>",
    "\\boxed{",
    "{",
    "}",
    "\\",
    "$",
    "1/0",
    "9",
]
PIECES += [
    "e999",
    "\\frac",
    "%",
    ",",
    "```",
    "python\n",
    "\n",
    "\x00",
    "\ud800",
    "٤",
    "½",
    "^{9^9}",
]
TEXT = st.one_of(
    st.text(max_size=200),
    st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=5)), max_size=30).map("".join),
)


def _rewards() -> list[VerifiableReward]:
    kinds = [
        RewardConfig(type=kind, options={"equality": "numeric"})
        for kind in ("think_answer_tags", "boxed")
    ]
    return [build_reward([kind], max_tokens=100) for kind in kinds]


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(text=TEXT, gold=TEXT)
@example(text=tagged("1e999999999"), gold="1")
@example(text=tagged("1/0"), gold="0/0")
@example(text=tagged("9" * 5000), gold="9" * 4999)
def test_a_reward_never_raises_and_never_changes_its_mind(text: str, gold: str) -> None:
    for reward in _rewards():
        first = asyncio.run(reward.score(rollout(text), prompt(gold)))
        assert first == asyncio.run(reward.score(rollout(text), prompt(gold)))
        assert first.value in (0.0, 1.0)


@settings(max_examples=300, deadline=None)
@given(text=TEXT, gold=TEXT)
def test_extraction_and_equality_never_raise(text: str, gold: str) -> None:
    for extract in (tagged_answer, boxed_answer, python_block):
        assert extract(text) == extract(text)
    assert decide(gold, text) is decide(gold, text)


@settings(deadline=None)
@given(number=st.integers(-(10**30), 10**30), other=st.integers(-(10**30), 10**30))
def test_integers_are_equal_only_to_themselves(number: int, other: int) -> None:
    assert decide(str(number), f"{number:,}") is True
    assert decide(str(number), str(other)) is (number == other)


@pytest.fixture(scope="module")
def compare() -> Iterator[Callable[[str, str], Comparison]]:
    """Compares by algebra, in one worker and one event loop."""
    pool = MathPool(1, timeout_s=20.0)
    with asyncio.Runner() as runner:
        yield lambda gold, answer: runner.run(pool.compare(gold, answer))
        runner.run(pool.close())


@pytest.mark.slow
@given(text=st.text(alphabet="0123456789abcxyz+-/(){}[]=<>,\\$ ", max_size=20))
@settings(max_examples=60, deadline=None)
def test_the_symbolic_comparison_never_raises(
    compare: Callable[[str, str], Comparison], text: str
) -> None:
    assert compare("x+1", text) == compare("x+1", text)


@pytest.mark.shared
@pytest.mark.skipif(not GSM8K.is_dir(), reason="GSM8K does not lie beside the repository")
@pytest.mark.parametrize(
    ("kind", "form"),
    [
        pytest.param("think_answer_tags", tagged("{}"), marks=pytest.mark.slow),
        ("boxed", "so \\boxed{{{}}}"),
    ],
)
def test_every_gold_answer_of_gsm8k_is_right_and_a_changed_one_is_wrong(
    kind: str, form: str
) -> None:
    lines = [line for name in ("train", "test") for line in (GSM8K / f"{name}.jsonl").open()]
    golds = [json.loads(line)["answer"].rpartition("####")[2].strip() for line in lines]
    assert len(golds) == 8792

    async def run() -> None:
        reward = build_reward([RewardConfig(type=kind)], max_tokens=100)
        for gold in golds:
            changed = str(int(gold.replace(",", "")) + 1)
            assert (await reward.score(rollout(form.format(gold)), prompt(gold))).value == 1.0, gold
            assert (await reward.score(rollout(form.format(changed)), prompt(gold))).value == 0.0, (
                gold
            )
        await reward.close()

    asyncio.run(run())
