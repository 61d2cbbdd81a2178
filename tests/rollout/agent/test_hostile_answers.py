"""An answer of the policy that stalls or breaks no reader of tool calls: it is a call, or it is content."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest

from penstock.data import chat
from penstock.data.chat import ChatTemplate
from penstock.engine.protocol import SamplingParams
from penstock.rollout.agent.bridge import Bridge
from penstock.rollout.agent.session import Limits, Session
from stages.agent_parts import make_group
from stages.chat_policy import Kept, ScriptedEngine, chat_template, chat_tokenizer, user
from stages.hostile_text import CALL, TEXTS, check_growth

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
WRITABLE = [name for name in TEXTS if name != "lone surrogates"]  # no token stands for one


DIALECT: dict[str, Any] = {  # as a tokenizer may name its own
    "start_anchor": "<turn>assistant\n",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>"},
        "content": {},
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
    },
}


def parse(ids: np.ndarray, context: str = "") -> dict[str, Any]:
    chat = chat_template()
    return Bridge(chat).parse(ids, chat.encode_text(context), [TOOL], 7)


@cache
def chat_of_dialect() -> ChatTemplate:
    tokenizer = chat_tokenizer()
    tokenizer.response_template = DIALECT
    return ChatTemplate(tokenizer)


def parse_dialect(ids: np.ndarray) -> dict[str, Any]:
    chat = chat_of_dialect()
    return Bridge(chat).parse(ids, chat.encode_text("<turn>assistant\n"), [TOOL], 7)


@pytest.mark.slow
@pytest.mark.parametrize("read", [parse, parse_dialect])
@pytest.mark.parametrize("name", WRITABLE)
def test_a_reader_of_tool_calls_takes_linear_time(
    name: str, read: Callable[[np.ndarray], object]
) -> None:
    check_growth(read, lambda size: chat_template().encode_text(TEXTS[name](size)))


@pytest.mark.parametrize("place", ["open_pattern", "close_pattern"])
def test_an_answer_that_a_tokenizers_own_pattern_does_not_end_on_is_content(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat, "TEMPLATE_LIMIT_S", 0.2)
    tokenizer, slow = chat_tokenizer(), r"(?:a|aa)+\n"
    calls = {**DIALECT["fields"]["tool_calls"], place: slow}
    del calls[place.removesuffix("_pattern")]
    tokenizer.response_template = {**DIALECT, "fields": {**DIALECT["fields"], "tool_calls": calls}}
    template, said = ChatTemplate(tokenizer), "<tool_call>" + "a" * 500
    context = template.encode_text("<turn>assistant\n")
    start = time.process_time()
    answer = Bridge(template).parse(template.encode_text(said), context, [TOOL], 7)
    assert answer == {"role": "assistant", "content": said}
    assert time.process_time() - start < 5


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITABLE)
def test_an_answer_is_a_message_that_json_and_utf8_hold(name: str) -> None:
    for size in (1_000, 10_000, 100_000):
        message = parse(chat_template().encode_text(TEXTS[name](size)))
        json.dumps(message, ensure_ascii=False).encode()
        for call in message.get("tool_calls", ()):
            assert isinstance(json.loads(call["function"]["arguments"]), dict)


@pytest.mark.parametrize("depth", [20, 300, 900, 5000])
def test_a_deep_call_is_a_turn_and_never_a_failure(depth: int) -> None:
    """A failure would be retried: a policy that is not sure could draw again."""
    replies = [CALL % ("[" * depth + "]" * depth), "done"]
    (rollout,) = make_group(1).rollouts
    session = Session(
        rollout,
        engine=ScriptedEngine(lambda prompt: replies.pop(0)),
        bridge=Bridge(chat_template()),
        sampling=SamplingParams(max_tokens=20_000),
        limits=Limits(max_context=50_000),
        recorder=Kept(),
    )

    async def play() -> None:
        messages = [user("1+2?")]
        answer = (await session.call(messages, [TOOL])).answer
        messages += [answer, *(_result(call) for call in answer.get("tool_calls", ()))]
        await session.call([*messages, user("and?")], [TOOL])

    asyncio.run(play())
    assert [call.parent for call in session.tree.calls] == [None, 0]
    assert ("tool_calls" in session.tree.calls[0].answer) is (depth == 20)


def _result(call: dict[str, Any]) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call["id"], "content": "3"}


def test_words_around_thoughts_and_calls_are_content() -> None:
    said = "First.<think>hm</think> Then:\n" + CALL % '"1"' + " " + CALL % "2" + "\nDone.<eos>"
    message = parse(chat_template().encode_text(said))
    assert message["content"] == "First. Then:\n \nDone."
    assert message["reasoning_content"] == "hm"
    calls = [json.loads(call["function"]["arguments"]) for call in message["tool_calls"]]
    assert calls == [{"a": 1}, {"a": 2}]  # a number in quotes is what the tool's schema says


def test_a_thought_that_the_prompt_opened_ends_in_the_answer() -> None:
    message = parse(chat_template().encode_text("hm</think>yes"), context="<think>\n")
    assert (message["reasoning_content"], message["content"]) == ("hm", "yes")
