"""Prompts and rollouts as compact bytes: the journal's own format, versioned.

A rollout is a fixed header, its arrays as raw little-endian bytes (int32 ids, float32 log-probs, a bit
per mask entry unless all are set), its rows if it has any, its version segments, and a small JSON tail
for the rest. The prompt is stored once per group, never per rollout.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import Any
from zlib import crc32

import numpy as np

from penstock.errors import JournalDamaged, RunError
from penstock.types import Prompt, Rollout, Row, Score, Status, VersionSegment, bytes_of

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
        arrays.append(_encode_rows(rollout.rows))
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


def _encode_rows(rows: Sequence[Row]) -> bytes:
    heads = [_ROW.pack(len(row.prompt_ids), row.length) for row in rows]
    prompts = [bytes_of(row.prompt_ids, _IDS) for row in rows]
    return b"".join((_COUNT.pack(len(rows)), *heads, *prompts))


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
    if flags & _PRUNED:
        ids, logprobs, mask = _no_arrays(tokens)
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


def _no_arrays(tokens: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What stands for the pruned arrays of a rollout: of its length, and not to be trained."""
    ids, logprobs = np.zeros(tokens, dtype=np.int32), np.full(tokens, np.nan, dtype=np.float32)
    return ids, logprobs, np.zeros(tokens, dtype=np.bool_)


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
