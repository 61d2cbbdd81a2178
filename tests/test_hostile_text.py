"""A response that a model may write stalls no reward that ships and nothing that shows it; it is never a failure."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.config import RewardConfig
from penstock.files import console, visible
from penstock.inspection.dashboard.views import clip
from penstock.inspection.report import embed, report_page
from penstock.inspection.rollout_viewer import show_rollouts
from penstock.reward import REWARDS, build_reward
from penstock.reward.code import python_block
from penstock.reward.equality import clean, decide
from penstock.reward.math_answer import boxed_answer, tagged_answer
from penstock.store.run_folder import RunFolder
from penstock.types import Score
from stages.chat_policy import chat_template, user
from stages.hostile_run import make_hostile_run
from stages.hostile_text import TEXTS, check_growth
from stages.reward_samples import prompt, rollout

READERS: dict[str, Callable[[str], object]] = {
    "python_block": python_block,
    "boxed_answer": boxed_answer,
    "tagged_answer": tagged_answer,
    "clean": clean,
    "decide": lambda text: decide("42", text),
    "decide a text": lambda text: decide("forty two", text),
    "decide by a long gold answer": lambda text: decide(text + "2", text + "1"),
}
WRITABLE = [name for name in TEXTS if name != "lone surrogates"]  # no token stands for one
SHOWN: dict[str, Callable[[str], str]] = {"terminal": visible, "page": embed, "table": clip}
OPTIONS: dict[str, dict[str, Any]] = {  # without algebra, which has its own processes and limits
    "think_answer_tags": {"equality": "numeric"},
    "boxed": {"equality": "numeric"},
    "length": {"target_tokens": 10},
}
RULES = [name for name in REWARDS if name not in ("reward_model", "judge")]  # models score there
ASKED = prompt("42", {"inputs": [""], "outputs": ["42"]})


def check_texts(action: Callable[[str], object], names: Iterable[str] = TEXTS) -> None:
    for name in names:
        try:
            check_growth(action, TEXTS[name])
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None


@pytest.mark.slow
@pytest.mark.parametrize("reader", READERS)
def test_a_reader_of_answers_takes_linear_time(reader: str) -> None:
    check_texts(READERS[reader])


@pytest.mark.slow
def test_the_input_of_a_reward_model_takes_linear_time() -> None:
    chat = chat_template()
    names = ("turns of the test policy", "turns", "blanks", "words", "closed think tags", "calls")
    check_texts(lambda text: chat.encode_answered([user("1+2?")], text), names)


@pytest.mark.parametrize("place", SHOWN)
def test_what_shows_a_response_takes_linear_time(place: str) -> None:
    check_texts(SHOWN[place])
    for text in TEXTS.values():
        assert "\x1b" not in visible(text(1_000))
        assert "</script" not in embed(text(1_000)).lower()


def _print_samples(folder: RunFolder) -> None:
    show_rollouts(folder, limit=1_000, console=console(file=io.StringIO(), width=100))


@pytest.mark.slow
@pytest.mark.parametrize("look", [_print_samples, lambda folder: report_page([folder])])
def test_a_look_at_a_run_of_hostile_responses_takes_linear_time(
    look: Callable[[RunFolder], object], tmp_path: Path
) -> None:
    def make(size: int) -> RunFolder:
        texts = [TEXTS[name](size) for name in WRITABLE]
        return make_hostile_run(tmp_path / str(size), texts)

    check_growth(look, make, first_s=10.0)


@pytest.fixture(params=RULES)
def score(request: pytest.FixtureRequest) -> Iterator[Callable[[str], Score]]:
    config = RewardConfig(type=request.param, options=OPTIONS.get(request.param, {}))
    reward = build_reward([config], max_tokens=100)
    with asyncio.Runner() as runner:
        yield lambda text: runner.run(reward.score(rollout(text, tokens=20), ASKED))
        runner.run(reward.close())


@pytest.mark.slow
def test_a_reward_takes_linear_time_and_gives_a_number(score: Callable[[str], Score]) -> None:
    texts = {name: text(1_000) for name, text in TEXTS.items()}
    plain = [name for name, text in texts.items() if python_block(text).answer is None]
    check_texts(score, plain)  # programs run in sandboxes, which have limits of their own
    assert all(score(texts[name]).value <= 1.0 for name in plain)
