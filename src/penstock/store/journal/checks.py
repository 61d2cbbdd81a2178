"""A checksum for every row of a journal: SQLite does not notice a flipped byte in a value.

The writer computes it; a check of the journal computes it again. A rollout's row needs none: its
payload (`codec.py`) has a checksum that covers text and key, and repeats the other columns.
"""

from __future__ import annotations

import marshal
import sqlite3
import zlib
from collections.abc import Iterator
from typing import Any

from penstock.store.journal.codec import described, is_intact

ROW_CHECK = "row_check_of"  # the function's name in SQL

# The checksum of a call's payload; SQLite's substr of an empty one, after pruning, is NULL.
CALL_CHECK = "COALESCE(substr(data, -4), x'')"

CHECKED = {
    "prompt_rows": ("task", "prompt_id", "substr(data, -4)"),
    "group_rows": (
        *("group_id", "task", "cursor", "prompt_id", "drawn_at", "place", "status", "tries"),
        *("oldest_version", "num_tokens", "reward", "landed_at", "step", "position"),
        *("drop_reason", "error", "num_rollouts"),
    ),
    "step_rows": (
        *("step", "begun_at", "group_ids", "committed_at", "policy_version", "digest", "metrics"),
        *("trained", "num_events", "chain", "pruned_at"),
    ),
    "event_rows": (
        *("at", "group_id", "kind", "status", "tries", "reason", "num_tokens", "reward"),
        "oldest_version",
    ),
    "weight_rows": ("at", "kind", "engine", "version", "digest"),
    "identity_rows": ("name", "value"),
    "call_rows": (
        *("rollout_id", "seed", "number", "parent", "group_id", "at", "finish_reason"),
        *("num_context", "num_tokens", "messages", "answer", "tools", CALL_CHECK),
    ),
    "tool_rows": (
        *("rollout_id", "seed", "call_id", "group_id", "name", "begun_at", "ended_at"),
        *("outcome", "result"),
    ),
}
_NAMES = {
    "prompt_rows": "'prompt ' || prompt_id",
    "group_rows": "'group ' || group_id",
    "step_rows": "'step ' || step",
    "event_rows": "'event ' || number || ' of group ' || group_id",
    "weight_rows": "'weights ' || version || ', record ' || number",
    "identity_rows": "'identity ' || name",
    "call_rows": "'call ' || number || ' of rollout ' || rollout_id",
    "tool_rows": "'tool call ' || call_id || ' of rollout ' || rollout_id",
}


def row_check(*values: Any) -> int:
    """The checksum of a row's values as SQLite returns them: CRC-32 of their marshalled tuple.

    Marshal's format 2 depends on the values alone and is the fastest encoding (a test pins it).
    """
    return zlib.crc32(marshal.dumps(values, 2))


def rollout_key(group_id: str, number: int, rollout_id: str) -> str:
    """The key under which a rollout's payload is stored."""
    return f"{group_id}|{number}|{rollout_id}"


def expression(table: str, **changes: str) -> str:
    """The SQL for a row's checksum; `changes` replaces columns by other expressions."""
    values = (changes.get(column, column) for column in CHECKED[table])
    return f"{ROW_CHECK}({', '.join(values)})"


def damaged_rows(database: sqlite3.Connection, table: str) -> Iterator[str]:
    """Yield the names of rows that are not what was written; reads the whole table."""
    columns = ", ".join(CHECKED[table])
    query = (
        f"SELECT COALESCE({_NAMES[table]}, 'a row of {table}'), row_check, {columns} FROM {table}"
    )
    for name, check, *values in database.execute(query):
        if check != row_check(*values):
            yield str(name)


def damaged_payloads(database: sqlite3.Connection) -> Iterator[str]:
    """Yield the names of rollouts and prompts that are not what was written; reads all of them."""
    columns = "status, finish_reason, num_tokens, oldest_version, newest_version, temperature"
    query = f"SELECT group_id, number, rollout_id, data, text, {columns}, reward, error FROM rollout_rows"
    for group_id, number, rollout_id, data, text, *rest in database.execute(query):
        whole = is_intact(data, text, rollout_key(group_id, number, rollout_id))
        if not whole or tuple(rest) != described(data):
            yield f"rollout {rollout_id}"
    for prompt_id, data in database.execute("SELECT prompt_id, data FROM prompt_rows"):
        if not is_intact(data):
            yield f"prompt {prompt_id}"


def damaged_calls(database: sqlite3.Connection) -> Iterator[str]:
    """Yield the names of agents' calls whose payload is not what was written; pruned ones have none."""
    query = "SELECT rollout_id, seed, number, data FROM call_rows WHERE length(data)"
    for rollout_id, seed, number, data in database.execute(query):
        if not is_intact(data, None, call_key(rollout_id, seed, number)):
            yield f"call {number} of rollout {rollout_id}"


def call_key(rollout_id: str, seed: int, number: int) -> str:
    """The key under which the payload of an agent's call is stored."""
    return f"{rollout_id}|{seed}|{number}"
