"""Demonstrations: records that show an answer, as prompts with the turns that are imitated.

A record has `messages` (or ShareGPT's `conversations`) with assistant turns, or a prompt and one of `ANSWERS`. Everything up to the first
assistant turn is the prompt; every assistant turn is learned, token by token, up to its end of turn.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.data.chat import ChatTemplate
from penstock.data.source import BadRecord, chosen_fields

ANSWERS = ("completion", "response", "output", "solution", "answer", "gt_answer")
TURNS = "demonstration"  # the field of a prompt that holds them
TOOLS = "tools"  # the field of a record with what may be called, as a list or as JSON
SPEAKERS = {"human": "user", "gpt": "assistant"}  # as ShareGPT names them


def as_messages(turns: Any) -> list[Any]:
    """Turns of ShareGPT as messages; what is something else stays."""
    return [
        {"role": SPEAKERS.get(str(turn["from"]), turn["from"]), "content": turn.get("value")}
        if isinstance(turn, dict) and "from" in turn
        else turn
        for turn in (turns if isinstance(turns, list) else ())
    ]


def as_prompt(record: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """A record with the turns to imitate apart from its prompt; raise BadRecord if it has none."""
    name = "messages" if "messages" in record else "conversations"
    turns = as_messages(record.get(name))
    roles = [turn.get("role") if isinstance(turn, dict) else None for turn in turns]
    answer = next((n for n in chosen_fields(ANSWERS, columns) if record.get(n) is not None), None)
    if "assistant" in roles:
        first = roles.index("assistant")
        if not first:
            raise BadRecord("got an assistant turn first, allowed: a prompt before it")
        rest, turns = {**record, name: turns[:first]}, turns[first:]
    elif answer is not None:
        shown = record[answer]
        rest = {key: value for key, value in record.items() if key != answer}
        text = str(shown) if type(shown) in (int, float) else shown  # as rewards read it
        turns = shown if isinstance(shown, list) else [{"role": "assistant", "content": text}]
    else:
        rest, turns = {**record}, []
    turns = [_as_turn(turn) for turn in turns]
    if all(turn["role"] != "assistant" for turn in turns):
        raise BadRecord(
            f"got no answer to imitate, allowed: messages with an assistant turn, or one of {', '.join(ANSWERS)}"
        )
    tools = {TOOLS: _parsed(record[TOOLS])} if record.get(TOOLS) else {}
    return {**rest, **tools, TURNS: turns}


def _as_turn(turn: Any) -> dict[str, Any]:
    """A turn as chat templates expect it: its content a text, its tools' arguments a table."""
    calls = turn.get("tool_calls") if isinstance(turn, dict) else None
    if calls and turn.get("content") is None:
        turn = {**turn, "content": ""}
    needed = [turn.get(name) if isinstance(turn, dict) else None for name in ("role", "content")]
    if not all(isinstance(value, str) for value in needed):
        raise BadRecord("got a turn to imitate without role or text, allowed: role and content")
    if not calls:
        return turn
    if not isinstance(calls, list) or not all(
        isinstance(call, dict) and isinstance(call.get("function"), dict) for call in calls
    ):
        raise BadRecord("got other tool_calls, allowed: a list of objects with a function")
    functions = [call["function"] for call in calls]
    functions = [{**each, "arguments": _parsed(each.get("arguments", {}))} for each in functions]
    pairs = zip(calls, functions, strict=True)
    return {**turn, "tool_calls": [{**call, "function": function} for call, function in pairs]}


def _parsed(value: Any) -> Any:
    """What a text of JSON says; anything else as it is."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def template_arguments(
    fields: Mapping[str, Any], arguments: Mapping[str, Any]
) -> Mapping[str, Any]:
    """The variables of the chat template for a record: its own tools, if it is a demonstration."""
    tools = fields.get(TOOLS) if TURNS in fields else None
    return {**arguments, TOOLS: tools} if isinstance(tools, list) and tools else arguments


@dataclass(slots=True, eq=False)
class ShownRow:
    """One training sequence: a prompt, what follows it, and which of that is learned."""

    prompt_ids: np.ndarray
    token_ids: np.ndarray
    learned: np.ndarray

    def continues(self, context_ids: np.ndarray) -> bool:
        """Whether a later turn's context begins with this row."""
        begun = np.concatenate([self.prompt_ids, self.token_ids])
        return np.array_equal(context_ids[: len(begun)], begun)

    def add(self, token_ids: np.ndarray, *, learned: bool) -> None:
        self.token_ids = np.concatenate([self.token_ids, token_ids])
        self.learned = np.concatenate([self.learned, np.full(len(token_ids), learned)])


def shown_rows(
    chat: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    turns: Sequence[Mapping[str, Any]],
    system_prompt: str = "",
    arguments: Mapping[str, Any] | None = None,
) -> list[ShownRow]:
    """The training sequences of a demonstration: one, unless the template rewrites earlier turns."""
    rows: list[ShownRow] = []
    conversation = [*messages, *turns]
    if system_prompt and not any(message["role"] == "system" for message in conversation):
        conversation.insert(0, {"role": "system", "content": system_prompt})
    for place, message in enumerate(conversation):
        if message["role"] != "assistant":
            continue
        context_ids = chat.encode(conversation[:place], arguments=arguments)
        if rows and rows[-1].continues(context_ids):
            row, known = rows[-1], len(rows[-1].prompt_ids) + len(rows[-1].token_ids)
            row.add(context_ids[known:], learned=False)
        else:
            row = ShownRow(context_ids, np.zeros(0, np.int32), np.zeros(0, np.bool_))
            rows.append(row)
        row.add(answer_ids(chat, conversation[: place + 1], arguments), learned=True)
    return rows


def answer_ids(
    chat: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    arguments: Mapping[str, Any] | None = None,
) -> np.ndarray:
    """The ids of the last message as an answer, up to the token that ends a response there.

    They are those that follow the prompt's: many tokenizers begin a text by itself with a space.
    """
    prompt, answer, ending = chat.render_answer(messages, arguments)
    given = chat.encode_rendered(prompt)

    def encode(text: str) -> np.ndarray:
        ids = chat.encode_rendered(prompt + text)
        follows = np.array_equal(ids[: len(given)], given)
        return ids[len(given) :] if follows else chat.encode_text(text)

    spelled, whole = encode(answer), encode(answer + ending)
    ends = np.flatnonzero(np.isin(whole, chat.eos_ids))[np.isin(spelled, chat.eos_ids).sum() :]
    if len(ends):
        return whole[: ends[0] + 1]
    return np.concatenate([spelled, np.array(chat.eos_ids[:1], dtype=np.int32)])
