"""The bodies that agents' client libraries send and expect: OpenAI chat, OpenAI responses, Anthropic messages.

Pure functions from a request's JSON to messages and tools in OpenAI's chat form, and from recorded calls
back to JSON. Sampling settings of a request are not read: the run's [sampling] decides, because training
needs it; a smaller max_tokens is.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.errors import PenstockError
from penstock.rollout.agent.tree import CallTree, arguments_of, text_of
from penstock.types import ModelCall

Notes = dict[str, Any]  # what a session remembers of its requests, for a dialect with a state
Event = tuple[str, Any]  # name, or empty, and data
_MOST_CHOICES = 64


class BadRequest(PenstockError):
    """The body of a request is not what its dialect allows."""


@dataclass(slots=True, frozen=True, kw_only=True)
class ChatRequest:
    """What a request asks for, in any dialect."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    max_tokens: int | None = None
    n: int = 1
    stream: bool = False
    body: Mapping[str, Any]


@dataclass(slots=True, frozen=True, kw_only=True)
class Dialect:
    """One form of request and response, as functions."""

    read: Callable[[Any, Notes], ChatRequest]  # raises BadRequest
    write: Callable[[ChatRequest, Sequence[ModelCall], CallTree, Notes], dict[str, Any]]
    events: Callable[[ChatRequest, Mapping[str, Any]], list[Event]]  # the response as a stream
    error: Callable[[str, str], dict[str, Any]]  # of a message and its code


# -- POST /v1/chat/completions --------------------------------------------------------------------


def _chat_read(body: Any, notes: Notes) -> ChatRequest:
    body = _table(body)
    messages = _tables(body, "messages")
    number = 1 if body.get("n") is None else body["n"]
    if not isinstance(number, int) or not 1 <= number <= _MOST_CHOICES:
        raise BadRequest(f"n: got {number!r}, allowed: 1 to {_MOST_CHOICES}")
    return ChatRequest(
        messages=messages,
        tools=_tables(body, "tools", optional=True),
        max_tokens=_limit(body, "max_completion_tokens", "max_tokens"),
        n=number,
        stream=bool(body.get("stream")),
        body=body,
    )


def _chat_write(
    request: ChatRequest, calls: Sequence[ModelCall], tree: CallTree, notes: Notes
) -> dict[str, Any]:
    body = {
        "id": f"chatcmpl-{calls[0].number}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": "policy",
        "choices": [_choice(request, number, call) for number, call in enumerate(calls)],
        "usage": _usage(calls, tree, "prompt_tokens", "completion_tokens"),
    }
    if request.body.get("return_token_ids"):  # as vLLM names it
        body["prompt_token_ids"] = _context(calls[0], tree)
    return body


def _choice(request: ChatRequest, number: int, call: ModelCall) -> dict[str, Any]:
    message = {**call.answer, "content": call.answer["content"] or None}
    choice: dict[str, Any] = {"index": number, "message": message}
    choice["finish_reason"] = _ending(call)
    if request.body.get("return_token_ids"):
        choice["token_ids"] = call.token_ids.tolist()
    if request.body.get("logprobs"):
        pairs = zip(call.token_ids.tolist(), call.logprobs.tolist(), strict=True)
        content = [
            {"token": str(token), "logprob": logprob, "bytes": None, "top_logprobs": []}
            for token, logprob in pairs
        ]
        choice["logprobs"] = {"content": content, "refusal": None}
    return choice


def _chat_events(request: ChatRequest, body: Mapping[str, Any]) -> list[Event]:
    head = {key: value for key, value in body.items() if key not in ("choices", "usage")}
    head["object"] = "chat.completion.chunk"
    chunks: list[dict[str, Any]] = []
    for choice in body["choices"]:
        message, where = choice["message"], {"index": choice["index"]}
        delta = {key: value for key, value in message.items() if value is not None}
        if "tool_calls" in delta:
            calls = enumerate(message["tool_calls"])
            delta["tool_calls"] = [{"index": number, **call} for number, call in calls]
        tokens = {key: choice[key] for key in ("token_ids", "logprobs") if key in choice}
        chunks.append({"choices": [{**where, **tokens, "delta": delta, "finish_reason": None}]})
        end = {"delta": {}, "finish_reason": choice["finish_reason"]}
        chunks.append({"choices": [{**where, **end}]})
    options = request.body.get("stream_options")
    if isinstance(options, Mapping) and options.get("include_usage"):
        chunks.append({"choices": [], "usage": body["usage"]})
    return [*(("", {**head, **chunk}) for chunk in chunks), ("", "[DONE]")]


def _chat_error(message: str, code: str) -> dict[str, Any]:
    return {
        "error": {
            "message": message,
            "type": "invalid_request_error",
            "param": None,
            "code": code or None,
        }
    }


# -- POST /v1/responses. `previous_response_id` continues a conversation of the same session ------


def _responses_read(body: Any, notes: Notes) -> ChatRequest:
    body = _table(body)
    before = body.get("previous_response_id")
    history = notes.get(str(before), []) if before else []
    if before and not history:
        raise BadRequest(f"previous_response_id: got {before!r}, allowed: one of this session")
    content = body.get("input")
    items = [{"role": "user", "content": content}] if isinstance(content, str) else content
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise BadRequest("input: allowed: text, or a list of objects")
    messages = [*history, *_from_items(items)]
    if body.get("instructions"):
        messages = [m for m in messages if m.get("role") != "system"]
        messages.insert(0, {"role": "system", "content": body["instructions"]})
    tools = [
        {"type": "function", "function": {k: tool[k] for k in _FUNCTION if k in tool}}
        for tool in _tables(body, "tools", optional=True)
        if tool.get("type") == "function"
    ]
    return ChatRequest(
        messages=messages,
        tools=tools,
        max_tokens=_limit(body, "max_output_tokens"),
        stream=bool(body.get("stream")),
        body=body,
    )


def _responses_write(
    request: ChatRequest, calls: Sequence[ModelCall], tree: CallTree, notes: Notes
) -> dict[str, Any]:
    (call,) = calls
    name = f"resp_{call.number}"
    notes[name] = [*request.messages, call.answer]
    is_cut = _ending(call) == "length"
    usage = _usage(calls, tree, "input_tokens", "output_tokens")
    return {
        "id": name,
        "object": "response",
        "created_at": int(time.time()),
        "model": "policy",
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "error": None,
        "instructions": request.body.get("instructions"),
        "metadata": {},
        "output": _items(call),
        "parallel_tool_calls": True,
        "temperature": None,
        "top_p": None,
        "tool_choice": "auto",
        "tools": list(request.body.get("tools") or ()),
        "usage": {
            **usage,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 0},
        },
    }


def _responses_events(request: ChatRequest, body: Mapping[str, Any]) -> list[Event]:
    begun = {**body, "status": "in_progress", "output": [], "usage": None}
    events: list[dict[str, Any]] = [
        {"type": f"response.{name}", "response": begun} for name in ("created", "in_progress")
    ]
    for number, item in enumerate(body["output"]):
        events += _item_events(number, item)
    events.append({"type": f"response.{body['status']}", "response": dict(body)})
    return [
        (event["type"], {**event, "sequence_number": number}) for number, event in enumerate(events)
    ]


_FUNCTION = ("name", "description", "parameters")


def _from_items(items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The items of a response's input as messages; the calls of one answer are joined."""
    messages: list[dict[str, Any]] = []
    for item in items:
        kind = item.get("type", "message")
        last = messages[-1] if messages else {}
        if kind == "message":
            message = {"role": item.get("role"), "content": text_of(item)}
            if message["role"] == last.get("role") == "assistant" and "tool_calls" not in last:
                last["content"] += f"\n{message['content']}"  # an answer may have several items
            else:
                messages.append(message)
        elif kind == "function_call":
            if last.get("role") != "assistant":
                last = {"role": "assistant", "content": ""}
                messages.append(last)
            function = {"name": item.get("name"), "arguments": item.get("arguments", "")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            last.setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            output = item.get("output")
            text = output if isinstance(output, str) else text_of({"content": output})
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": text})
        elif kind != "reasoning":  # our reasoning comes back in an item of its own
            raise BadRequest(
                f"input: got an item of type {kind!r}, allowed: message, function_call, "
                "function_call_output, reasoning"
            )
    return messages


def _items(call: ModelCall) -> list[dict[str, Any]]:
    """An answer as the output items of a response."""
    answer = call.answer
    items: list[dict[str, Any]] = []
    if answer.get("reasoning_content"):
        summary = [{"type": "summary_text", "text": answer["reasoning_content"]}]
        items.append({"type": "reasoning", "id": f"rs_{call.number}", "summary": summary})
    if answer["content"] or not answer.get("tool_calls"):
        text = {"type": "output_text", "text": answer["content"], "annotations": [], "logprobs": []}
        items.append(
            {
                "type": "message",
                "id": f"msg_{call.number}",
                "role": "assistant",
                "status": "completed",
                "content": [text],
            }
        )
    for tool in answer.get("tool_calls") or ():
        items.append(
            {
                "type": "function_call",
                "id": f"fc_{tool['id']}",
                "call_id": tool["id"],
                "name": tool["function"]["name"],
                "arguments": tool["function"]["arguments"],
                "status": "completed",
            }
        )
    return items


def _item_events(number: int, item: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The events of one output item: it is added empty, filled, and done."""
    place = {"output_index": number}
    where = {**place, "item_id": item["id"]}
    empty, filled = dict(item), []
    if item["type"] == "message":
        (part,) = item["content"]
        text, nothing = {**where, "content_index": 0}, {**part, "text": ""}
        empty = {**item, "status": "in_progress", "content": []}
        filled = [
            {"type": "response.content_part.added", **text, "part": nothing},
            {"type": "response.output_text.delta", **text, "delta": part["text"], "logprobs": []},
            {"type": "response.output_text.done", **text, "text": part["text"], "logprobs": []},
            {"type": "response.content_part.done", **text, "part": part},
        ]
    elif item["type"] == "function_call":
        arguments, kind = item["arguments"], "response.function_call_arguments"
        empty = {**item, "status": "in_progress", "arguments": ""}
        filled = [
            {"type": f"{kind}.delta", **where, "delta": arguments},
            {"type": f"{kind}.done", **where, "arguments": arguments, "name": item["name"]},
        ]
    return [
        {"type": "response.output_item.added", **place, "item": empty},
        *filled,
        {"type": "response.output_item.done", **place, "item": item},
    ]


# -- POST /v1/messages, as Anthropic's clients send it --------------------------------------------


def _messages_read(body: Any, notes: Notes) -> ChatRequest:
    body = _table(body)
    messages: list[dict[str, Any]] = []
    if body.get("system"):
        messages.append({"role": "system", "content": text_of({"content": body["system"]})})
    for message in _tables(body, "messages"):
        messages += _from_blocks(message)
    tools = [
        {
            "type": "function",
            "function": {
                "name": tool.get("name"),
                "description": tool.get("description", ""),
                "parameters": tool.get("input_schema", {}),
            },
        }
        for tool in _tables(body, "tools", optional=True)
    ]
    return ChatRequest(
        messages=messages,
        tools=tools,
        max_tokens=_limit(body, "max_tokens"),
        stream=bool(body.get("stream")),
        body=body,
    )


def _messages_write(
    request: ChatRequest, calls: Sequence[ModelCall], tree: CallTree, notes: Notes
) -> dict[str, Any]:
    (call,) = calls
    answer = call.answer
    content: list[dict[str, Any]] = []
    if answer["content"] or not answer.get("tool_calls"):
        content.append({"type": "text", "text": answer["content"]})
    for tool in answer.get("tool_calls") or ():
        name = tool["function"]["name"]
        content.append(
            {"type": "tool_use", "id": tool["id"], "name": name, "input": arguments_of(tool)}
        )
    reason = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}
    usage = _usage(calls, tree, "input_tokens", "output_tokens")
    return {
        "id": f"msg_{call.number}",
        "type": "message",
        "role": "assistant",
        "model": "policy",
        "content": content,
        "stop_reason": reason[_ending(call)],
        "stop_sequence": None,
        "usage": {key: usage[key] for key in ("input_tokens", "output_tokens")},
    }


def _messages_events(request: ChatRequest, body: Mapping[str, Any]) -> list[Event]:
    start = {**body, "content": [], "stop_reason": None}
    events: list[dict[str, Any]] = [{"type": "message_start", "message": start}]
    for number, block in enumerate(body["content"]):
        empty: dict[str, Any] = {"type": "text", "text": ""}
        delta = {"type": "text_delta", "text": block.get("text", "")}
        if block["type"] == "tool_use":
            empty = {**block, "input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        where = {"index": number}
        events.append({"type": "content_block_start", **where, "content_block": empty})
        events.append({"type": "content_block_delta", **where, "delta": delta})
        events.append({"type": "content_block_stop", **where})
    end = {"stop_reason": body["stop_reason"], "stop_sequence": None}
    events.append({"type": "message_delta", "delta": end, "usage": body["usage"]})
    events.append({"type": "message_stop"})
    return [(event["type"], event) for event in events]


def _messages_error(message: str, code: str) -> dict[str, Any]:
    kind = "authentication_error" if code == "invalid_api_key" else "invalid_request_error"
    return {"type": "error", "error": {"type": kind, "message": message}}


def _from_blocks(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """An Anthropic message as messages: results of tools first, then its text and calls."""
    content = message.get("content")
    if isinstance(content, str):
        return [{"role": message.get("role"), "content": content}]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise BadRequest("messages: allowed: content as text, or as a list of blocks")
    results, texts, calls = [], [], []
    for block in content:
        kind = block.get("type")
        if kind == "text":
            texts.append(str(block.get("text", "")))
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": json.dumps(block.get("input", {}))}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result":
            result = {"role": "tool", "tool_call_id": block.get("tool_use_id")}
            results.append({**result, "content": text_of(block)})
        elif kind != "thinking":
            raise BadRequest(
                f"messages: got a block of type {kind!r}, allowed: text, thinking, tool_use, tool_result"
            )
    if not texts and not calls:
        return results
    answer: dict[str, Any] = {"role": message.get("role"), "content": "".join(texts)}
    if calls:
        answer["tool_calls"] = calls
    return [*results, answer]


def _table(body: Any) -> Mapping[str, Any]:
    if not isinstance(body, Mapping):
        raise BadRequest(f"body: got {type(body).__name__}, allowed: a JSON object")
    return body


def _tables(body: Mapping[str, Any], key: str, *, optional: bool = False) -> list[dict[str, Any]]:
    """A list of tables under a key."""
    tables = body.get(key)
    if optional and not tables:
        return []
    if not isinstance(tables, list) or not tables or not all(isinstance(t, dict) for t in tables):
        raise BadRequest(f"{key}: got {type(tables).__name__}, allowed: a list of objects")
    return tables


def _limit(body: Mapping[str, Any], *keys: str) -> int | None:
    """The first token limit that the body names."""
    for key in keys:
        value = body.get(key)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise BadRequest(f"{key}: got {value!r}, allowed: a whole number from 1")
        return value
    return None


def _ending(call: ModelCall) -> str:
    """How an answer ended, as a chat completion says it: length, tool_calls or stop."""
    if call.finish_reason == "length":
        return "length"
    return "tool_calls" if call.answer.get("tool_calls") else "stop"


def _context(call: ModelCall, tree: CallTree) -> list[int]:
    """The ids that the engine was given for a call."""
    ids = tree.ids(call)
    return ids[: len(ids) - len(call.token_ids)].tolist()


def _usage(
    calls: Sequence[ModelCall], tree: CallTree, prompt_key: str, sampled_key: str
) -> dict[str, int]:
    prompt, sampled = len(_context(calls[0], tree)), sum(len(call.token_ids) for call in calls)
    return {prompt_key: prompt, sampled_key: sampled, "total_tokens": prompt + sampled}


DIALECTS = {
    "/v1/chat/completions": Dialect(
        read=_chat_read, write=_chat_write, events=_chat_events, error=_chat_error
    ),
    "/v1/responses": Dialect(
        read=_responses_read, write=_responses_write, events=_responses_events, error=_chat_error
    ),
    "/v1/messages": Dialect(
        read=_messages_read, write=_messages_write, events=_messages_events, error=_messages_error
    ),
}
