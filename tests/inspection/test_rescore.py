"""Other rewards for a fork: which settings ask for them, and what is refused before anything is scored."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from penstock.config.source import load_config
from penstock.errors import UserError
from penstock.run.replay import score_groups, scored_again
from penstock.store.journal import Journal


def test_settings_that_change_rewards_are_told_from_those_that_do_not() -> None:
    words = ["tasks.a.rewards=[{type='boxed'}]", "tasks.b.agent_options.max_turns=3", "train.lr=1"]
    assert scored_again(words) == {"a": "rewards", "b": "agent"}
    assert scored_again(["tasks.a.agent_actors=2", "tasks.a.weight=2"]) == {}


def test_an_agent_without_recorded_calls_cannot_play_again() -> None:
    config = load_config(None, ["tasks.train.agent=single_turn"]).config
    with pytest.raises(
        UserError, match=r"tasks\.train\.agent: got 'single_turn' for a fork, allowed"
    ):
        asyncio.run(score_groups(config, cast(Journal, None), [], {"train": "agent"}))
