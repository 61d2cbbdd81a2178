"""Warnings when nothing can be learned: on made batches, and where a user sees them."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from penstock.types import Batch, Group, Rollout, Score
from penstock.watch.learning import AGAIN, FIRST, LearningWatch
from stages.rollouts import finish_rollout, make_prompt
from stages.tiny_run import CrashServer


def batch(
    step: int, rewards: Sequence[Sequence[float]], *, finish: str = "stop", text: str = "it is 7"
) -> Batch:
    groups = []
    for number, values in enumerate(rewards):
        prompt = make_prompt(number)
        rollouts = [
            finish_rollout(Rollout(rollout_id=f"{number}.{k}", prompt_ids=prompt.token_ids, seed=k))
            for k in range(len(values))
        ]
        for rollout, value in zip(rollouts, values, strict=True):
            rollout.score, rollout.finish_reason, rollout.text = Score(value), finish, text
        groups.append(
            Group(group_id=f"t:{number}", task="t", cursor=number, prompt=prompt, rollouts=rollouts)
        )
    return Batch(step=step, groups=tuple(groups))


@pytest.mark.parametrize(
    ("rewards", "by_group", "seen"),
    [
        ([[0, 0], [0, 0]], True, "all rewards of a step are equal (now 0)"),
        ([[0.5, 0.5], [0.5, 0.5]], False, "all rewards of a step are equal (now 0.5)"),
        (
            [[0, 0], [1, 1]],
            True,
            "all responses to a prompt have the same reward (from 0 to 1 over",
        ),
        ([[0, 0], [1, 1]], False, ""),  # the batch is the baseline: prompts differ
        ([[0, 0], [0, 1]], True, ""),
    ],
)
def test_equal_rewards(rewards: list[list[float]], by_group: bool, seen: str) -> None:
    watch = LearningWatch("runs/x", by_group=by_group)
    told = [watch.look(batch(step, rewards)) for step in range(1, FIRST + AGAIN + 2)]
    due = [step for step, lines in enumerate(told, 1) if lines]
    assert due == ([FIRST, FIRST + AGAIN] if seen else [])
    if seen:
        [line] = told[FIRST - 1]
        assert line.startswith(f"warning: steps 1 to 5: nothing can be learned, because {seen}")
        assert line.endswith(
            ". An example: response 'it is 7', expected answer '0'. "
            "See more with: penstock rollouts runs/x"
        )


def test_a_step_with_a_signal_starts_the_count_again() -> None:
    watch = LearningWatch("x", by_group=True)
    steps = [batch(step, [[0, 0]] if step != 4 else [[0, 1]]) for step in range(1, 10)]
    told = [line for one in steps for line in watch.look(one)]
    assert [line.split(":")[1] for line in told] == [" steps 5 to 9"]


@pytest.mark.parametrize(
    ("fields", "seen"),
    [
        ({"finish": "length"}, "every response was cut off at 4 tokens before it ended"),
        ({"text": " \n"}, "every response is empty"),
    ],
)
def test_responses_that_are_all_cut_off_or_empty(fields: dict[str, str], seen: str) -> None:
    watch = LearningWatch("x", by_group=True)
    told = [watch.look(batch(step, [[0, 1], [1, 0]], **fields)) for step in range(1, FIRST + 1)]
    assert [len(lines) for lines in told] == [0, 0, 0, 0, 1]
    assert f"steps 1 to 5: {seen}" in told[-1][0]


def test_a_penalty_for_length_may_teach_though_rewards_are_equal() -> None:
    watch = LearningWatch("x", by_group=True, by_reward=False)
    assert not any(watch.look(batch(step, [[0, 0]])) for step in range(1, 30))


def test_an_example_is_one_line_with_the_end_of_the_response() -> None:
    watch = LearningWatch("x", by_group=True)
    text = "a\nb " * 200 + "the\nanswer is 7"
    line = [watch.look(batch(step, [[0, 0]], text=text)) for step in range(1, 6)][-1][0]
    assert "\n" not in line
    assert "the answer is 7', expected answer '0'" in line
    assert len(line) < 500


def test_a_user_is_warned_in_the_console_and_in_the_log(server: CrashServer) -> None:
    same = "tasks.train.rewards=[{type='think_answer_tags'}]"  # tiny responses have no tags
    run, code = server.train(
        "hopeless", same, f"train.steps={FIRST}", "sampling.max_tokens=2", "engine.max_slots=0"
    )
    assert code == 0
    rewards = [json.loads(line)["reward/mean"] for line in run.metrics.read_text().splitlines()]
    assert rewards == [0.0] * FIRST
    assert json.loads(run.metrics.read_text().splitlines()[-1])["groups/zero_variance"] == 1
    log = (run.logs / "run.log").read_text()
    for words in (
        "warning: steps 1 to 5: nothing can be learned, because all rewards of a step are equal (now 0). An",
        "warning: steps 1 to 5: every response was cut off at 2 tokens before it ended",
        f"See more with: penstock rollouts {run.path}\n",
    ):
        assert words in server.output()
        assert words in log
