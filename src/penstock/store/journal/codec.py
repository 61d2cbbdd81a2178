"""What the journal stores: prompts and rollouts as compact bytes, rows with checksums, the table of groups.

A rollout is a fixed header, its arrays as raw little-endian bytes (int32 ids, float32 log-probs, a bit
per mask entry unless all are set), its rows if it has any, its version segments, and a small JSON tail
for the rest. The prompt is stored once per group, never per rollout.

Every row has a checksum, as SQLite does not notice a flipped byte in a value: the writer computes it, a check
of the journal computes it again. A rollout's row needs none: its payload has a checksum that
covers text and key, and repeats the other columns.

Each move of a group says from which places it may start. The rows of unfinished groups stay in memory as
they were last written: the checksum of a moved row is computed from what was written, not from what the
file has by now, so damage stays visible.
"""

from __future__ import annotations

import json
import marshal
import sqlite3
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from zlib import compress, crc32, decompress

import numpy as np

from penstock.errors import JournalDamaged, RunError
from penstock.types import Choices, Prompt, Rollout, Row, Score, Status, VersionSegment, bytes_of

CODEC_VERSION = 1

_HEADER = struct.Struct("<BBHIIQdq")  # codec, flags, segments, tokens, tail bytes, seed, T, issued
_PROMPT = struct.Struct("<BI")  # codec, bytes of the JSON head
_CHECK = struct.Struct("<I")  # the checksum at the end of a payload
_SEGMENT = struct.Struct("<II")  # version, tokens
_ROW = struct.Struct("<II")  # prompt tokens, response tokens
_COUNT = struct.Struct("<I")
_ALL_TRAINED = 1  # flags
_PRUNED = 4  # ids, log-probs, mask and rows were removed
_ROWS = 8  # an agent's rollout: the prompts and lengths of its rows are stored
_CHOICES = 16  # what its engine chose from is stored
_TEACHER = 32  # the log-probs of a teacher behind a server are stored
_CHOSEN = struct.Struct("<IIIIB")  # passes, kept ids, their bytes, experts of a pass, bytes of one
_IDS, _LOGPROBS = np.dtype("<i4"), np.dtype("<f4")
_STATUSES = {status.value: status for status in Status}


def encode_rollout(rollout: Rollout, *, text: str, key: str) -> bytes:
    """Encode a rollout without its prompt and without `text`, which the journal stores beside it.

    The checksum covers the text and the key of the payload.
    """
    tail, flags = _tail(rollout), 0
    arrays = [bytes_of(rollout.response_ids, _IDS), bytes_of(rollout.logprobs, _LOGPROBS)]
    if 0 not in rollout.loss_mask.tobytes():  # faster than numpy's `all` by far
        flags |= _ALL_TRAINED
    else:
        arrays.append(np.packbits(rollout.loss_mask).tobytes())
    if rollout.rows:
        flags |= _ROWS
        arrays.append(_COUNT.pack(len(rollout.rows)))
        arrays += [_ROW.pack(len(row.prompt_ids), row.length) for row in rollout.rows]
        arrays += [bytes_of(row.prompt_ids, _IDS) for row in rollout.rows]
    if rollout.choices is not None:
        flags |= _CHOICES
        arrays.append(encode_choices(rollout.choices))
    if rollout.teacher_logprobs is not None:
        flags |= _TEACHER
        arrays.append(bytes_of(rollout.teacher_logprobs, _LOGPROBS))
    segments = [_SEGMENT.pack(segment.version, segment.length) for segment in rollout.segments]
    head = _HEADER.pack(
        CODEC_VERSION,
        flags,
        len(segments),
        len(rollout.response_ids),
        len(tail),
        rollout.seed,
        rollout.temperature,
        rollout.issued_version,
    )
    body = b"".join((head, *arrays, *segments, tail))
    return body + check_sum(body, text, key)


def _decode_rows(data: bytes, at: int) -> tuple[tuple[Row, ...], int]:
    """The rows that stand at a place of a payload, and the place behind them."""
    (count,) = _COUNT.unpack_from(data, at)
    at += _COUNT.size
    heads = [_ROW.unpack_from(data, at + number * _ROW.size) for number in range(count)]
    at += count * _ROW.size
    rows = []
    for prompt_tokens, length in heads:
        rows.append(Row(np.frombuffer(data, "<i4", prompt_tokens, at).astype(np.int32), length))
        at += 4 * prompt_tokens
    return tuple(rows), at


def encode_choices(choices: Choices) -> bytes:
    """Experts as they are; counts and gaps between ascending ids compressed, to about two bytes an id."""
    gaps = np.diff(choices.kept_ids, prepend=np.int32(0))
    numbers = np.concatenate([choices.num_kept, gaps]).astype("<i4")
    # the low bytes of all numbers, then the next ones, which are mostly 0
    planes = np.ascontiguousarray(numbers.view(np.uint8).reshape(-1, 4).T)
    kept, experts = compress(planes.tobytes(), 1), choices.experts
    size = len(choices), len(gaps), len(kept), experts.shape[1], experts.itemsize
    return _CHOSEN.pack(*size) + kept + experts.tobytes()


def decode_choices(data: bytes, at: int) -> tuple[Choices, int]:
    """The choices that stand at a place of a payload, and the place behind them."""
    passes, num_ids, size, width, item = _CHOSEN.unpack_from(data, at)
    at += _CHOSEN.size
    planes = np.frombuffer(decompress(data[at : at + size]), np.uint8).reshape(4, passes + num_ids)
    numbers = np.ascontiguousarray(planes.T).view("<i4")[:, 0].astype(np.int32)
    ids = np.cumsum(numbers[passes:], dtype=np.int32)
    at += size
    experts = np.frombuffer(data, f"<u{item}", passes * width, at).reshape(passes, width)
    return Choices(numbers[:passes], ids, experts), at + experts.nbytes


def decode_rollout(data: bytes, rollout_id: str, prompt: Prompt, *, text: str, key: str) -> Rollout:
    """Decode a rollout that was stored with `text`, under `key`."""
    if not is_intact(data, text, key):
        raise JournalDamaged(f"journal: rollout {rollout_id} is not what was written")
    codec, flags, num_segments, tokens, tail_bytes, seed, temperature, issued = _HEADER.unpack_from(
        data
    )
    _check_codec(codec)
    at = _HEADER.size
    rows: tuple[Row, ...] = ()
    choices = taught = None
    if flags & _PRUNED:  # of its length, and not to be trained
        ids, logprobs = np.zeros(tokens, np.int32), np.full(tokens, np.nan, np.float32)
        mask = np.zeros(tokens, np.bool_)
    else:
        ids = np.frombuffer(data, "<i4", tokens, at).astype(np.int32)
        logprobs = np.frombuffer(data, "<f4", tokens, at + 4 * tokens).astype(np.float32)
        at += 8 * tokens
        if flags & _ALL_TRAINED:
            mask = np.ones(tokens, dtype=np.bool_)
        else:
            packed = np.frombuffer(data, np.uint8, (tokens + 7) // 8, at)
            mask = np.unpackbits(packed, count=tokens).astype(np.bool_)
            at += len(packed)
        if flags & _ROWS:
            rows, at = _decode_rows(data, at)
        if flags & _CHOICES:
            choices, at = decode_choices(data, at)
        if flags & _TEACHER:
            taught = np.frombuffer(data, "<f4", tokens, at).astype(np.float32)
            at += taught.nbytes
    pairs = struct.unpack_from(f"<{2 * num_segments}I", data, at)
    at += 8 * num_segments
    tail = json.loads(data[at : at + tail_bytes])
    score = tail.get("score")
    return Rollout(
        rollout_id=rollout_id,
        prompt_ids=prompt.token_ids,
        seed=seed,
        response_ids=ids,
        logprobs=logprobs,
        loss_mask=mask,
        segments=tuple(map(VersionSegment, pairs[::2], pairs[1::2])),
        rows=rows,
        choices=choices,
        teacher_logprobs=taught,
        earned=tuple((tokens, before) for tokens, before in tail.get("earned", ())),
        temperature=temperature,
        min_tokens=tail.get("min_tokens", 0),
        status=_STATUSES[tail["status"]],
        finish_reason=tail.get("finish", ""),
        text=text,
        score=None if score is None else Score(*score),
        error=tail.get("error", ""),
        extra=tail.get("extra", {}),
        issued_version=issued,
        prompt=prompt,
    )


def prune_payload(data: bytes, text: str, key: str, kept_text: str) -> bytes | None:
    """A payload without its arrays; None if it is damaged or was pruned before.

    Its checksum covers `kept_text` in place of `text`.
    """
    if not is_intact(data, text, key) or data[1] & _PRUNED:
        return None
    header = list(_HEADER.unpack_from(data))
    header[1] |= _PRUNED
    _, _, num_segments, _, tail_bytes, *_ = header
    rest = data[len(data) - _CHECK.size - tail_bytes - _SEGMENT.size * num_segments : -_CHECK.size]
    body = _HEADER.pack(*header) + rest
    return body + check_sum(body, kept_text, key)


def _tail(rollout: Rollout) -> bytes:
    """The JSON behind the arrays: what most rollouts lack is not in it."""
    score = rollout.score
    tail: dict[str, Any] = {"status": rollout.status.value}
    if rollout.finish_reason:
        tail["finish"] = rollout.finish_reason
    if rollout.error or rollout.extra or rollout.min_tokens or rollout.earned:
        rare = ("error", "extra", "min_tokens", "earned")
        tail |= {name: value for name in rare if (value := getattr(rollout, name))}
    if score is not None:
        verdicts = (score.format_ok, score.answer_ok)
        tail["score"] = [score.value, score.parts, *verdicts, score.note]
    return _to_json(tail)


def encode_prompt(prompt: Prompt) -> bytes:
    head: dict[str, Any] = {"prompt_id": prompt.prompt_id, "messages": prompt.messages}
    if prompt.gt_answer is not None:
        head["gt_answer"] = prompt.gt_answer
    if prompt.test_cases is not None:
        head["test_cases"] = prompt.test_cases
    if prompt.extra:
        head["extra"] = prompt.extra
    text = _to_json(head)
    ids = np.asarray(prompt.token_ids, dtype="<i4").tobytes()
    body = b"".join((_PROMPT.pack(CODEC_VERSION, len(text)), text, ids))
    return body + check_sum(body)


def decode_prompt(stored: bytes) -> Prompt:
    if not is_intact(stored):
        raise JournalDamaged(f"journal: a prompt is not what was written: {stored[:60]!r}")
    data = stored[: -_CHECK.size]
    codec, size = _PROMPT.unpack_from(data)
    _check_codec(codec)
    at = _PROMPT.size
    head = json.loads(data[at : at + size])
    return Prompt(
        prompt_id=head["prompt_id"],
        messages=tuple(head["messages"]),
        token_ids=np.frombuffer(data, "<i4", -1, at + size).astype(np.int32),
        gt_answer=head.get("gt_answer"),
        test_cases=head.get("test_cases"),
        extra=head.get("extra", {}),
    )


def stored_text(text: str) -> str:
    """The text as SQLite can store it: without lone surrogates."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def readable(text: bytes) -> str:
    """Decode text so that damaged bytes can be compared and named instead of ending the read."""
    return text.decode("utf-8", "replace")


def is_intact(data: bytes, text: str | None = None, key: str = "") -> bool:
    """Whether a stored payload matches its checksum, which may cover `key`."""
    if not isinstance(data, bytes) or not isinstance(text, str | None) or len(data) < 2:
        return False  # damage can change the type of a value
    return data[-_CHECK.size :] == check_sum(data[: -_CHECK.size], text, key)


def described(data: bytes) -> tuple:
    """The values that an intact payload repeats from the other columns of its row.

    These are status, finish reason, tokens, oldest and newest version, temperature, reward, error.
    """
    _, _, num_segments, tokens, tail_bytes, _, temperature, _ = _HEADER.unpack_from(data)
    end = len(data) - _CHECK.size - tail_bytes
    pairs = struct.unpack_from(f"<{2 * num_segments}I", data, end - 8 * num_segments)
    tail = json.loads(data[end : end + tail_bytes])
    score = tail.get("score")
    return (
        tail["status"],
        tail.get("finish", ""),
        tokens,
        min(pairs[::2], default=None),
        max(pairs[::2], default=None),
        stored_number(temperature),
        None if score is None else stored_number(score[0]),
        stored_text(tail.get("error", "")),
    )


def stored_number(value: float) -> float | None:
    """A number as SQLite would return it: -0.0 becomes 0.0, NaN becomes NULL."""
    return float(value) + 0.0 if value == value else None


def check_sum(body: bytes, text: str | None = None, key: str = "") -> bytes:
    """The checksum that finds a flipped byte in a payload, which SQLite would not notice."""
    crc = crc32(body, crc32(key.encode()) if key else 0)
    return _CHECK.pack(crc32(text.encode(), crc) if text else crc)


def _check_codec(codec: int) -> None:
    if codec != CODEC_VERSION:
        raise RunError(f"journal payload: got format {codec}, allowed: {CODEC_VERSION}")


_encoder = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=lambda v: _plain(v))


def _to_json(value: Any) -> bytes:
    return _encoder.encode(value).encode("utf-8", "surrogatepass")


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise RunError(
        f"journal: got a {type(value).__name__} in a record's extra fields, "
        "allowed: what JSON can hold, and numpy arrays"
    )


# -- checksums of rows ---------------------------------------------------------------------------

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
    return crc32(marshal.dumps(values, 2))


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


# -- the table of groups -------------------------------------------------------------------------

_COLUMNS = CHECKED["group_rows"]
_PLACE, _STEP, _REASON = map(_COLUMNS.index, ("place", "step", "drop_reason"))
# the columns behind those of a draw
_AS_DRAWN = ("in_flight", "init", 0, *(None,) * (len(_COLUMNS) - _PLACE - 3))

MOST_KNOWN_PROMPTS = 2**16  # kept in memory, so that a prompt is not encoded at every draw

# The moves of a group: from which places each may start. A move from elsewhere is a fault.
_FROM = {
    "landed": ("in_flight",),  # completed, aborted, failed or refused
    "retried": ("in_flight", "buffered"),  # in flight: it failed, or the run was resumed
    "expired": ("buffered", "in_flight"),  # in flight: it was put back when the run was resumed
    "dropped": ("in_flight", "buffered"),
    "taken": ("buffered",),
}


def _update(columns: Sequence[str]) -> str:
    """The UPDATE that moves a group: parameters are the columns, the checksum and the id."""
    sets = ", ".join(f"{column} = ?" for column in (*columns, "row_check"))
    return f"UPDATE group_rows SET {sets} WHERE group_id = ?"


class ManyRows:
    """A statement for many rows: up to 64 at once.

    A statement costs more than a row. It also gives the interpreter lock away, and a busy event loop
    keeps the lock for a while before the writer's thread has it again.
    """

    def __init__(self, statement: str, num_columns: int) -> None:
        """statement: `{rows}` stands for the rows."""
        row = f"({', '.join(['?'] * num_columns)})"
        self._sizes = [
            (number * num_columns, statement.format(rows=", ".join([row] * number)))
            for number in (64, 8, 1)
        ]

    def write(self, db: sqlite3.Connection, values: Sequence[Any]) -> None:
        """Write rows; `values` are those of all of them, one row after another."""
        start = 0
        for size, statement in self._sizes:
            end = len(values) - (len(values) - start) % size
            if start < end:
                rows = [values[at : at + size] for at in range(start, end, size)]
                db.executemany(statement, rows)
            start = end


_DRAW = ManyRows(
    "INSERT INTO group_rows(group_id, task, cursor, prompt_id, drawn_at, place, row_check)"
    " VALUES {rows}",
    7,
)
_LAND = _update((*_COLUMNS[_PLACE:_STEP], *_COLUMNS[_REASON:]))
_MOVE = _update((*_COLUMNS[_PLACE : _PLACE + 3], "drop_reason"))
_TAKE = f"""{_update(("place", "step", "position"))} AND status = 'completed' AND num_rollouts <=
    (SELECT COUNT(*) FROM rollout_rows WHERE rollout_rows.group_id = group_rows.group_id)"""
_READ = f"SELECT {', '.join(_COLUMNS)} FROM group_rows WHERE group_id = ?"


class GroupTable:
    """Writes the rows of groups inside the writer's transaction."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self.db = db
        self._unfinished: dict[str, tuple] = {}  # group id -> its row, in the order of _COLUMNS
        self._known_prompts: set[tuple[str, str]] = set()

    def is_new_prompt(self, task: str, prompt_id: str) -> bool:
        """Whether a prompt must be written; True again for one that was forgotten."""
        if len(self._known_prompts) >= MOST_KNOWN_PROMPTS:
            self._known_prompts.clear()
        is_new = (task, prompt_id) not in self._known_prompts
        self._known_prompts.add((task, prompt_id))
        return is_new

    def draw(self, drawn: Iterable[tuple]) -> None:
        """Insert groups: (group id, task, cursor, prompt id, time) each."""
        written: list[Any] = []
        for values in drawn:
            row = self._unfinished[values[0]] = values + _AS_DRAWN
            written += (*values, row[_PLACE], row_check(*row))
        _DRAW.write(self.db, written)

    def land(self, landed: Iterable[tuple[str, tuple, tuple]]) -> None:
        """Move groups that came back: id, columns from place to landed_at, columns from drop_reason on."""
        rows = []
        for group_id, values, last in landed:
            before = self._pop("landed", group_id)
            row = before[:_PLACE] + values + before[_STEP:_REASON] + last
            if values[0] != "dropped":
                self._unfinished[group_id] = row
            rows.append((*values, *last, row_check(*row), group_id))
        self.db.executemany(_LAND, rows)

    def move(self, kind: str, group_id: str, values: tuple, drop_reason: str | None) -> None:
        """Move a group without a new payload: `values` are place, status and tries."""
        before = self._pop(kind, group_id)
        kept = before[_PLACE + len(values) : _REASON]
        row = (*before[:_PLACE], *values, *kept, drop_reason, *before[_REASON + 1 :])
        if values[0] != "dropped":
            self._unfinished[group_id] = row
        self.db.execute(_MOVE, (*values, drop_reason, row_check(*row), group_id))

    def take(self, step: int, group_ids: Sequence[str]) -> None:
        """Move the groups of a step's batch, in their order; each must be completed, with all its rollouts."""
        rows = []
        for position, group_id in enumerate(group_ids):
            row = self._pop("taken", group_id)
            kept = row[_PLACE + 1 : _STEP]
            row = (*row[:_PLACE], "taken", *kept, step, position, *row[_REASON:])
            rows.append(("taken", step, position, row_check(*row), group_id))
        if self.db.executemany(_TAKE, rows).rowcount != len(rows):
            raise RunError(
                f"journal: step {step} takes {', '.join(group_ids)}, allowed: completed groups with all "
                "of their rollouts"
            )

    def _pop(self, kind: str, group_id: str) -> tuple:
        """The group's row as it was last written, and forget it; raise unless such a move starts there."""
        row = self._unfinished.pop(group_id, None)
        row = row or self.db.execute(_READ, (group_id,)).fetchone()
        if row is None or row[_PLACE] not in _FROM[kind]:
            found = "a group that was never drawn" if row is None else row[_PLACE]
            allowed = " or ".join(_FROM[kind])
            raise RunError(f"journal: group {group_id} is {kind}: got {found}, allowed: {allowed}")
        return tuple(row)
