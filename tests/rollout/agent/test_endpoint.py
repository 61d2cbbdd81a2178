"""The HTTP endpoint of agents: OpenAI's form, one key per session, errors as OpenAI gives them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import httpx2
import pytest

from penstock.data.sampler import Sampler
from penstock.engine.protocol import SamplingParams
from penstock.rollout.agent.bridge import Bridge
from penstock.rollout.agent.endpoint import Endpoint
from penstock.rollout.agent.session import Limits, Session
from penstock.types import ModelCall
from stages.chat_policy import Kept, ScriptedEngine, chat_template, user
from stages.rollouts import make_prompts

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
ADD = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
Send = Callable[..., Awaitable[tuple[int, Any]]]


def make_session(
    say: Callable[[str], str], number: int = 0, calls: Sequence[ModelCall] = (), **limits: Any
) -> Session:
    sampler = Sampler(make_prompts(3), task_name="t", prompt_repeat_k=1, seed=0)
    return Session(
        sampler.group_at(number).rollouts[0],
        engine=ScriptedEngine(say),
        bridge=Bridge(chat_template()),
        sampling=SamplingParams(max_tokens=100),
        limits=Limits(**limits),
        recorder=Kept(),
        calls=calls,
    )


async def post(
    url: str, key: str, body: Any, path: str = "/chat/completions", **headers: str
) -> tuple[int, Any]:
    """Return (status, parsed body); a stream is a list of its data."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    sent = {"Authorization": f"Bearer {key}"} if key else {}
    sent |= {name.replace("_", "-"): value for name, value in headers.items()}
    async with httpx2.AsyncClient() as client:
        response = await client.post(f"{url}{path}", content=data, headers=sent, timeout=60)
    status, text = response.status_code, response.text
    if "text/event-stream" in response.headers["content-type"]:
        parts = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
        return status, [part if part == "[DONE]" else json.loads(part) for part in parts]
    return status, json.loads(text)


def serve(main: Callable[[Endpoint], Awaitable[None]]) -> None:
    async def run() -> None:
        endpoint = Endpoint()
        await endpoint.start()
        try:
            await main(endpoint)
        finally:
            await endpoint.close()

    asyncio.run(run())


@pytest.mark.parametrize("size", ["\u00b2", "9" * 5000, "-1", "1_0"])
def test_a_size_that_is_no_number_is_refused(size: str) -> None:
    async def main(endpoint: Endpoint) -> None:
        host, port = endpoint.base_url.removeprefix("http://").split("/")[0].split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {size}\r\n\r\n"
        )
        writer.write(head.encode("latin-1"))
        assert (await reader.readuntil(b"\r\n")).split()[1] == b"400"
        writer.close()

    serve(main)


def test_web_pages_are_refused_also_with_a_key() -> None:
    async def main(endpoint: Endpoint) -> None:
        session = make_session(lambda prompt: pytest.fail("asked the policy"))
        key, body = endpoint.open(session), {"messages": [user("hi")]}
        status, _ = await post(endpoint.base_url, key, body, Host="evil.example")
        assert status == 421
        for origin in ("http://evil.example", "null"):
            assert (await post(endpoint.base_url, key, body, Origin=origin))[0] == 403

    serve(main)


def test_a_request_is_judged_by_its_head_before_its_body_is_read() -> None:
    async def main(endpoint: Endpoint) -> None:
        host, port = endpoint.base_url.removeprefix("http://").split("/")[0].split(":")
        for size, status in (("99999999", b"401"), ("5\r\nContent-Length: 6", b"400")):
            reader, writer = await asyncio.open_connection(host, int(port))
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {size}"
            writer.write(f"{head}\r\n\r\n".encode())
            assert (await reader.readuntil(b"\r\n")).split()[1] == status
            writer.close()

    serve(main)


def test_deep_json_is_a_mistake_of_the_client() -> None:
    async def main(endpoint: Endpoint) -> None:
        key = endpoint.open(make_session(str.upper))
        status, _ = await post(endpoint.base_url, key, b"[" * 200_000)
        assert status == 400

    serve(main)


def test_a_client_gets_openais_answer_and_the_call_is_recorded() -> None:
    async def main(endpoint: Endpoint) -> None:
        session = make_session(lambda prompt: CALL if prompt.count("<turn>") < 4 else "done")
        key = endpoint.open(session)
        body: dict[str, Any] = {
            "model": "policy",
            "messages": [user("1?")],
            "tools": [{"type": "function", "function": ADD}],
        }
        status, shown = await post(endpoint.base_url, key, body)
        assert status == 200
        (choice,) = shown["choices"]
        assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
        (call,) = choice["message"]["tool_calls"]
        assert (call["type"], call["function"]["arguments"]) == ("function", '{"a": 1}')
        body["messages"] += [
            choice["message"],
            {"role": "tool", "tool_call_id": call["id"], "content": "2"},
        ]
        status, shown = await post(endpoint.base_url, key, {**body, "return_token_ids": True})
        assert shown["choices"][0]["message"] == {"role": "assistant", "content": "done"}
        first, second = session.tree.calls
        assert second.parent == 0
        assert shown["prompt_token_ids"] == [
            *first.context_ids.tolist(),
            *first.token_ids.tolist(),
            *second.context_ids.tolist(),
        ]
        assert shown["choices"][0]["token_ids"] == second.token_ids.tolist()
        sampled = len(second.token_ids)
        prompt = len(shown["prompt_token_ids"])
        assert shown["usage"] == {
            "prompt_tokens": prompt,
            "completion_tokens": sampled,
            "total_tokens": prompt + sampled,
        }

    serve(main)


def test_a_stream_has_the_same_answer_in_chunks() -> None:
    async def main(endpoint: Endpoint) -> None:
        key = endpoint.open(make_session(lambda prompt: "hello"))
        body: dict[str, Any] = {"messages": [user("1?")], "stream": True, "return_token_ids": True}
        status, events = await post(endpoint.base_url, key, body)
        assert all(event["choices"] for event in events[:-1])  # usage comes if it is asked for
        assert len(events[0]["choices"][0]["token_ids"]) == len("hello") + 1
        body["stream_options"] = {"include_usage": True}
        status, events = await post(endpoint.base_url, key, body)
        assert (status, events[-1]) == (200, "[DONE]")
        deltas = [event["choices"][0] for event in events[:-1] if event["choices"]]
        assert deltas[0]["delta"] == {"role": "assistant", "content": "hello"}
        assert deltas[-1]["finish_reason"] == "stop"
        assert events[-2]["usage"]["completion_tokens"] == len("hello") + 1

    serve(main)


def test_a_stream_changes_nothing_of_the_recorded_call() -> None:
    async def main(endpoint: Endpoint) -> None:
        session = make_session(lambda prompt: CALL)
        key, body = endpoint.open(session), {"messages": [user("1?")], "stream": True}
        _, events = await post(endpoint.base_url, key, body)
        (sent,) = events[0]["choices"][0]["delta"]["tool_calls"]
        (kept,) = session.tree.calls[0].answer["tool_calls"]
        assert sent == {"index": 0, **kept}
        assert "index" not in kept

    serve(main)


def test_a_key_opens_its_own_session_until_it_is_shut() -> None:
    async def main(endpoint: Endpoint) -> None:
        one, other = make_session(lambda prompt: "one"), make_session(lambda prompt: "two", 1)
        key, second = endpoint.open(one), endpoint.open(other)
        assert key != second
        body = {"messages": [user("?")]}
        await post(endpoint.base_url, key, body)
        assert (len(one.tree.calls), len(other.tree.calls)) == (1, 0)
        endpoint.shut(key)
        for wrong in (key, "", "guess"):
            status, shown = await post(endpoint.base_url, wrong, body)
            assert (status, shown["error"]["code"]) == (401, "invalid_api_key")
        assert (await post(endpoint.base_url, second, body))[0] == 200

    serve(main)


def test_refusals_are_those_of_openai() -> None:
    async def main(endpoint: Endpoint) -> None:
        session = make_session(lambda prompt: "x", max_context=40)
        key, url = endpoint.open(session), endpoint.base_url
        status, shown = await post(url, key, {"messages": [user("x" * 60)]})
        assert (status, shown["error"]["code"]) == (400, "context_length_exceeded")
        assert session.truncated
        for body in (b"{", [], {"messages": "hi"}, {"messages": [user("a")], "n": 0}):
            status, shown = await post(url, key, body)
            assert (status, shown["error"]["code"]) == (400, "invalid_request")
        status, _ = await post(url, key, {}, "/embeddings")
        assert status == 404

    serve(main)


IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}
RESULT = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "image"}]}


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/chat/completions", {"messages": [{"role": "user", "content": [IMAGE]}]}, "image_url"),
        ("/chat/completions", {"messages": [{"role": "user", "content": [1]}]}, "'int'"),
        ("/chat/completions", {"messages": [{"role": "tool", "content": {"a": 1}}]}, "{'a': 1}"),
        ("/chat/completions", {"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "[{}]"),
        ("/chat/completions", {"messages": [{"role": "assistant", "tool_calls": "x"}]}, "'x'"),
        ("/responses", {"input": []}, "got none"),
        (
            "/responses",
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input_image",
        ),
        ("/messages", {"messages": [{"role": "user", "content": []}]}, "got none"),
        ("/messages", {"messages": [user("?")], "system": 5}, "content 5"),
    ],
)
def test_what_the_policy_could_not_read_is_a_mistake_of_the_client(
    path: str, body: Any, words: str
) -> None:
    """Neither left out in silence nor status 500, for which client libraries try again."""

    async def main(endpoint: Endpoint) -> None:
        key = endpoint.open(make_session(lambda prompt: "x"))
        status, shown = await post(endpoint.base_url, key, body, path)
        assert (status, words in shown["error"]["message"]) == (400, True), shown

    serve(main)


def test_half_a_character_and_images_of_tools_end_no_rollout() -> None:
    async def main(endpoint: Endpoint) -> None:
        prompts: list[str] = []
        session = make_session(lambda prompt: (prompts.append(prompt), "x")[1])
        key, url = endpoint.open(session), endpoint.base_url
        status, _ = await post(url, key, {"messages": [user("a\ud800b")]})
        assert (status, "a?b" in prompts[0]) == (200, True)
        status, _ = await post(
            url, key, {"messages": [{"role": "user", "content": [RESULT]}]}, "/messages"
        )
        assert status == 200

    serve(main)


def test_a_clients_retry_is_answered_with_the_same_call() -> None:
    async def main(endpoint: Endpoint) -> None:
        session = make_session(lambda prompt: "x")
        key, body = endpoint.open(session), {"messages": [user("?")]}
        await post(endpoint.base_url, key, body)
        await post(endpoint.base_url, key, body, x_stainless_retry_count="1")
        assert len(session.tree.calls) == 1

    serve(main)


@pytest.mark.parametrize("killed", [False, True])
def test_a_retry_for_several_choices_gets_the_call_of_each(killed: bool) -> None:
    async def main(endpoint: Endpoint) -> None:
        left = ["b", "a"]
        session = make_session(lambda prompt: left.pop())
        body = {"messages": [user("?")], "n": 2}
        _, first = await post(endpoint.base_url, endpoint.open(session), body)
        if killed:  # before the client had its answer
            session = make_session(pytest.fail, calls=session.tree.calls)  # as a new process has it
        key = endpoint.open(session)
        for number in ("1", "2"):
            _, again = await post(endpoint.base_url, key, body, x_stainless_retry_count=number)
            assert again["choices"] == first["choices"]
        assert [choice["message"]["content"] for choice in first["choices"]] == ["a", "b"]
        assert len(session.tree.calls) == 2

    serve(main)


def test_an_engine_that_fails_is_a_500_and_its_retry_asks_again() -> None:
    async def main(endpoint: Endpoint) -> None:
        left = ["raise"]

        def say(prompt: str) -> str:
            if left:
                raise RuntimeError(left.pop())
            return "fine"

        session = make_session(say)
        key, body = endpoint.open(session), {"messages": [user("?")]}
        status, shown = await post(endpoint.base_url, key, body)
        assert (status, shown["error"]["message"]) == (500, "RuntimeError: raise")
        status, _ = await post(endpoint.base_url, key, body, x_stainless_retry_count="1")
        assert (status, len(session.tree.calls)) == (200, 1)

    serve(main)


def test_a_request_that_waits_when_its_rollout_ends_is_answered() -> None:
    async def main(endpoint: Endpoint) -> None:
        session = make_session(lambda prompt: "x")
        begun = asyncio.Event()

        async def never(request: Any) -> Any:
            begun.set()
            await asyncio.Event().wait()

        session._engine.generate = never
        body = {"messages": [user("?")]}
        asked = asyncio.create_task(post(endpoint.base_url, endpoint.open(session), body))
        await begun.wait()
        await session.close()
        status, shown = await asked
        assert (status, shown["error"]["message"]) == (500, "EngineError: the rollout has ended")

    serve(main)


@pytest.mark.parametrize("retries", [False, True])
def test_an_answer_whose_client_hung_up_counts_only_if_the_client_asks_again(retries: bool) -> None:
    async def main(endpoint: Endpoint) -> None:
        session = make_session(lambda prompt: "x")
        generate, begun, told = session._engine.generate, asyncio.Event(), asyncio.Event()

        async def late(request: Any) -> Any:
            begun.set()
            await told.wait()
            return await generate(request)

        session._engine.generate = late
        key, url = endpoint.open(session), endpoint.base_url
        asked = asyncio.create_task(post(url, key, {"messages": [user("1?")]}))
        await begun.wait()
        asked.cancel()
        await asyncio.wait([asked])  # its connection is closed
        await post(url, "no key", {})  # later than that, so the endpoint has seen the end by now
        told.set()
        if retries:
            await post(url, key, {"messages": [user("1?")]}, x_stainless_retry_count="1")
        await post(url, key, {"messages": [user("2?")]})
        assert len(session.tree.calls) == 2
        assert session.unheard() == ([] if retries else [0])

    serve(main)


@pytest.mark.parametrize("number", [3])
def test_several_choices_are_several_calls(number: int) -> None:
    async def main(endpoint: Endpoint) -> None:
        session = make_session(lambda prompt: "x")
        key = endpoint.open(session)
        _, shown = await post(endpoint.base_url, key, {"messages": [user("?")], "n": number})
        assert [choice["index"] for choice in shown["choices"]] == list(range(number))
        assert len(session.tree.leaves()) == number

    serve(main)


def say_by_turn(prompt: str) -> str:
    return CALL if "<turn>tool\n" not in prompt else "done"


def test_the_responses_api_continues_by_items_and_by_id() -> None:
    async def main(endpoint: Endpoint) -> None:
        session = make_session(say_by_turn)
        key, url = endpoint.open(session), endpoint.base_url
        body: dict[str, Any] = {"input": "1?", "tools": [{"type": "function", **ADD}]}
        status, shown = await post(url, key, {**body, "instructions": "be good"}, "/responses")
        assert (status, shown["status"]) == (200, "completed")
        (item,) = shown["output"]
        assert (item["type"], item["name"], item["arguments"]) == (
            "function_call",
            "add",
            '{"a": 1}',
        )
        result = {"type": "function_call_output", "call_id": item["call_id"], "output": "2"}
        whole = {**body, "instructions": "be good", "input": [user("1?"), item, result]}
        _, shown = await post(url, key, whole, "/responses")
        assert shown["output"][0]["content"][0]["text"] == "done"
        short = {**body, "previous_response_id": "resp_0", "input": [result], "stream": True}
        _, events = await post(url, key, short, "/responses")
        assert [event["type"].removeprefix("response.") for event in events] == [
            "created",
            "in_progress",
            "output_item.added",
            "content_part.added",
            "output_text.delta",
            "output_text.done",
            "content_part.done",
            "output_item.done",
            "completed",
        ]
        assert events[2]["item"]["content"] == []  # filled by what follows
        assert [call.parent for call in session.tree.calls] == [None, 0, 0]
        wrong = {**body, "previous_response_id": "resp_9", "input": "x"}
        assert (await post(url, key, wrong, "/responses"))[0] == 400

    serve(main)


def test_reasoning_that_comes_back_as_text_is_the_same_answer() -> None:
    """As pydantic-ai sends it: an assistant's item of its own, in think tags."""

    async def main(endpoint: Endpoint) -> None:
        session = make_session(lambda prompt: f"<think>hm</think>I add. {CALL}")
        key, url = endpoint.open(session), endpoint.base_url
        _, shown = await post(url, key, {"input": "1?"}, "/responses")
        thought, said, call = shown["output"]
        assert thought["summary"][0]["text"] == "hm"
        told = {"role": "assistant", "content": "<think>\nhm\n</think>"}
        text = {"role": "assistant", "content": said["content"][0]["text"]}
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "2"}
        for other, parent in ((told, 0), ({**told, "content": "<think>ha</think>"}, None)):
            items = [user("1?"), other, text, call, result]
            await post(url, key, {"input": items}, "/responses")
            assert session.tree.calls[-1].parent == parent

    serve(main)


def test_anthropics_messages_have_the_same_tree() -> None:
    async def main(endpoint: Endpoint) -> None:
        session = make_session(say_by_turn)
        key, url = endpoint.open(session), endpoint.base_url
        tool = {"name": "add", "input_schema": ADD["parameters"]}
        body: dict[str, Any] = {"system": "be good", "max_tokens": 90, "tools": [tool]}
        body["messages"] = [user("1?")]
        status, shown = await post(url, "", body, "/messages", x_api_key=key)
        assert (status, shown["stop_reason"]) == (200, "tool_use")
        (use,) = shown["content"]
        assert (use["type"], use["input"]) == ("tool_use", {"a": 1})
        result = {"type": "tool_result", "tool_use_id": use["id"], "content": "2"}
        body["messages"] += [
            {"role": "assistant", "content": shown["content"]},
            {"role": "user", "content": [result]},
        ]
        _, events = await post(url, "", {**body, "stream": True}, "/messages", x_api_key=key)
        kinds = [event["type"] for event in events]
        assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
        assert {"type": "text_delta", "text": "done"} in [event.get("delta") for event in events]
        assert [call.parent for call in session.tree.calls] == [None, 0]
        twice = "/v1/messages"  # Anthropic's client appends /v1 to the base_url that it is given
        assert (await post(url, "", body, twice, x_api_key=key))[0] == 200
        status, shown = await post(url, "", body, "/messages", x_api_key="wrong")
        assert (status, shown["error"]["type"]) == (401, "authentication_error")

    serve(main)


def test_many_sessions_of_many_turns_at_once_lose_no_call() -> None:
    """Each session has its own conversation, in order, and nothing of another's."""
    sessions, turns = 12, 8

    async def talk(
        client: httpx2.AsyncClient, endpoint: Endpoint, number: int, session: Session
    ) -> None:
        key = endpoint.open(session)
        url, head = f"{endpoint.base_url}/chat/completions", {"Authorization": f"Bearer {key}"}
        messages: list[Any] = [user(f"start {number}")]
        for turn in range(turns):
            body = {"messages": messages, "tools": [{"type": "function", "function": ADD}]}
            response = await client.post(url, json=body, headers=head, timeout=60)
            message = response.json()["choices"][0]["message"]
            call_id = message["tool_calls"][0]["id"]
            result = {"role": "tool", "tool_call_id": call_id, "content": f"{number}.{turn}"}
            messages += [message, result]
        endpoint.shut(key)
        late = await client.post(url, json={"messages": messages}, headers=head, timeout=60)
        assert late.status_code == 401

    async def main(endpoint: Endpoint) -> None:
        made = [make_session(lambda _: CALL, number % 3) for number in range(sessions)]
        async with httpx2.AsyncClient() as client:
            talks = (talk(client, endpoint, n, session) for n, session in enumerate(made))
            await asyncio.gather(*talks)
        for number, session in enumerate(made):
            calls = session.tree.calls
            assert [call.parent for call in calls] == [None, *range(turns - 1)]
            results = [call.messages[-1]["content"] for call in calls]
            assert results == [f"start {number}", *(f"{number}.{n}" for n in range(turns - 1))]

    serve(main)
