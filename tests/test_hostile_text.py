"""A response that a model may write stalls no reward that ships and nothing that shows it; it is never a failure."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from penstock.config import RewardConfig
from penstock.files import visible
from penstock.inspection.dashboard.views import clip
from penstock.inspection.report import embed
from penstock.reward import REWARDS, build_reward
from penstock.reward.code import python_block
from penstock.types import Score
from stages.hostile_text import TEXTS, check_growth
from stages.reward_samples import prompt, rollout

SHOWN: dict[str, Callable[[str], str]] = {"terminal": visible, "page": embed, "table": clip}
OPTIONS: dict[str, dict[str, Any]] = {  # without algebra, which has its own processes and limits
    "think_answer_tags": {"equality": "numeric"},
    "boxed": {"equality": "numeric"},
    "length": {"target_tokens": 10},
}
RULES = [name for name in REWARDS if name != "reward_model"]
ASKED = prompt("42", {"inputs": [""], "outputs": ["42"]})


@pytest.mark.parametrize("place", SHOWN)
@pytest.mark.parametrize("name", TEXTS)
def test_what_shows_a_response_takes_linear_time(place: str, name: str) -> None:
    check_growth(SHOWN[place], TEXTS[name])
    assert "\x1b" not in visible(TEXTS[name](1_000))
    assert "</script" not in embed(TEXTS[name](1_000)).lower()


@pytest.fixture(params=RULES)
def score(request: pytest.FixtureRequest) -> Iterator[Callable[[str], Score]]:
    config = RewardConfig(type=request.param, options=OPTIONS.get(request.param, {}))
    reward = build_reward([config], max_tokens=100)
    with asyncio.Runner() as runner:
        yield lambda text: runner.run(reward.score(rollout(text, tokens=20), ASKED))
        runner.run(reward.close())


def test_a_reward_takes_linear_time_and_gives_a_number(score: Callable[[str], Score]) -> None:
    for text in TEXTS.values():
        if (
            python_block(text(1_000)).answer is None
        ):  # programs run in sandboxes with their own limits
            check_growth(score, text)
            assert score(text(1_000)).value <= 1.0
