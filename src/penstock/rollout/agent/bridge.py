"""From messages to token ids and back, for agents: whole conversations, what follows an answer, tool calls.

Sampled tokens are never rendered again. What follows an answer comes from rendering a short stand-in,
[user, assistant(SENTINEL)] + the new messages, cut behind the first end token after the sentinel. This
holds for most chat templates and is proved for the tokenizer at hand (`proof`); where it does not hold,
a turn is rendered whole and becomes a row of its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from penstock.data.chat import ChatTemplate, limits
from penstock.data.sampler import stable_hash
from penstock.errors import UserError
from penstock.rollout.agent.tree import Message, arguments_of, text_of
from penstock.types import ModelCall

SENTINEL = "sentinel7341"
_PREFIX_TOKENS = 64  # of the context, where a template may open the answer (<think>)
_EXAMPLE_TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {"type": "object", "properties": {"a": {"type": "string"}}},
    },
}
_EXAMPLE_TEXT = '<tool_call>{"name": NAME, "arguments": {...}}</tool_call>'
_THINK, _TOOL_CALL = "<think>", "<tool_call>"
_CLOSING = {_THINK: "</think>", _TOOL_CALL: "</tool_call>"}
_TAG = re.compile("(</?(?:think|tool_call)>)")
_CALL_TEMPLATE = {  # the text between the tags of a call
    "start_anchor": "\0",
    "fields": {
        "tool_calls": {
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        }
    },
}
_PIECE = 2_000  # characters; for each tag, a parser looks through all that it was fed
_DEEPEST = 32  # levels of a call's arguments; templates and JSON read them by recursion


@dataclass(slots=True, frozen=True)
class _TurnEnding:
    """What a template writes after the sentinel that stands in for an answer."""

    tail: str  # up to the end token: the rest of a tool call, or nothing
    end: str
    text: str  # behind it, up to where the next answer begins


class Bridge:
    """Renders, continues and parses the conversations of one task, with its tokenizer."""

    def __init__(self, chat: ChatTemplate, arguments: Mapping[str, Any] | None = None) -> None:
        self._chat = chat
        self._arguments = dict(arguments or {})
        self._ends = {chat.decode_prompt([token]): token for token in chat.eos_ids}

    # -- to ids ----------------------------------------------------------------------------------

    def render(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> np.ndarray:
        """The ids of a whole conversation, up to where the answer begins."""
        return self._chat.encode_rendered(self._text(messages, tools))

    def suffix(self, call: ModelCall, added: Sequence[Message]) -> np.ndarray | None:
        """The ids between an answer's last token and the next answer; None: render it whole."""
        kind = "user"
        if call.answer.get("tool_calls"):
            kind = "tool after words" if text_of(call.answer).strip() else "tool"
        failure, tail = self._proofs[kind]
        if failure:
            return None
        ending = self._after_end(_stand_in(call.answer), added, json.loads(call.tools or "[]"))
        if ending is None or ending.tail != tail:  # a role that writes before the end token
            return None
        last = int(call.token_ids[-1]) if len(call.token_ids) else -1
        ids = self._chat.encode_text(ending.text)
        if last == self._ends[ending.end]:
            return ids
        if last in self._ends.values():
            return None  # the answer ended with another end token than the template writes
        return np.concatenate([np.array([self._ends[ending.end]], dtype=np.int32), ids])

    def _after_end(
        self, answer: Message, added: Sequence[Message], tools: Sequence[Any] = ()
    ) -> _TurnEnding | None:
        """What follows the last sentinel; None if the template drops one or writes no end."""
        try:
            text = self._text([{"role": "user", "content": "x"}, answer, *added], tools)
        except UserError:  # the template refuses these roles
            return None
        if text.count(SENTINEL) != max(1, len(answer.get("tool_calls", ()))):
            return None
        start = text.rfind(SENTINEL) + len(SENTINEL)
        places = [(text.find(end, start), end) for end in self._ends]
        ends = [(at, end) for at, end in places if at >= 0]
        if not ends:
            return None
        at, end = min(ends)
        return _TurnEnding(tail=text[start:at], end=end, text=text[at + len(end) :])

    def _text(self, messages: Sequence[Message], tools: Sequence[Any]) -> str:
        plain = [_for_template(message) for message in messages]
        if self._renders_tools:
            arguments = {**self._arguments, **({"tools": list(tools)} if tools else {})}
            return self._chat.render(plain, arguments=arguments)
        messages_in_text = _tools_as_text(plain, tools, self._takes_system)
        return self._chat.render(messages_in_text, arguments=self._arguments)

    @cached_property
    def _renders_tools(self) -> bool:
        return "tools" in str(getattr(self._chat.tokenizer, "chat_template", None) or "")

    @cached_property
    def _takes_system(self) -> bool:
        try:
            self._chat.render([{"role": role, "content": "x"} for role in ("system", "user")])
        except UserError:
            return False
        return True

    @property
    def proof(self) -> dict[str, str]:
        """Why a turn of each kind cannot be continued; empty: it was proved."""
        return {kind: failure for kind, (failure, _) in self._proofs.items()}

    def rendered_whole(self) -> list[tuple[str, str]]:
        """(what is rendered whole, why) for the turns that cannot be continued, by reason."""
        kinds: dict[str, list[str]] = {}
        for kind, why in self.proof.items():
            if why:
                kinds.setdefault(why, []).append(kind)
        return [
            (
                f"turns ({', '.join(names)}) are rendered whole, each trained as a row of its own",
                why,
            )
            for why, names in kinds.items()
        ]

    @cached_property
    def _proofs(self) -> dict[str, tuple[str, str]]:
        question = {"role": "user", "content": "and now?"}
        result = {"role": "tool", "content": "4", "tool_call_id": "c00000000"}
        call = {"tool_calls": [_example_call("add", "c00000000", "nine")]}
        return {
            "user": self._prove(question, {"content": "nine"}),
            "tool": self._prove(result, {"content": "", **call}),
            "tool after words": self._prove(result, {"content": "nine", **call}),
        }

    def _prove(self, new: Message, fields: Message) -> tuple[str, str]:
        """Compare a continuation with the rendering of a longer conversation with another answer.

        Return why such turns cannot be continued, empty if they can, and what stands before their end token.
        """
        answer = {"role": "assistant", **fields}
        tools = [_EXAMPLE_TOOL] if fields.get("tool_calls") else []
        ending = self._after_end(_stand_in(answer), [new], tools)
        if ending is None:
            return "the chat template writes no end token behind an answer, or refuses it", ""
        before = [
            {"role": "user", "content": "first"},
            {"role": "assistant", "content": "one"},
            {"role": "user", "content": "second"},
        ]
        whole = self._text([*before, answer, new], tools)
        head = whole[: len(whole) - len(ending.text)]
        if not whole.endswith(ending.text) or not head.endswith(ending.tail + ending.end):
            return "the chat template writes a turn differently in a longer conversation", ""
        ids, first = self._chat.encode_rendered(whole), self._chat.encode_rendered(head)
        joined = np.concatenate([first, self._chat.encode_text(ending.text)])
        if not np.array_equal(ids, joined):
            return "the tokenizer joins tokens across the end of an answer", ""
        return "", ending.tail

    # -- from ids --------------------------------------------------------------------------------

    def parse(
        self, token_ids: np.ndarray, context_ids: np.ndarray, tools: Sequence[Any], key: int
    ) -> dict[str, Any]:
        """The assistant's message; what cannot be parsed is its content. `key` names its calls."""
        prefix = self._chat.decode_prompt(context_ids[-_PREFIX_TOKENS:])
        template = getattr(self._chat.tokenizer, "response_template", None)
        try:
            if template is None:
                region = _THINK if prefix.rstrip().endswith(_THINK) else ""
                parsed = _read_tags(self._chat.decode(token_ids), region, tools)
            else:
                from transformers.utils.chat_parsing import ResponseParser

                text = self._chat.decode_prompt(token_ids)
                with limits("response template"):  # its patterns are the tokenizer's own
                    parser = ResponseParser(template, prefix=prefix, tools=list(tools))
                    for start in range(0, len(text), _PIECE):
                        parser.feed(text[start : start + _PIECE])
                    parsed, _ = parser.finalize()
            return _message(parsed, key)
        except (UserError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return {"role": "assistant", "content": self._chat.decode(token_ids)}


def _read_tags(text: str, region: str, tools: Sequence[Any]) -> dict[str, Any]:
    """The form of Qwen and Hermes, for tokenizers that name none: <think> and <tool_call> JSON.

    `region` is the tag in which the text begins. Takes linear time, whatever the text is.
    """
    from transformers.utils.chat_parsing import parse_response

    bodies: dict[str, list[list[str]]] = {"": [[]], _THINK: [], _TOOL_CALL: []}
    if region:
        bodies[region].append([])
    for piece in _TAG.split(text):
        if piece == _CLOSING.get(region):
            region = ""
        elif not region and piece in _CLOSING:
            region = piece
            bodies[region].append([])
        else:
            bodies[region][-1].append(piece)
    texts = {tag: ["".join(body) for body in each] for tag, each in bodies.items()}
    calls = [  # whose arguments become what the schemas of the tools say
        parse_response(call, _CALL_TEMPLATE, prefix="", tools=list(tools))["tool_calls"][0]
        for call in texts[_TOOL_CALL]
    ]
    thinking = "\n".join(thought.strip() for thought in texts[_THINK])
    return {"content": texts[""][0].strip(), "thinking": thinking, "tool_calls": calls}


def _message(parsed: Mapping[str, Any], key: int) -> dict[str, Any]:
    """A parsed response as an OpenAI message; raise ValueError for calls of another form."""
    message: dict[str, Any] = {"role": "assistant", "content": str(parsed.get("content") or "")}
    reasoning = parsed.get("reasoning_content") or parsed.get("thinking")
    if reasoning:
        message["reasoning_content"] = str(reasoning)
    calls = []
    for number, call in enumerate(parsed.get("tool_calls") or ()):
        function = call["function"]
        name, arguments = function["name"], function.get("arguments", {})
        if not isinstance(name, str) or not isinstance(arguments, Mapping):
            raise ValueError(
                f"tool call: got {function!r}, allowed: a name and a table of arguments"
            )
        if _is_deep(arguments):
            raise ValueError(f"tool call: got arguments deeper than {_DEEPEST} levels")
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        f"{name}{text}".encode()  # raises ValueError for half a character, which no file holds
        calls.append(
            {
                "id": f"c{stable_hash(key, number):016x}"[:9],  # the form that every template takes
                "type": "function",
                "function": {"name": name, "arguments": text},
            }
        )
    if calls:
        message["tool_calls"] = calls
    return message


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(_DEEPEST):
        tables = [item.values() if isinstance(item, Mapping) else item for item in level]
        level = [item for table in tables for item in table if isinstance(item, Mapping | list)]
        if not level:
            return False
    return True


def _stand_in(answer: Message) -> Message:
    """A short answer of the same kind, with the sentinel where its own text would end."""
    if not answer.get("tool_calls"):
        return {"role": "assistant", "content": SENTINEL}
    calls = [_example_call(c["function"]["name"], c["id"], SENTINEL) for c in answer["tool_calls"]]
    words = "y" if text_of(answer).strip() else ""
    return {"role": "assistant", "content": words, "tool_calls": calls}


def _example_call(name: str, call_id: str, argument: str) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps({"a": argument})}
    return {"type": "function", "id": call_id, "function": function}


def _tools_as_text(
    messages: list[dict[str, Any]], tools: Sequence[Any], takes_system: bool
) -> list[dict[str, Any]]:
    """Write tools, calls and results as text, for a chat template that knows none of them.

    Results of one turn and the user's words behind them are one message: many templates want the
    roles to alternate.
    """
    texts: list[dict[str, Any]] = []
    is_result = False  # whether the last message is one
    for message in messages:
        for call in message.pop("tool_calls", None) or ():
            message["content"] += f"<tool_call>{json.dumps(call['function'])}</tool_call>"
        if message.get("role") == "tool":
            text = f"<tool_response>{message['content']}</tool_response>"
            message, follows, is_result = {"role": "user", "content": text}, is_result, True
        else:
            follows = is_result and message.get("role") == "user"
            is_result = is_result and follows
        if follows:
            texts[-1]["content"] += f"\n{message['content']}"
        else:
            texts.append(message)
    if not tools:
        return texts
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    words = f"Tools:\n{listed}\nTo call one, write {_EXAMPLE_TEXT}."
    first = texts[0] if texts else {}
    if first.get("role") == "system":
        return [{**first, "content": f"{first['content']}\n{words}"}, *texts[1:]]
    if takes_system or first.get("role") != "user":
        return [{"role": "system", "content": words}, *texts]
    return [{**first, "content": f"{words}\n{first['content']}"}, *texts[1:]]


def _for_template(message: Message) -> dict[str, Any]:
    """A message as chat templates expect it: text content, arguments as a table."""
    plain = {**message, "content": text_of(message)}
    if plain.get("tool_calls"):
        plain["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": arguments_of(call)}}
            for call in plain["tool_calls"]
        ]
    elif "tool_calls" in plain:
        del plain["tool_calls"]
    return plain
