"""Rewards: what a rollout is worth.

`REWARDS` names those that ship; a config may also say `module:function` or `path/to/file.py:function`.
A new reward is one class with `score`, one table line, one docs row. May import the sandbox.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.config import RewardConfig, plugins
from penstock.reward.protocol import AskPolicy, Reward
from penstock.reward.verifiable import Part, VerifiableReward, make_part
from penstock.waits import Waits

REWARDS: dict[str, str] = {
    "think_answer_tags": "penstock.reward.math_answer:ThinkAnswerTags",
    "boxed": "penstock.reward.math_answer:Boxed",
    "code": "penstock.reward.code:CodeReward",
    "reward_model": "penstock.reward.reward_model:RewardModel",
    "judge": "penstock.reward.judge:Judge",
    "soft_overlong": "penstock.reward.length:SoftOverlong",
    "length": "penstock.reward.length:LengthShaping",
}


def build_reward(
    rewards: Sequence[RewardConfig],
    *,
    max_tokens: int,
    waits: Waits | None = None,
    lane: str = "rewards",
    is_chat: bool = False,
    ask_policy: AskPolicy | None = None,
) -> VerifiableReward:
    """Build the weighted sum of `rewards`. Workers start at their first use; `close()` ends them.

    `is_chat`: the task's data has messages; functions in TRL's shape then get messages. `ask_policy`: asks the
    engines, if there are any.
    """
    names: list[str] = []
    parts: list[Part] = []
    for config in rewards:
        target = plugins.load("reward", config.type, REWARDS)
        base = config.type.rpartition(":")[2] or config.type
        name, count = base, 1
        while name in names:
            count += 1
            name = f"{base}_{count}"
        names.append(name)
        parts.append(make_part(name, target, config, max_tokens, ask_policy, is_chat=is_chat))
    return VerifiableReward(parts, waits=waits, lane=lane)


def check(rewards: Sequence[RewardConfig]) -> None:
    """Raise a UserError unless every name and option is valid. Starts nothing."""
    build_reward(rewards, max_tokens=1)


def fields_read(rewards: Sequence[RewardConfig]) -> dict[str, str]:
    """The fields of the data that these rewards cannot do without, and which reward reads each."""
    parts = build_reward(rewards, max_tokens=1).parts
    return {field: part.name for part in parts for field in part.reward.fields}


__all__ = ["REWARDS", "Reward", "VerifiableReward", "build_reward", "check", "fields_read"]
