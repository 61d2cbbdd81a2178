"""The protobuf messages of the protocol: a table of their fields, and a codec that reads it.

Messages are dicts by field name. Unknown fields are skipped, fields that are not there are absent; numbers and
bytes that do not fit the table raise a UserError. Arrays travel as little-endian bytes, as the machines here have them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from penstock.errors import UserError

Message = dict[str, Any]

# number -> "name kind"; kinds: str, bytes, int, bool, double, or a message; * repeated, {} a map from strings
_TABLE: dict[str, dict[int, str]] = {
    "ForwardBackwardRequest": {
        1: "model_id str",
        2: "seq_id int",
        3: "data Datum*",
        4: "loss_fn str",
        5: "loss_fn_config double{}",
        6: "forward_only bool",
        7: "loss_fn_config_v2 LossConfigValue{}",
    },
    "LossConfigValue": {1: "number double", 2: "text str"},
    "Datum": {1: "model_input Chunk*", 2: "loss_fn_inputs Tensor{}"},
    "Chunk": {1: "encoded_text EncodedText", 2: "image Other", 3: "dmel Other"},
    "EncodedText": {1: "tokens bytes"},
    "Other": {},
    "Tensor": {1: "dense bytes", 2: "sparse_csr Csr", 3: "dtype int", 4: "shape int*"},
    "Csr": {1: "values bytes", 2: "crow_indices bytes", 3: "col_indices bytes"},
    "ForwardBackwardOutput": {
        1: "loss_fn_output_type str",
        2: "loss_fn_outputs ArrayRecord*",
        3: "metrics double{}",
    },
    "ArrayRecord": {1: "type_tag str", 2: "fields BatchedTensor{}", 3: "num_datums int"},
    "BatchedTensor": {
        1: "data bytes",
        2: "offsets bytes",
        3: "dtype int",
        4: "trailing_shape int*",
    },
    "SampleResponse": {
        1: "sequences SampledSequence*",
        2: "prompt_logprobs bytes",
        3: "topk_prompt_logprobs TopkLogprobs",
        5: "target_prompt_logprobs Tensor",
    },
    "SampledSequence": {
        1: "stop_reason int",
        2: "tokens bytes",
        3: "logprobs bytes",
        4: "topk_sampled_logprobs TopkLogprobs",
    },
    "TopkLogprobs": {1: "token_ids bytes", 2: "logprobs bytes", 3: "k int", 4: "length int"},
}
FLOAT32, INT64, INT32 = 1, 2, 3  # of a tensor's dtype
_VARINT, _DOUBLE, _LENGTH, _FLOAT = 0, 1, 2, 5  # how a field is written
_SCALARS = {"int": _VARINT, "bool": _VARINT, "double": _DOUBLE}


def _fields() -> dict[str, dict[int, tuple[str, str, str]]]:
    """Message -> number -> (name, kind, shape), from the table; a map is a message of key and value."""
    fields: dict[str, dict[int, tuple[str, str, str]]] = {message: {} for message in _TABLE}
    for message, rows in _TABLE.items():
        for number, row in rows.items():
            name, kind = row.split(" ")
            shape = "*" if kind.endswith("*") else "{}" if kind.endswith("{}") else ""
            if shape == "{}":
                fields[kind] = {1: ("key", "str", ""), 2: ("value", kind.removesuffix("{}"), "")}
            fields[message][number] = (name, kind.removesuffix("*"), shape)
    return fields


_FIELDS = _fields()


def decode(message: str, data: bytes | memoryview) -> Message:
    """The fields of a message."""
    with _no_message(message):
        return _decode(message, memoryview(data))


@contextmanager
def _no_message(message: str) -> Iterator[None]:
    """Say that bytes are no message of this kind where they do not fit the table."""
    try:
        yield
    except (IndexError, struct.error, UnicodeDecodeError, ValueError, TypeError) as error:
        raise UserError(f"body: got bytes that are no {message} ({error})") from None


def _decode(message: str, data: memoryview) -> Message:
    fields, result = _FIELDS[message], Message()
    for number, form, raw in _parts(data):
        name, kind, shape = fields.get(number, ("", "", ""))
        if not name:
            continue
        if kind == "int" and form == _LENGTH:  # packed
            values = list(_varints(raw))
            result.setdefault(name, []).extend(values) if shape else None
            continue
        if form != _SCALARS.get(kind, _LENGTH):
            raise ValueError(f"field {name} has another type")
        value = _value(kind, raw)
        if shape == "*":
            result.setdefault(name, []).append(value)
        elif shape == "{}":
            default = Message() if kind.removesuffix("{}") in _FIELDS else 0.0
            result.setdefault(name, {})[value.get("key", "")] = value.get("value", default)
        else:
            result[name] = value
    return result


def _parts(data: memoryview) -> Iterator[tuple[int, int, Any]]:
    """Yield (field number, form, number or bytes)."""
    place = 0
    while place < len(data):
        tag, place = _varint(data, place)
        form = tag & 7
        value: Any
        if form == _VARINT:
            value, place = _varint(data, place)
        elif form in (_DOUBLE, _FLOAT, _LENGTH):
            size = 8 if form == _DOUBLE else 4
            if form == _LENGTH:
                size, place = _varint(data, place)
            value, place = data[place : place + size], place + size
            if place > len(data):
                raise ValueError("it is cut off")
        else:
            raise ValueError(f"form {form} of a field")
        yield tag >> 3, form, value


def _value(kind: str, raw: Any) -> Any:
    if kind == "int":
        return raw - (1 << 64) if raw >> 63 else raw
    if kind == "bool":
        return bool(raw)
    if kind == "double":
        return struct.unpack("<d", raw)[0]
    if kind in ("str", "bytes"):
        return bytes(raw) if kind == "bytes" else bytes(raw).decode()
    return _decode(kind, raw)


def _varint(data: memoryview, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        octet = data[place]
        value, place, shift = value | (octet & 0x7F) << shift, place + 1, shift + 7
        if octet < 0x80:
            return value & (1 << 64) - 1, place
        if shift > 63:
            raise ValueError("a number has more than 64 bits")


def _varints(data: memoryview) -> Iterator[int]:
    place = 0
    while place < len(data):
        value, place = _varint(data, place)
        yield value - (1 << 64) if value >> 63 else value


def encode(message: str, values: Mapping[str, Any]) -> bytes:
    """The bytes of a message; fields without a value are left out."""
    out = bytearray()
    for number, (name, kind, shape) in _FIELDS[message].items():
        if (value := values.get(name)) is None:
            continue
        if shape == "*" and kind == "int":
            _write(out, number, b"".join(_number(item) for item in value), _LENGTH)
        elif shape == "{}":
            for key, item in value.items():
                _write(out, number, encode(kind, {"key": key, "value": item}), _LENGTH)
        else:
            for item in value if shape else (value,):
                _write(out, number, _octets(kind, item), _SCALARS.get(kind, _LENGTH))
    return bytes(out)


def _octets(kind: str, value: Any) -> bytes:
    if kind in ("int", "bool"):
        return _number(int(value))
    if kind == "double":
        return struct.pack("<d", value)
    if kind in ("str", "bytes"):
        return value.encode() if kind == "str" else bytes(value)
    return encode(kind, value)


def _write(out: bytearray, number: int, octets: bytes, form: int) -> None:
    out += _number(number << 3 | form)
    if form == _LENGTH:
        out += _number(len(octets))
    out += octets


def _number(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def decode_head(message: str, data: bytes) -> Message:
    """The scalar fields of a message; what is wrong inside its others is found when it is decoded whole."""
    with _no_message(message):
        fields = _FIELDS[message]
        return {
            fields[number][0]: _value(fields[number][1], raw)
            for number, form, raw in _parts(memoryview(data))
            if number in fields
            and (kind := fields[number][1]) in ("str", "int", "bool")
            and form == _SCALARS.get(kind, _LENGTH)  # the bytes of a number would be so many zeros
        }
