"""The base of every table of the config, and what is said of a mistake in one."""

from __future__ import annotations

from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import ErrorDetails

from penstock.config.unknown_keys import removed_key

_PLAIN = {  # what pydantic says -> what a reader of TOML knows
    "a valid dictionary": "a table",
    "a valid list": "a list",
    "a valid number": "a number",
    "a valid integer": "a whole number",
    "a valid string": "a text",
    "a valid boolean": "true or false",
}


class Section(BaseModel):
    """One table of the config: refuses unknown keys, takes each field's doc from the string below it."""

    model_config = ConfigDict(
        extra="forbid",
        use_attribute_docstrings=True,
        validate_default=True,
        frozen=True,
        allow_inf_nan=False,
    )

    @model_validator(mode="before")
    @classmethod
    def _take_no_switch_for_a_number(cls, given: Any) -> Any:
        for name, value in given.items() if isinstance(given, dict) else ():
            field = cls.model_fields.get(name)
            if isinstance(value, bool) and field is not None:
                kinds = (field.annotation, *get_args(field.annotation))
                if (int in kinds or float in kinds) and bool not in kinds:
                    raise ValueError(f"{name} got {value}, allowed: a number")
        return given


def key_of(error: ErrorDetails) -> str:
    """Return the dotted key that the error is about, such as `launch.producer_kinds[0].count`."""
    path = (
        part for part in error["loc"] if part != "[key]"
    )  # pydantic's mark of a key that is wrong
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return "".join(parts).removeprefix(".")


def allowed(error: ErrorDetails) -> str:
    """Return what is allowed where the error is."""
    words = error["msg"].removeprefix("Input should be ")
    for theirs, ours in _PLAIN.items():
        if words.startswith(theirs):  # what follows says how it failed: the value is in the line
            return ours
    return words


def first_mistake(error: ValidationError, table: type[BaseModel], place: str) -> str:
    """Return the first mistake in the table at `place`: its key, what was given, what is allowed."""
    first = error.errors()[0]
    if first["type"] == "value_error":
        return f"{place}.{first['msg'].removeprefix('Value error, ')}"
    key, said = f"{place}.{key_of(first)}", allowed(first)
    if first["type"] == "extra_forbidden":
        if answer := removed_key(key):
            return answer
        said = f"the keys {', '.join(table.model_fields)}"
    return f"{key} got {first['input']!r}, allowed: {said}"
