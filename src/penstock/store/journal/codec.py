"""Rollouts and prompts as compact bytes: the journal's own format, versioned.

A rollout is a fixed header, its arrays as raw little-endian bytes (int32 ids, float32 log-probs, a bit
per mask entry unless all are set), its rows if it has any, its version segments, and a small JSON tail
for the rest. A prompt is stored once, never with a rollout.
"""

from __future__ import annotations

import functools
import json
import struct
from collections.abc import Sequence
from math import isfinite
from typing import Any
from zlib import crc32

import numpy as np

from penstock.errors import JournalDamaged, RunError
from penstock.types import Prompt, Rollout, Row, Score, Status, VersionSegment

CODEC_VERSION = 1

_HEADER = struct.Struct("<BBHIIQdq")  # codec, flags, segments, tokens, tail bytes, seed, T, issued
_PROMPT = struct.Struct("<BHI")  # codec, 0, bytes of the JSON head
_CHECK = struct.Struct("<I")  # the checksum at the end of a payload
_SEGMENT = struct.Struct("<II")  # version, tokens
_ROW = struct.Struct("<II")  # prompt tokens, response tokens
_COUNT = struct.Struct("<I")
_ALL_TRAINED = 1  # flags
_KEYED = 2
_PRUNED = 4  # ids, log-probs, mask and rows were removed
_ROWS = 8  # an agent's rollout: the prompts and lengths of its rows are stored
_IDS, _LOGPROBS = np.dtype("<i4"), np.dtype("<f4")
_STATUSES = {status.value: status for status in Status}
_pack_header, _pack_segment, _pack_check = _HEADER.pack, _SEGMENT.pack, _CHECK.pack


def encode_rollout(rollout: Rollout, *, text: str | None = None, key: str = "") -> bytes:
    """Encode a rollout without its prompt; pass `text` if it is stored elsewhere.

    The checksum covers the text, wherever it is stored, and the key of the payload. A run encodes
    every rollout: what most of them lack costs one test here.
    """
    tail = _tail(rollout, text is None)
    ids, logprobs, mask = rollout.response_ids, rollout.logprobs, rollout.loss_mask.tobytes()
    segments, flags = rollout.segments, _KEYED if key else 0
    if ids.dtype is not _IDS:
        ids = ids.astype(_IDS)
    if logprobs.dtype is not _LOGPROBS:
        logprobs = logprobs.astype(_LOGPROBS)
    arrays = ids.tobytes() + logprobs.tobytes()
    if 0 in mask:
        arrays += np.packbits(rollout.loss_mask).tobytes()
    else:
        flags |= _ALL_TRAINED
    if rollout.rows:
        flags |= _ROWS
        arrays += _encode_rows(rollout.rows)
    if len(segments) == 1:
        (segment,) = segments
        runs = _pack_segment(segment.version, segment.length)
    else:
        runs = b"".join([_pack_segment(segment.version, segment.length) for segment in segments])
    head = _pack_header(
        CODEC_VERSION,
        flags,
        len(segments),
        len(mask),
        len(tail),
        rollout.seed,
        rollout.temperature,
        rollout.issued_version,
    )
    body = b"".join((head, arrays, runs, tail))
    crc = crc32(body, crc32(key.encode()) if key else 0)  # `check_sum`, without its call
    return body + _pack_check(crc32(text.encode(), crc) if text else crc)


def _encode_rows(rows: Sequence[Row]) -> bytes:
    if not rows:
        return b""
    heads = [_ROW.pack(len(row.prompt_ids), row.length) for row in rows]
    prompts = [_little(row.prompt_ids, _IDS) for row in rows]
    return b"".join((_COUNT.pack(len(rows)), *heads, *prompts))


def _decode_rows(data: bytes, at: int) -> tuple[tuple[Row, ...], int]:
    """Return the rows that stand at a place of a payload, and the place behind them."""
    (count,) = _COUNT.unpack_from(data, at)
    at += _COUNT.size
    heads = [_ROW.unpack_from(data, at + number * _ROW.size) for number in range(count)]
    at += count * _ROW.size
    rows = []
    for prompt_tokens, length in heads:
        rows.append(Row(np.frombuffer(data, "<i4", prompt_tokens, at).astype(np.int32), length))
        at += 4 * prompt_tokens
    return tuple(rows), at


def _little(array: np.ndarray, dtype: np.dtype) -> bytes:
    return (array if array.dtype is dtype else array.astype(dtype)).tobytes()


def decode_rollout(
    data: bytes, rollout_id: str, prompt: Prompt, *, text: str | None = None, key: str = ""
) -> Rollout:
    """Decode a rollout; pass `text` if it was stored elsewhere, `key` if it was stored under one."""
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
        text=tail.get("text", "") if text is None else text,
        score=None if score is None else Score(*score),
        error=tail.get("error", ""),
        extra=tail.get("extra", {}),
        issued_version=issued,
        prompt=prompt,
    )


def _no_arrays(tokens: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return what stands for the pruned arrays of a rollout: of its length, and not to be trained."""
    ids, logprobs = np.zeros(tokens, dtype=np.int32), np.full(tokens, np.nan, dtype=np.float32)
    return ids, logprobs, np.zeros(tokens, dtype=np.bool_)


def prune_payload(data: bytes, text: str, key: str, kept_text: str) -> bytes | None:
    """Return a payload without its arrays; None if it is damaged or was pruned before.

    Its checksum covers `kept_text` in place of `text`.
    """
    if not is_intact(data, text, key) or data[1] & _PRUNED:
        return None
    header = list(_HEADER.unpack_from(data))
    header[1] |= _PRUNED
    _, _, num_segments, _, tail_bytes, *_ = header
    rest = data[len(data) - _CHECK.size - tail_bytes - _SEGMENT.size * num_segments : -_CHECK.size]
    body = _HEADER.pack(*header) + rest
    return body + check_sum(body, kept_text, key if header[1] & _KEYED else "")


@functools.lru_cache(maxsize=256)
def _tail_start(status: str, finish: str) -> str:
    start = f'{{"status":"{status}"'
    return f'{start},"finish":{_quoted(finish)}' if finish else start


def _tail(rollout: Rollout, with_text: bool) -> bytes:
    """Return the JSON behind the arrays; put together by hand, as a run writes one for each rollout."""
    score, tail = rollout.score, _tail_start(rollout.status._value_, rollout.finish_reason)
    if with_text and rollout.text:
        tail += f',"text":{_quoted(rollout.text)}'
    if rollout.error or rollout.extra or rollout.min_tokens or rollout.earned:
        tail += _rare_fields(rollout)
    if score is not None:
        parts, note, value = "", '""', score.value
        number = repr(value) if type(value) is float and isfinite(value) else _encode(value)
        if score.parts:
            parts = ",".join([f"{_quoted(k)}:{_number(v)}" for k, v in score.parts.items()])
        if score.note:
            note = _quoted(score.note)
        form, answer = _VERDICTS[score.format_ok], _VERDICTS[score.answer_ok]
        tail = f'{tail},"score":[{number},{{{parts}}},{form},{answer},{note}]}}'
    else:
        tail += "}"
    return tail.encode() if tail.isascii() else tail.encode("utf-8", "surrogatepass")


def _rare_fields(rollout: Rollout) -> str:
    fields = ""
    if rollout.error:
        fields += f',"error":{_quoted(rollout.error)}'
    if rollout.extra:
        fields += f',"extra":{_encode(rollout.extra)}'
    if rollout.min_tokens:
        fields += f',"min_tokens":{rollout.min_tokens}'
    if rollout.earned:
        fields += f',"earned":{_encode(rollout.earned)}'
    return fields


def _number(value: float) -> str:
    return repr(value) if type(value) is float and isfinite(value) else _encode(value)


def encode_prompt(prompt: Prompt) -> bytes:
    head: dict[str, Any] = {"prompt_id": prompt.prompt_id, "messages": prompt.messages}
    if prompt.gt_answer is not None:
        head["gt_answer"] = prompt.gt_answer
    if prompt.test_cases is not None:
        head["test_cases"] = prompt.test_cases
    if prompt.extra:
        head["extra"] = prompt.extra
    text = _encode(head).encode("utf-8", "surrogatepass")
    ids = np.asarray(prompt.token_ids, dtype="<i4").tobytes()
    body = b"".join((_PROMPT.pack(CODEC_VERSION, 0, len(text)), text, ids))
    return body + check_sum(body)


def decode_prompt(stored: bytes) -> Prompt:
    if not is_intact(stored):
        raise JournalDamaged(f"journal: a prompt is not what was written: {stored[:60]!r}")
    data = stored[: -_CHECK.size]
    codec, _, size = _PROMPT.unpack_from(data)
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
    """Return the text as SQLite can store it: without lone surrogates."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def is_intact(data: bytes, text: str | None = None, key: str = "") -> bool:
    """Return whether a stored payload matches its checksum, which may cover `key`."""
    if not isinstance(data, bytes) or not isinstance(text, str | None) or len(data) < 2:
        return False  # damage can change the type of a value
    key = key if data[1] & _KEYED else ""
    return data[-_CHECK.size :] == check_sum(data[: -_CHECK.size], text, key)


def described(data: bytes) -> tuple:
    """Return the values that an intact payload repeats from the other columns of its row.

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
    """Return a number as SQLite would return it: -0.0 becomes 0.0, NaN becomes NULL."""
    return float(value) + 0.0 if value == value else None


def check_sum(body: bytes, text: str | None = None, key: str = "") -> bytes:
    """Return the checksum that finds a flipped byte in a payload, which SQLite would not notice."""
    crc = crc32(body, crc32(key.encode()) if key else 0)
    return _CHECK.pack(crc32(text.encode(), crc) if text else crc)


def _check_codec(codec: int) -> None:
    if codec != CODEC_VERSION:
        raise RunError(f"journal payload: got format {codec}, allowed: {CODEC_VERSION}")


_encoder = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=lambda v: _plain(v))


_encode, _quoted = _encoder.encode, json.encoder.encode_basestring
_VERDICTS = {None: "null", False: "false", True: "true"}


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise RunError(
        f"journal: got a {type(value).__name__} in a record's extra fields, "
        "allowed: what JSON can hold, and numpy arrays"
    )
