"""A user's function as an agent: rewards, failures, time-outs and pauses stay with their rollout."""

from __future__ import annotations

import asyncio
import inspect
import math
from typing import Any

import pytest

from penstock.errors import EnginesLost, UserError
from penstock.rollout.agent.function import (
    AgentOptions,
    FunctionAgent,
    check_function,
    read_options,
)
from penstock.types import Group, Rollout, Score, Status
from stages.agent_parts import make_agent, make_group
from stages.chat_policy import ScriptedEngine, chat_template, user


def run(agent: FunctionAgent, group: Group) -> list[Rollout]:
    return asyncio.run(agent.generate_group(group.rollouts))


async def two_turns(task: Any, model: Any) -> float:
    messages = list(task.messages)
    said = await model.chat(messages)
    messages += [said, user("sure?")]
    said = await model.chat(messages)
    model.reward(0.25)
    return float(said["content"] == "yes")


def test_each_rollout_gets_its_rows_and_its_reward() -> None:
    group = make_group()
    rollouts = run(make_agent(two_turns), group)
    assert {rollout.status for rollout in rollouts} == {Status.COMPLETED}
    assert {rollout.reward for rollout in rollouts} == {1.25}
    for rollout in rollouts:
        assert rollout.earned == ()  # the reward came after the last call
        assert (len(rollout.rows), rollout.text, rollout.finish_reason) == (1, "yes", "stop")
        prompt = chat_template().decode_prompt(rollout.rows[0].prompt_ids)
        assert prompt.startswith("<turn>system\nbe good<eos><turn>user\nquestion 0<eos>")
        assert rollout.num_sampled == 2 * len("yes<")  # with the end token
        assert rollout.extra["turns"] == 2


def test_a_reward_after_a_turn_is_not_credited_to_later_calls() -> None:
    async def agent(task: Any, model: Any) -> float:
        said = await model.chat(task.messages)
        model.reward(0.5)
        await model.chat([*task.messages, said, user("more")])
        return 0.25

    (rollout, *_) = run(make_agent(agent), make_group())
    assert rollout.reward == 0.75
    (first, _), (second, before) = rollout.earned
    assert first == len("yes<")
    assert (first + second, before) == (len(rollout.response_ids), 0.5)


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (None, "it returned None and the task has no rewards, allowed: a number, a bool, a dict"),
        ("good", "got 'good', allowed: a number, a bool, a Score or a dict of its fields: value, "),
        ({"reward": 1.0}, "got {'reward': 1.0}, allowed: a number, a bool, a Score or a dict of "),
        ({"value": "high"}, "got {'value': 'high'}, allowed: a number, a bool, a Score or a dict"),
        (math.nan, "got the reward nan, allowed: a finite number"),
        (1e300, "got the reward 1e+300, allowed: a finite number, at most 1e+18 in size"),
    ],
)
def test_what_is_no_reward_fails_the_rollout_and_is_never_a_zero(result, reason) -> None:
    async def agent(task: Any, model: Any) -> Any:
        await model.chat(task.messages)
        return result

    for rollout in run(make_agent(agent), make_group()):
        assert (rollout.status, rollout.score) == (Status.FAILED, None)
        assert rollout.error.startswith(f"agent: {reason}")


def test_one_raising_or_slow_rollout_costs_no_other() -> None:
    group = make_group(4)
    ids = {rollout.seed: number for number, rollout in enumerate(group.rollouts)}

    async def agent(task: Any, model: Any) -> Any:
        await model.chat(task.messages)
        match ids[model.seed]:
            case 0:
                raise OSError("the browser is gone")
            case 1:
                await asyncio.Event().wait()
            case 2:
                return Score(0.5, answer_ok=False)
        return True

    first, slow, scored, right = run(make_agent(agent, timeout_s=0.05), group)
    line = inspect.getsourcelines(agent)[1] + 4
    assert first.error == f"agent: OSError: the browser is gone ({__file__}:{line})"
    assert slow.error == "agent: no result after 0.05 s (timeout_s)"
    assert (scored.reward, scored.score.answer_ok) == (0.5, False)
    assert (right.reward, right.score.answer_ok) == (1.0, True)


def test_an_overflowing_context_truncates_the_rollout() -> None:
    async def agent(task: Any, model: Any) -> float:
        await model.chat([user("hello")])
        await model.chat([user("x" * 500)])
        return 1.0

    told = list[str]()

    async def careful(task: Any, model: Any) -> float:
        try:
            return await agent(task, model)
        except Exception as error:
            told.append(str(error))
            return 0.75

    for function, reward in ((agent, -1.0), (careful, 0.75)):
        rollouts = run(make_agent(function, truncated_reward=-1.0), make_group())
        assert {r.status for r in rollouts} == {Status.COMPLETED}
        assert {r.finish_reason for r in rollouts} == {"length"}
        assert {r.reward for r in rollouts} == {reward}
    assert told[0].endswith(" (max_prompt_tokens)")


def test_an_answer_cut_by_length_truncates_a_rollout_whose_function_raises() -> None:
    """As clients do: openai's stream and the Agents SDK raise when an answer is incomplete."""

    async def agent(task: Any, model: Any) -> float:
        await model.chat(task.messages)
        raise ValueError("the length limit was reached")

    engine = ScriptedEngine(lambda prompt: "x" * 30)
    for rollout in run(make_agent(agent, engine, truncated_reward=-1.0), make_group()):
        assert (rollout.status, rollout.finish_reason) == (Status.COMPLETED, "length")
        assert rollout.reward == -1.0
    for rollout in run(make_agent(agent), make_group()):  # an answer that was not cut
        assert rollout.error.startswith("agent: ValueError: the length limit was reached (")


def test_a_pause_keeps_the_calls_and_a_partial_rollout_goes_on_from_them() -> None:
    engine = ScriptedEngine(lambda prompt: "yes")
    reached = 0

    async def main() -> None:
        waiting, go_on = asyncio.Event(), asyncio.Event()

        async def agent(task: Any, model: Any) -> float:
            nonlocal reached
            messages = list(task.messages)
            said = await model.chat(messages)
            reached += 1
            waiting.set()
            await go_on.wait()
            await model.chat([*messages, said, user("more")])
            return 1.0

        loop, group = make_agent(agent, engine), make_group(1)
        running = asyncio.create_task(
            loop.generate_group(group.rollouts, enable_partial_rollout=True)
        )
        await waiting.wait()
        await loop.pause()
        (rollout,) = await running
        assert (rollout.status, rollout.num_sampled) == (Status.ABORTED, len("yes<"))
        go_on.set()
        await loop.generate_group(group.rollouts, enable_partial_rollout=True)
        assert (rollout.status, rollout.num_sampled) == (Status.COMPLETED, 2 * len("yes<"))

    asyncio.run(main())
    assert reached == 2
    assert len(engine.requests) == 2  # the first turn was not sampled again


def test_a_call_that_the_agent_gave_up_is_not_trained() -> None:
    async def agent(task: Any, model: Any) -> float:
        first = asyncio.create_task(model.chat([user("too slow")]))
        await asyncio.sleep(0)  # it has asked
        first.cancel()
        await model.chat(task.messages)
        return 1.0

    for rollout in run(make_agent(agent), make_group()):
        assert (rollout.extra["turns"], rollout.extra["unheard"]) == (1, [0])
        (row,) = rollout.rows
        assert "question 0" in chat_template().decode_prompt(row.prompt_ids)


def test_lost_engines_end_the_run_even_if_the_agent_swallows_the_error() -> None:
    class Lost(ScriptedEngine):
        async def generate(self, request: Any) -> Any:
            raise EnginesLost("all engines are gone")

    async def agent(task: Any, model: Any) -> float:
        try:
            await model.chat(task.messages)
        except Exception as error:
            raise ValueError("hidden") from error
        return 0.0

    with pytest.raises(EnginesLost):
        run(make_agent(agent, Lost(lambda prompt: "")), make_group())


def test_an_agent_that_never_calls_the_model_fails() -> None:
    async def agent(task: Any, model: Any) -> float:
        return 1.0

    (rollout, *_) = run(make_agent(agent), make_group())
    assert rollout.error == "agent: it ended without an answer of the model"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"timeout_s": 10, "turn_timeout_s": 10},
            "turn_timeout_s: got 10, allowed: below timeout_s = 10",
        ),
        ({"turn_timeout_s": 5, "tool_timeout_s": 6}, "allowed: below turn_timeout_s = 5"),
        ({"timeout_s": 0}, "timeout_s: got 0, allowed: greater than 0"),
        ({"max_turns": 0}, "max_turns: got 0"),
        ({"thinking": "maybe"}, "thinking: got 'maybe', allowed: 'keep' or 'template'"),
    ],
)
def test_options_that_contradict_are_refused(options, words) -> None:
    with pytest.raises(UserError, match=words):
        read_options("tasks.a.agent_options", AgentOptions, options)


def test_time_outs_that_are_not_given_nest() -> None:
    settings = read_options("o", AgentOptions, {"timeout_s": 20})
    limits = settings.limits(max_context=1, max_positions=2)
    assert (settings.timeout_s, limits.turn_timeout_s, limits.tool_timeout_s) == (20, 10, 5)


def test_a_function_that_cannot_be_called_is_refused() -> None:
    async def plain(task: Any, model: Any) -> float:
        return 1.0

    check_function("agent", plain, {})
    with pytest.raises(UserError, match="unexpected keyword argument 'colour'"):
        check_function("agent", plain, {"colour": "red"})
    with pytest.raises(UserError, match="a function of"):
        check_function("agent", 3, {})
