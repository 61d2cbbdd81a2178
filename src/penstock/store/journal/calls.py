"""The calls of agents in the journal: each model call before its answer leaves, each tool call twice.

A call belongs to one try of a rollout, which its seed names; a retry with another seed starts a tree of
its own. Ids, log-probs and versions are bytes with a checksum; messages are JSON text that SQL can read.
"""

from __future__ import annotations

import json
import sqlite3
import struct
from collections.abc import Iterable
from dataclasses import asdict, dataclass

import numpy as np

from penstock.errors import JournalDamaged, RunError
from penstock.store.journal.codec import (
    CALL_CHECK,
    GroupTable,
    call_key,
    check_sum,
    decode_choices,
    encode_choices,
    expression,
    is_intact,
    row_check,
    stored_text,
)
from penstock.types import ModelCall, VersionSegment

_HEADER = struct.Struct("<BHII")  # format, segments, context ids, sampled ids
_FORMAT = 1
_COLUMNS = "rollout_id, seed, number, parent, finish_reason, messages, answer, tools, data"


@dataclass(slots=True, frozen=True, kw_only=True)
class ToolResult:
    """What the journal knows of one tool call of an agent."""

    call_id: str
    name: str
    outcome: str | None  # done | failed | unknown; None: begun, and it may still run
    result: str | None  # the text that the agent got


@dataclass(slots=True, frozen=True)
class CallMade:
    """A model answered an agent."""

    at: float
    rollout_id: str
    seed: int
    call: ModelCall

    def write(self, tables: GroupTable) -> None:
        db = tables.db
        call = self.call
        row = (
            *(self.rollout_id, self.seed, call.number, call.parent, group_of(self.rollout_id)),
            *(self.at, call.finish_reason, len(call.context_ids), len(call.token_ids)),
            stored_text(json.dumps(call.messages, ensure_ascii=False)),
            stored_text(json.dumps(call.answer, ensure_ascii=False)),
            stored_text(call.tools) if call.parent is None else "",
        )
        header = _HEADER.pack(
            _FORMAT, len(call.segments), len(call.context_ids), len(call.token_ids)
        )
        body = b"".join(
            (
                header,
                call.context_ids.astype("<i4").tobytes(),
                call.token_ids.astype("<i4").tobytes(),
                call.logprobs.astype("<f4").tobytes(),
                *(struct.pack("<II", one.version, one.length) for one in call.segments),
                b"" if call.choices is None else encode_choices(call.choices),
            )
        )
        data = body + check_sum(body, None, call_key(self.rollout_id, self.seed, call.number))
        db.execute(
            f"INSERT INTO call_rows VALUES ({', '.join('?' * 14)})",
            (*row, data, row_check(*row, data[-4:])),
        )


@dataclass(slots=True, frozen=True)
class ToolBegun:
    """An agent is about to call a tool."""

    at: float
    rollout_id: str
    seed: int
    call_id: str
    name: str

    def write(self, tables: GroupTable) -> None:
        db = tables.db
        row = (
            *(self.rollout_id, self.seed, self.call_id, group_of(self.rollout_id)),
            *(stored_text(self.name), self.at, None, None, None),
        )
        db.execute(
            f"INSERT OR REPLACE INTO tool_rows VALUES ({', '.join('?' * 10)})",
            (*row, row_check(*row)),
        )


@dataclass(slots=True, frozen=True)
class ToolEnded:
    """A tool call ended: done with its result, failed with the reason, or unknown: its caller is gone."""

    at: float
    rollout_id: str
    seed: int
    call_id: str
    outcome: str  # done | failed | unknown
    result: str

    def write(self, tables: GroupTable) -> None:
        db = tables.db
        changes = {"ended_at": ":at", "outcome": ":outcome", "result": ":result"}
        sets = ", ".join(f"{column} = {value}" for column, value in changes.items())
        cursor = db.execute(
            f"UPDATE tool_rows SET {sets}, row_check = {expression('tool_rows', **changes)}"
            " WHERE rollout_id = :rollout_id AND seed = :seed AND call_id = :call_id",
            asdict(self) | {"result": stored_text(self.result)},
        )
        if cursor.rowcount != 1:
            raise RunError(
                f"journal: tool call {self.call_id} of {self.rollout_id} ends, but it was never begun"
            )


def prune_calls(db: sqlite3.Connection, group_id: str, *, keep_text: bool) -> None:
    """Remove the tokens of a group's calls, and their messages unless the text is kept."""
    kept = {"messages": "messages", "answer": "answer"}
    if not keep_text:
        kept = {"messages": "'[]'", "answer": "'{}'"}
    fixed = {**kept, "tools": "''", CALL_CHECK: "x''"}
    sets = ", ".join(f"{column} = {value}" for column, value in kept.items())
    check = expression("call_rows", **fixed)
    db.execute(
        f"UPDATE call_rows SET {sets}, tools = '', data = x'', row_check = {check} WHERE group_id = ?",
        (group_id,),
    )
    if not keep_text:
        check = expression("tool_rows", result="NULL")
        db.execute(
            f"UPDATE tool_rows SET result = NULL, row_check = {check} WHERE group_id = ?",
            (group_id,),
        )


def group_of(rollout_id: str) -> str:
    return rollout_id.rpartition(".")[0]


def read_calls(rows: Iterable[tuple]) -> dict[tuple[str, int], list[ModelCall]]:
    """Decode rows of `select_calls` into calls by (rollout, seed); raise for a damaged one."""
    found: dict[tuple[str, int], list[ModelCall]] = {}
    for rollout_id, seed, number, parent, finish, messages, answer, tools, data in rows:
        calls = found.setdefault((rollout_id, seed), [])
        if not data:
            continue  # pruned
        if not is_intact(data, None, call_key(rollout_id, seed, number)) or number != len(calls):
            raise JournalDamaged(
                f"journal: call {number} of rollout {rollout_id} is not what was written"
            )
        _, num_segments, context, sampled = _HEADER.unpack_from(data)
        ids = np.frombuffer(data, "<i4", context + sampled, _HEADER.size).astype(np.int32)
        at = _HEADER.size + 4 * (context + sampled)
        logprobs = np.frombuffer(data, "<f4", sampled, at).astype(np.float32)
        pairs = struct.unpack_from(f"<{2 * num_segments}I", data, at + 4 * sampled)
        end = at + 4 * sampled + 8 * num_segments
        is_last = end == len(data) - 4  # the checksum follows
        calls.append(
            ModelCall(
                number=number,
                parent=parent,
                context_ids=ids[:context],
                token_ids=ids[context:],
                logprobs=logprobs,
                segments=tuple(map(VersionSegment, pairs[::2], pairs[1::2])),
                finish_reason=finish,
                messages=tuple(json.loads(messages)),
                answer=json.loads(answer),
                tools=tools if parent is None else calls[parent].tools,
                choices=None if is_last else decode_choices(data, end)[0],
            )
        )
    return found


def select_calls(where: str) -> str:
    """The query whose rows `read_calls` takes."""
    return f"SELECT {_COLUMNS} FROM call_rows WHERE {where} ORDER BY rollout_id, seed, number"
