"""The tree of a rollout's model calls: where a request belongs, and which rows training takes.

A call continues its parent's tokens, so a path from a root to a leaf is one token sequence that an engine
was really given. Training takes one row per leaf; a sampled token is trained in the first row that has
it. A call whose answer the agent never got is in no row. Knows messages and ids; renders nothing and samples nothing.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import numpy as np

from penstock.errors import UserError
from penstock.types import Choices, ModelCall, Rollout, Row, VersionSegment, extend_segments

Message = Mapping[str, Any]
_THINK = ("<think>", "</think>")
ADDED_ROLES = frozenset({"tool", "user", "system", "developer"})  # what may follow an answer
_TOLD_BY = frozenset({"user", "system", "developer"})  # roles whose words an agent writes


@dataclass(slots=True, frozen=True)
class Place:
    """Where a request belongs: the call it continues, and the messages it adds."""

    parent: ModelCall | None
    messages: tuple[Message, ...]  # without a parent, the whole conversation


@dataclass(slots=True)
class CallTree:
    """The calls of one rollout, in the order in which they were asked for."""

    calls: list[ModelCall] = field(default_factory=list)

    def path(self, call: ModelCall | None) -> list[ModelCall]:
        """The calls from the root to this one."""
        calls = []
        while call is not None:
            calls.append(call)
            call = None if call.parent is None else self.calls[call.parent]
        return calls[::-1]

    def ids(self, call: ModelCall | None) -> np.ndarray:
        """Every token up to the end of the call, as an engine was given or sampled it."""
        parts = [
            part
            for ancestor in self.path(call)
            for part in (ancestor.context_ids, ancestor.token_ids)
        ]
        return np.concatenate([np.zeros(0, dtype=np.int32), *parts])

    def conversation(self, call: ModelCall | None) -> list[Message]:
        """The messages up to the call's answer."""
        return [m for ancestor in self.path(call) for m in (*ancestor.messages, ancestor.answer)]

    def place(self, messages: Sequence[Message], tools: str) -> Place:
        """The deepest call that the conversation continues, with the messages behind its answer.

        A call that was cut by length, or is followed by anything but tool, user and system messages,
        is not continued: the conversation becomes a root of its own.
        """
        best = max(self._matches(messages, tools, None, 0), key=itemgetter(0), default=None)
        if best is not None:
            length, call = best
            added = tuple(messages[length:])
            is_extended = added and all(message.get("role") in ADDED_ROLES for message in added)
            if is_extended and call.finish_reason == "stop":
                return Place(call, added)
        return Place(None, tuple(messages))

    def _matches(
        self, messages: Sequence[Message], tools: str, parent: int | None, start: int
    ) -> Iterator[tuple[int, ModelCall]]:
        """Yield (messages that it covers, call) for every call whose conversation is a prefix."""
        for call in self.calls:
            if call.parent != parent or call.tools != tools:
                continue
            end = start + len(call.messages)
            if end >= len(messages) or not said_again(call.answer, messages[end]):
                continue
            if all(map(same_message, call.messages, messages[start:end])):
                yield end + 1, call
                yield from self._matches(messages, tools, call.number, end + 1)

    def leaves(self, unheard: Collection[int] = ()) -> list[ModelCall]:
        """The calls that no other call continues, as if there were no `unheard` ones."""
        calls = [call for call in self.calls if call.number not in unheard]
        parents = {call.parent for call in calls}
        return [call for call in calls if call.number not in parents]

    def unheard(self, heard: Collection[int]) -> list[int]:
        """The calls whose answer the agent did not get, and from which no call follows that it got."""
        on_paths = {
            ancestor.number
            for call in self.calls
            if call.number in heard
            for ancestor in self.path(call)
        }
        return [call.number for call in self.calls if call.number not in on_paths]

    def fill(
        self,
        rollout: Rollout,
        earned: Mapping[int, float] | None = None,
        unheard: Collection[int] = (),
    ) -> None:
        """Give the rollout the rows of this tree: ids, log-probs, mask and versions.

        `earned`: by call, the reward that the rollout had before it; a call without one had none.
        `unheard`: calls that belong to no row.
        """
        trained: set[int] = set()
        rows, ids, logprobs, masks, before, choices = [], [], [], [], [], []
        segments: tuple[VersionSegment, ...] = ()
        for leaf in self.leaves(unheard):
            root, *others = self.path(leaf)
            length = len(root.token_ids) + sum(
                len(call.context_ids) + len(call.token_ids) for call in others
            )
            rows.append(Row(root.context_ids, length))
            for call in (root, *others):
                observed = 0 if call is root else len(call.context_ids)
                if observed:
                    version = call.segments[0].version if call.segments else 0
                    segments = extend_segments(segments, version, observed)
                    ids.append(call.context_ids)
                for segment in call.segments:
                    segments = extend_segments(segments, segment.version, segment.length)
                ids.append(call.token_ids)
                logprobs += [np.zeros(observed, dtype=np.float32), call.logprobs]
                context = len(call.context_ids) - (call is root)
                choices.append((call.choices, context + len(call.token_ids)))
                is_new = call.number not in trained
                masks += [np.zeros(observed, dtype=bool), np.full(len(call.token_ids), is_new)]
                trained.add(call.number)
                before.append(
                    (observed + len(call.token_ids), (earned or {}).get(call.number, 0.0))
                )
        rollout.earned = tuple(before) if any(value for _, value in before) else ()
        rollout.rows = tuple(rows)
        rollout.response_ids = _joined(ids, np.int32)
        rollout.logprobs = _joined(logprobs, np.float32)
        rollout.loss_mask = _joined(masks, np.bool_)
        rollout.segments = segments
        rollout.choices = Choices.join(choices)
        rollout.check()


def _joined(parts: Sequence[np.ndarray], dtype: Any) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype=dtype), *parts]).astype(dtype, copy=False)


# -- messages ------------------------------------------------------------------------------------


def text_of(message: Message) -> str:
    """The text of a message, whose content may be a string, a list of parts, or absent.

    Raise UserError for content that the policy would not see, such as an image that a user sends; an image among
    the results of a tool is left out.
    """
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is not None and not isinstance(content, list | tuple):
        raise UserError(
            f"messages: got the content {content!r:.100}, allowed: text, or a list of parts"
        )
    return "".join(_text_of_part(part, message.get("role")) for part in content or ())


def _text_of_part(part: Any, role: Any) -> str:
    if isinstance(part, str):
        return part
    text = part.get("text") if isinstance(part, Mapping) else None
    if text is None and (role in _TOLD_BY or not isinstance(part, Mapping)):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        raise UserError(f"messages: got a part of type {kind!r}, allowed: parts with text")
    return str(text or "")


def arguments_of(call: Mapping[str, Any]) -> Any:
    """The parsed arguments of a tool call; text that is no JSON stays text."""
    arguments = call.get("function", {}).get("arguments", "")
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


def same_message(mine: Message, other: Message) -> bool:
    """Whether two messages of a request say the same."""
    if mine.get("role") != other.get("role"):
        return False
    if mine.get("role") == "assistant":  # history that the agent brought along
        return said_again(mine, other)
    return (text_of(mine), mine.get("tool_call_id")) == (text_of(other), other.get("tool_call_id"))


def said_again(answer: Message, message: Message) -> bool:
    """Whether a request repeats an answer; agents re-space it and drop its reasoning.

    Tool calls are compared by id, name and parsed arguments, texts without the space around them.
    """
    if message.get("role") != "assistant":
        return False
    reasoning = str(message.get("reasoning_content") or "").strip()
    if reasoning and reasoning != str(answer.get("reasoning_content") or "").strip():
        return False
    if _calls(answer) != _calls(message):
        return False
    text = text_of(message).strip()
    if text.startswith(_THINK[0]):  # some put the reasoning back into the text
        thought, end, rest = text.removeprefix(_THINK[0]).partition(_THINK[1])
        if end and thought.strip() == str(answer.get("reasoning_content") or "").strip():
            text = rest.strip()
    return text == text_of(answer).strip() or (not text and bool(_calls(answer)))


def _calls(message: Message) -> list[tuple[Any, ...]]:
    calls = message.get("tool_calls") or ()
    return [(call.get("id"), call["function"].get("name"), arguments_of(call)) for call in calls]
