"""The tree of an agent's calls: where a request belongs, what follows an answer, which rows are trained."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import pytest

from penstock.data.sampler import Sampler
from penstock.engine.protocol import SamplingParams
from penstock.errors import EngineError
from penstock.rollout.agent.bridge import Bridge
from penstock.rollout.agent.session import ContextOverflow, Limits, Session, TurnsExceeded
from penstock.rollout.agent.tree import CallTree
from penstock.types import ModelCall, Rollout, VersionSegment
from stages.chat_policy import (
    FORGETFUL,
    NO_END,
    TEMPLATE,
    Kept,
    ScriptedEngine,
    chat_template,
    user,
)
from stages.rollouts import make_prompts

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            },
        },
    }
]
CALL = '<tool_call>{"name":"add",  "arguments": {"a": 1, "b":2}}</tool_call>'


def make_rollout() -> Rollout:
    return (
        Sampler(make_prompts(3), task_name="t", prompt_repeat_k=1, seed=0).group_at(0).rollouts[0]
    )


def make_session(engine: Any, *, template: str = TEMPLATE, limits: Any = None, **parts: Any):
    return Session(
        make_rollout(),
        engine=engine,
        bridge=Bridge(chat_template(template)),
        sampling=SamplingParams(max_tokens=200),
        limits=limits or Limits(),
        recorder=Kept(),
        **parts,
    )


def by_turn(*texts: str):
    """Return a script that gives one text after another."""
    left = list(texts)
    return lambda prompt: left.pop(0)


def test_a_conversation_is_one_row_of_exactly_the_tokens_that_engines_saw() -> None:
    engine = ScriptedEngine(by_turn(CALL, "it is 3"))

    async def main() -> Session:
        session = make_session(engine)
        messages: list[Any] = [user("1+2?")]
        first = await session.call(messages, TOOLS)
        (call,) = first.answer["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"a": 1, "b": 2}
        # a client library writes the arguments in another spacing, and no content
        again = {**call, "function": {"name": "add", "arguments": '{"b":2,"a":1}'}}
        messages += [
            {"role": "assistant", "content": None, "tool_calls": [again]},
            {"role": "tool", "tool_call_id": call["id"], "content": "3"},
        ]
        second = await session.call(messages, TOOLS)
        assert (second.parent, second.answer["content"]) == (0, "it is 3")
        return session

    session = asyncio.run(main())
    first, second = session.tree.calls
    chat = chat_template()
    assert chat.decode_prompt(second.context_ids) == "<turn>tool\n3<eos><turn>assistant\n"
    given = np.concatenate([first.context_ids, first.token_ids, second.context_ids])
    assert engine.requests[1].prompt_ids.tolist() == given.tolist()
    rollout = session.rollout
    session.tree.fill(rollout)
    (row,) = rollout.rows
    assert row.prompt_ids.tolist() == engine.requests[0].prompt_ids.tolist()
    whole = np.concatenate([row.prompt_ids, rollout.response_ids])
    assert whole.tolist() == [*given.tolist(), *second.token_ids.tolist()]
    sampled = len(first.token_ids) + len(second.token_ids)
    assert rollout.num_sampled == int(rollout.loss_mask.sum()) == sampled
    trained = chat.decode_prompt(rollout.response_ids[rollout.loss_mask])
    assert trained == f"{CALL}<eos>it is 3<eos>"  # the spacing that was sampled
    assert rollout.logprobs[rollout.loss_mask].tolist() == [
        *first.logprobs.tolist(),
        *second.logprobs.tolist(),
    ]


def node(number: int, parent: int | None, said: str, **fields: Any) -> ModelCall:
    ids = np.array([10 * number + 1, 10 * number + 2], np.int32)
    values: dict[str, Any] = {
        "context_ids": np.array([100 + number], np.int32),
        "token_ids": ids,
        "logprobs": np.array([-0.1, -0.2], np.float32) - number,
        "segments": (VersionSegment(number, 2),),
        "finish_reason": "stop",
        "messages": (user(f"q{number}"),),
        "answer": {"role": "assistant", "content": said},
    }
    return ModelCall(number=number, parent=parent, **(values | fields))


def test_branches_train_every_sampled_token_once_by_hand() -> None:
    """0 -> 1 and 0 -> 2 share call 0; 3 is a root of its own."""
    tree = CallTree([node(0, None, "a"), node(1, 0, "b"), node(2, 0, "c"), node(3, None, "d")])
    rollout = make_rollout()
    tree.fill(rollout)
    assert [(row.prompt_ids.tolist(), row.length) for row in rollout.rows] == [
        ([100], 5),
        ([100], 5),
        ([103], 2),
    ]
    first, second, third = [1, 2, 101, 11, 12], [1, 2, 102, 21, 22], [31, 32]
    assert rollout.response_ids.tolist() == [*first, *second, *third]
    trained = rollout.response_ids[rollout.loss_mask].tolist()
    assert trained == [1, 2, 11, 12, 21, 22, 31, 32]
    assert rollout.loss_mask.tolist()[5:10] == [False, False, False, True, True]
    assert rollout.logprobs[2] == 0.0
    assert rollout.oldest_version == 0
    assert rollout.segments[-1].version == 3


def test_a_call_that_the_agent_never_heard_is_in_no_row_unless_another_continues_it() -> None:
    """0 -> 1 -> 2, 0 -> 3: who heard 2 has 0 and 1 too; 3 is left out."""
    tree = CallTree([node(0, None, "a"), node(1, 0, "b"), node(2, 1, "c"), node(3, 0, "d")])
    assert tree.unheard({2}) == [3]
    assert tree.unheard({0}) == [1, 2, 3]
    rollout = make_rollout()
    tree.fill(rollout, unheard=tree.unheard({2}))
    assert rollout.response_ids[rollout.loss_mask].tolist() == [1, 2, 11, 12, 21, 22]
    assert len(rollout.rows) == 1


@pytest.mark.parametrize(
    ("added", "parent"),
    [
        ([user("more")], 1),
        ([{"role": "system", "content": "be brief"}, user("more")], 1),
        ([], 0),  # the same request again: a sibling of call 1
        ([{"role": "assistant", "content": "forged"}, user("more")], None),
    ],
)
def test_a_request_belongs_to_the_deepest_call_that_it_continues(added, parent) -> None:
    tree = CallTree([node(0, None, "a"), node(1, 0, " b\n")])
    messages = [
        user("q0"),
        {"role": "assistant", "content": [{"type": "text", "text": "a"}]},
        user("q1"),
    ]
    if added:
        messages.append({"role": "assistant", "content": "b", "reasoning_content": ""})
    place = tree.place([*messages, *added], "")
    assert (place.parent.number if place.parent else None) == parent
    assert list(place.messages) == (
        added or [user("q1")] if parent is not None else [*messages, *added]
    )


def test_other_tools_an_edited_past_and_a_cut_answer_start_a_branch() -> None:
    tree = CallTree([node(0, None, "a"), node(1, 0, "b", finish_reason="length")])
    history = [user("q0"), {"role": "assistant", "content": "a"}]
    assert tree.place([*history, user("x")], "").parent is not None
    assert tree.place([*history, user("x")], '[{"type": "function"}]').parent is None
    assert tree.place([user("Q0"), history[1], user("x")], "").parent is None
    cut = [*history, user("q1"), {"role": "assistant", "content": "b"}, user("x")]
    assert tree.place(cut, "").parent is None


@pytest.mark.parametrize(("template", "bridged"), [(TEMPLATE, 1), (FORGETFUL, 1), (NO_END, 0)])
def test_a_template_without_an_end_is_not_bridged_but_branches(template, bridged) -> None:
    bridge = Bridge(chat_template(template))
    assert (bridge.proof["user"] == "") is bool(bridged)

    async def main() -> Session:
        session = make_session(ScriptedEngine(lambda prompt: "yes"), template=template)
        messages = [user("a?")]
        for question in ("b?", "c?"):
            call = await session.call(messages)
            messages += [call.answer, user(question)]
        await session.call(messages)
        return session

    tree = asyncio.run(main()).tree
    assert [call.parent for call in tree.calls] == ([None, 0, 1] if bridged else [None] * 3)


def test_thoughts_are_kept_or_forgotten_as_the_option_says() -> None:
    """The template drops thoughts from the past: keep extends, template branches."""

    async def main(thinking: str) -> Session:
        engine = ScriptedEngine(by_turn("<think>hm</think>yes", "no"))
        session = make_session(engine, template=FORGETFUL, thinking=thinking)
        first = await session.call([user("a?")])
        assert first.answer["reasoning_content"] == "hm"
        said = {"role": "assistant", "content": first.answer["content"]}  # no reasoning
        await session.call([user("a?"), said, user("b?")])
        return session

    kept = asyncio.run(main("keep")).tree.calls[1]
    assert kept.parent == 0
    forgotten = asyncio.run(main("template")).tree.calls[1]
    assert forgotten.parent is None
    text = chat_template(FORGETFUL).decode_prompt(forgotten.context_ids)
    assert (
        text == "<turn>user\na?<eos><turn>assistant\nyes<eos><turn>user\nb?<eos><turn>assistant\n"
    )


@pytest.mark.parametrize(
    "said",
    ['<tool_call>{"name": "add", "arguments": {"a": 1</tool_call>', "<tool_call>[1]</tool_call>"],
)
def test_a_malformed_tool_call_is_content(said: str) -> None:
    session = make_session(ScriptedEngine(lambda prompt: said))
    call = asyncio.run(session.call([user("?")], TOOLS))
    assert call.answer == {"role": "assistant", "content": said}


def test_a_call_past_the_limits_is_refused_and_truncates_the_rollout() -> None:
    long = make_session(ScriptedEngine(lambda prompt: "x"), limits=Limits(max_context=30))
    with pytest.raises(ContextOverflow, match="allowed: at most 30"):
        asyncio.run(long.call([user("x" * 40)]))
    assert long.truncated
    assert not long.tree.calls

    async def twice(session: Session) -> None:
        await session.call([user("a")])
        await session.call([user("b")])

    many = make_session(ScriptedEngine(lambda prompt: "x"), limits=Limits(max_turns=1))
    with pytest.raises(TurnsExceeded, match="allowed: max_turns = 1"):
        asyncio.run(twice(many))
    assert many.truncated


def test_an_answer_never_passes_the_models_positions() -> None:
    session = make_session(ScriptedEngine(lambda prompt: "y" * 90), limits=Limits(max_positions=40))
    call = asyncio.run(session.call([user("x")]))
    assert len(call.context_ids) + len(call.token_ids) == 40
    assert call.finish_reason == "length"


def test_recorded_calls_are_answered_without_an_engine_and_a_changed_world_branches() -> None:
    async def talk(session: Session, second: str) -> list[ModelCall]:
        first = await session.call([user("a")])
        return [first, await session.call([user("a"), first.answer, user(second)])]

    async def main() -> None:
        before = make_session(ScriptedEngine(by_turn("one", "two")))
        calls = await talk(before, "b")
        silent = ScriptedEngine(by_turn())
        again = make_session(silent, calls=calls)
        assert await talk(again, "b") == calls
        assert not silent.requests
        engine = ScriptedEngine(by_turn("three"))
        other = await talk(make_session(engine, calls=calls), "c")
        assert other[0] is calls[0]
        assert (other[1].number, other[1].parent, other[1].answer["content"]) == (2, 0, "three")

    asyncio.run(main())


def test_a_retry_of_a_client_gets_the_same_call_and_a_repeated_request_another() -> None:
    async def main() -> None:
        engine = ScriptedEngine(lambda prompt: "x")
        session = make_session(engine)
        first = await session.call([user("a")])
        assert await session.call([user("a")], is_retry=True) is first
        other = await session.call([user("a")])
        assert other is not first
        seeds = [request.seed for request in engine.requests]
        assert len(set(seeds)) == 2

    asyncio.run(main())


class LateEngine(ScriptedEngine):
    """Answers when it is told to, and notes what it is told to end."""

    def __init__(self) -> None:
        super().__init__(lambda prompt: "late")
        self.told, self.ended = asyncio.Event(), []

    async def generate(self, request: Any) -> Any:
        await self.told.wait()
        return await super().generate(request)

    async def abort(self, request_id: str) -> None:
        self.ended.append(request_id)


def test_an_answer_past_the_time_of_a_turn_is_ended_and_never_trained() -> None:
    async def main() -> None:
        engine = LateEngine()
        session = make_session(engine, limits=Limits(turn_timeout_s=0.001, max_turns=1))
        with pytest.raises(EngineError, match=r"no answer after 0.001 s \(turn_timeout_s\)"):
            await session.call([user("a")])
        engine.told.set()
        for _ in range(20):  # whatever still runs gets its turn
            await asyncio.sleep(0)
        assert not session.tree.calls
        assert len(engine.ended) == 1
        # a fault of an engine takes no turn from the policy: the retry is its first
        assert (await session.call([user("a")], is_retry=True)).answer["content"] == "late"
        assert not session.truncated

    asyncio.run(main())


def test_a_call_has_the_same_tokens_in_whatever_order_calls_are_made() -> None:
    async def seeds(order: str) -> dict[str, int]:
        engine = ScriptedEngine(lambda prompt: "x")
        session = make_session(engine)
        await asyncio.gather(*(session.call([user(name)]) for name in order))
        chat = chat_template()
        return {chat.decode_prompt(one.prompt_ids): one.seed for one in engine.requests}

    assert asyncio.run(seeds("ab")) == asyncio.run(seeds("ba"))


def test_a_call_that_has_not_begun_when_its_rollout_ends_is_never_made() -> None:
    """An agent that is killed leaves such calls; made later, they would be recorded in the next try."""
    engine = ScriptedEngine(lambda prompt: "late")

    async def main() -> Session:
        session = make_session(engine)
        asking = asyncio.create_task(session.call([user("1+2?")]))
        await asyncio.sleep(0)
        assert session._latest  # the request is there, its call has not begun
        await session.close()
        with pytest.raises(EngineError, match="the rollout has ended"):
            await asking
        await asyncio.sleep(0)
        return session

    session = asyncio.run(main())
    assert engine.requests == session.tree.calls == session._recorder.calls == []
