"""The weighted sum: parts, notes, options, failures, and the value of truncated responses."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config import RewardConfig, plugins
from penstock.errors import RewardError, UserError
from penstock.reward import REWARDS, VerifiableReward, build_reward, check, verifiable
from penstock.types import Score
from stages.reward_samples import prompt, rollout, tagged


def build(*rewards: RewardConfig, max_tokens: int = 100) -> VerifiableReward:
    return build_reward(rewards, max_tokens=max_tokens)


def part(type: str = "think_answer_tags", weight: float = 1.0, **options: Any) -> RewardConfig:
    return RewardConfig(type=type, weight=weight, options=options)


def score(reward: VerifiableReward, text: str, gold: str = "42", **more: Any) -> Score:
    return asyncio.run(reward.score(rollout(text, **more), prompt(gold)))


@pytest.mark.parametrize("name", REWARDS)
def test_every_name_stands_for_a_reward(name: str) -> None:
    target = plugins.load("reward", name, REWARDS)
    assert callable(target.score)
    assert callable(target.close)
    assert target.Options.model_fields


def test_right_and_wrong_have_the_default_scale() -> None:
    right = score(build(part()), tagged("42"))
    assert right == Score(1.0, {"think_answer_tags": 1.0}, True, True, "")
    wrong = score(build(part()), tagged("41"))
    assert (wrong.value, wrong.format_ok, wrong.answer_ok) == (0.0, True, False)


def test_the_seed_systems_scale() -> None:
    assert score(build(part(right=10.0)), tagged("42")).value == 10.0


@pytest.mark.parametrize(
    ("options", "text", "value", "format_ok", "answer_ok"),
    [
        ({"format": "gate"}, tagged("42") + " bye", 0.0, False, True),
        ({"format": "gate"}, tagged("42"), 1.0, True, True),
        ({"format": "add"}, tagged("42"), 1.1, True, True),
        ({"format": "add"}, tagged("41"), 0.1, True, False),
        ({"format": "add"}, tagged("42") + " bye", 1.0, False, True),
        ({"format": "add", "format_value": 0.5}, tagged("41"), 0.5, True, False),
        ({"format": "ignore"}, "<answer>42</answer>", 1.0, False, True),
        ({"format": "ignore"}, "42", 0.0, False, False),
    ],
)
def test_format_gates_adds_or_is_ignored(
    options: dict[str, Any], text: str, value: float, format_ok: bool, answer_ok: bool
) -> None:
    got = score(build(part(**options)), text)
    assert (got.value, got.format_ok, got.answer_ok) == (value, format_ok, answer_ok)


def test_equality_may_be_restricted() -> None:
    assert score(build(part(equality="numeric")), tagged("42.0")).value == 1.0
    assert score(build(part(equality="numeric")), tagged("40+2")).value == 0.0
    assert score(build(part(equality="exact")), tagged("42.0")).value == 0.0


def test_the_think_tag_may_be_in_the_prompt() -> None:
    text = "because</think><answer>42</answer>"
    assert score(build(part(opened_in_prompt=True)), text).value == 1.0
    assert score(build(part()), text).value == 0.0


def test_parts_are_weighted_and_named() -> None:
    reward = build(part(), part("boxed", weight=2.0), part("boxed", weight=0.5, right=3.0))
    got = score(reward, tagged(r"\boxed{42}"))
    assert got.parts == {"think_answer_tags": 1.0, "boxed": 1.0, "boxed_2": 3.0}
    assert got.value == 1.0 + 2.0 + 1.5


def test_a_reward_of_weight_0_is_shown_and_decides_nothing() -> None:
    got = score(build(part(), part("boxed", weight=0.0)), tagged("42"))
    assert got.parts == {"think_answer_tags": 1.0, "boxed": 0.0}
    assert (got.value, got.format_ok, got.answer_ok) == (1.0, True, True)


def test_notes_name_their_part() -> None:
    got = score(build(part(), part("boxed")), tagged("42"))
    assert got.note == "boxed: no \\boxed{...} with matching braces"
    assert (got.format_ok, got.answer_ok) == (False, False)


def test_a_prompt_without_an_answer_is_a_failure_with_the_rollouts_id() -> None:
    with pytest.raises(RewardError, match=r"rollout task:0\.0: reward boxed: prompt data:1"):
        asyncio.run(build(part("boxed")).score(rollout("x"), prompt(None)))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (part(fromat="gate"), "unknown option 'fromat'.*did you mean format?"),
        (part(format="maybe"), "option format: got 'maybe'"),
        (part(right=-1.0), "option right: got -1.0, allowed: at least wrong = 0.0"),
        (part("soft_overlong", scale=-1), "option scale: got -1"),
        (part("soft_overlong", weight=-1.0), "weight got -1.0, allowed: 0 or more"),
        (part("length", shape="around"), "option target_tokens"),
        (part("boxes"), "reward: got 'boxes', allowed: boxed, code"),
        (part("no_such_module:reward"), "cannot be imported"),
        (part("reward_model"), "option path"),
        (part("code", servers=["ftp://x"]), "got 'ftp://x', allowed: http://HOST:PORT"),
        (part("code", sandbox={"memori_mb": 5}), "option sandbox.memori_mb"),
        (part("code", sandbox={"minimum": "weak"}), "I accept weaker isolation"),
        (part("math:pi"), "which is a float, allowed: a function"),
    ],
)
def test_mistakes_are_told_before_the_run(config: RewardConfig, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check([config])


def test_no_reward_at_all_is_a_mistake() -> None:
    with pytest.raises(UserError, match="at least one"):
        check([])


def test_soft_overlong_is_a_straight_line() -> None:
    reward = build(part("soft_overlong", scale=10.0))  # buffer: a quarter of 100
    values = {n: score(reward, "", tokens=n).value for n in (1, 75, 80, 90, 99, 100)}
    assert values == pytest.approx({1: 0.0, 75: 0.0, 80: -2.0, 90: -6.0, 99: -9.6, 100: -10.0})
    assert score(reward, "", tokens=10, finish_reason="length").value == -10.0


def test_the_buffer_is_at_most_1024_tokens() -> None:
    reward = build(part("soft_overlong"), max_tokens=8192)
    assert score(reward, "", tokens=8192 - 1024).value == 0.0
    assert score(reward, "", tokens=8192 - 512).value == -0.5


def test_length_shaping() -> None:
    below = build(part("length", target_tokens=20, span_tokens=40))
    assert [score(below, "", tokens=n).value for n in (5, 20, 40, 60, 90)] == [1, 1, 0.5, 0, 0]
    around = build(part("length", target_tokens=20, span_tokens=40, shape="around"))
    assert [score(around, "", tokens=n).value for n in (0, 20, 40)] == [0.5, 1, 0.5]


@settings(deadline=None)
@given(
    finished=st.integers(1, 100),
    cut=st.integers(1, 100),
    answer=st.sampled_from(["41", "42", r"\boxed{42}", ""]),
    format=st.sampled_from(["gate", "add", "ignore"]),
    penalty=st.floats(0, 20),
)
def test_a_truncated_answer_never_beats_a_finished_wrong_one(
    finished: int, cut: int, answer: str, format: str, penalty: float
) -> None:
    reward = build(
        part(format=format),
        part("boxed", format=format),
        part("soft_overlong", scale=penalty),
        part("length", target_tokens=30),
    )
    wrong = score(reward, tagged("7"), tokens=finished)
    truncated = score(reward, tagged(answer), tokens=cut, finish_reason="length")
    assert truncated.value <= wrong.value
    assert truncated.answer_ok is False


def test_a_group_is_scored_one_by_one_where_no_part_needs_it_whole() -> None:
    reward = build(part())
    rollouts = [rollout(tagged("42"), name="g.0"), rollout(tagged("41"), name="g.1")]
    scores = asyncio.run(reward.score_group(rollouts, [prompt("42")] * 2))
    assert [one.value for one in scores] == [1.0, 0.0]
    with pytest.raises(ValueError, match="2 rollouts and 1 prompts"):
        asyncio.run(reward.score_group(rollouts, [prompt("42")]))


class NeverCloses:
    async def score(self, rollout: Any, prompt: Any) -> float:
        return 1.0

    async def close(self) -> None:
        await asyncio.Event().wait()


def test_a_reward_that_never_closes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifiable, "CLOSE_TIMEOUT_S", 0.01)
    reward = build(part(), part(f"{__file__}:NeverCloses"))
    with pytest.raises(RewardError, match=r"reward NeverCloses: close\(\) did not return within"):
        asyncio.run(reward.close())
