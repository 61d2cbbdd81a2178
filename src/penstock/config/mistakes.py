"""What is said of a mistake in a config: one line with the key, what was given and what is allowed.

A key that does not exist may be one that was removed, a word of another system, or misspelt; each has its
own answer.
"""

from __future__ import annotations

import csv
import difflib
import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

_KEY_GOT = re.compile(r"([\w.\[\]]+):? got ")
_PLAIN = {  # what pydantic says -> what a reader of TOML knows
    "a valid dictionary": "a table",
    "a valid list": "a list",
    "a valid number": "a number",
    "a valid integer": "a whole number",
    "a valid string": "a text",
    "a valid boolean": "true or false",
}
_PARAMETERS = {  # of settings, and of a word of TRL, whose parameter has another name
    "callbacks": "on_step",
    "model.path": "model",
    "algorithm.name": "algorithm",
    "tasks.NAME.rewards": "reward",
    "train.stop_when": "early_stop",
}


def explain(
    error: ValidationError, tree: type[BaseModel], *, place: str = "", of_a_run: bool = False
) -> str:
    """The first mistake in one line: the key, what was given, what is allowed in the tree.

    place: the key of the table that the tree is for; empty for the whole tree.
    of_a_run: the tree is that of a run, where words of other systems are known.
    """
    first = error.errors()[0]
    path = (part for part in first["loc"] if part != "[key]")  # pydantic marks a wrong key so
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    key = f"{place}.{''.join(parts).removeprefix('.')}".strip(".")
    words = allowed(first)
    if first["type"] == "extra_forbidden":
        name = re.sub(r"\[\d+\]", "", key)  # of a list, whichever of its tables
        for row in rows("removed"):
            if fnmatchcase(name, row["key"]):
                return f"{key}: this key was removed; {row['advice']}"
        if not place:
            value, valid = first["input"], list(valid_keys(tree))
            while isinstance(value, dict) and len(value) == 1:  # an unknown table with one key
                ((name, value),) = value.items()
                key = f"{key}.{name}"
            near = nearest_key(key, valid, with_foreign=of_a_run)
            hint = f"; did you mean {near}?" if near else ""
            words = "a key that `penstock config` lists" if of_a_run else ", ".join(valid)
            return f"unknown key {key!r}, allowed: {words}{hint}"
        words = f"the keys {', '.join(tree.model_fields)}"
    elif first["type"] == "value_error":
        message = first["msg"].removeprefix("Value error, ")
        if below := _KEY_GOT.match(message):  # of a check of the whole table: say its key first
            whole = f"{key}.{below[1]}".removeprefix(".")
            return f"{whole}: got {message[below.end() :]}"
        return f"{key}: {message}" if key else message
    if words == "a text" and type(first["input"]) in (int, float):
        words += f""" (in a shell: '{key}="{first["input"]}"')"""
    return f"{key}: got {first['input']!r}, allowed: {words}"


def valid_keys(tree: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every dotted key of the tree; a named table shows as `tasks.NAME.field`."""
    for name, field in tree.model_fields.items():
        yield f"{prefix}{name}"
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                outer = get_origin(field.annotation)
                middle = "[0]." if outer is list else ".NAME." if outer is dict else "."
                yield from valid_keys(kind, f"{prefix}{name}{middle}")


# ---- keys that do not exist


def nearest_key(key: str, valid: Sequence[str], *, with_foreign: bool) -> str:
    """The valid key that an unknown one probably means; empty if none is near."""
    last = key.rsplit(".", 1)[-1]
    same_name = [other for other in valid if other.rsplit(".", 1)[-1] == last]
    if with_foreign and not same_name and (ours := key_of_word(last.lower())):
        return ours
    near = difflib.get_close_matches(key, valid, n=1, cutoff=0.5) or same_name
    return near[0] if near else ""


def nearest_parameter(
    name: str, value: object, parameters: Sequence[str], tree: type[BaseModel]
) -> str:
    """The parameter or the setting that an unknown parameter probably means, as a question."""
    near = difflib.get_close_matches(name, parameters, n=1, cutoff=0.7)
    key = key_of_word(name.lower()).replace("tasks.train.", "tasks.NAME.")
    if name in _PARAMETERS:
        return f"; did you mean {_PARAMETERS[name]}?"
    if not key and near:
        return f"; did you mean {near[0]}?"
    key = key or nearest_key(name, list(valid_keys(tree)), with_foreign=True)
    parameter = _PARAMETERS.get(key, key.rpartition(".")[2])
    if parameter in parameters:
        return f"; did you mean {parameter}?"
    return f"; did you mean settings={{{key!r}: {value!r}}}?" if key else ""


def of_setting(error: Any, tree: type[BaseModel]) -> str:
    """What is said of an unknown option such as --lr that is a setting; empty: it is none.

    error: what the parser of the command line raised.
    """
    option = getattr(error, "option_name", "").lstrip("-").replace("-", "_")
    taken = {parameter.name for parameter in error.ctx.command.params} if error.ctx else set()
    if not option or taken.isdisjoint(("arguments", "overrides")):
        return ""
    key = nearest_key(option, list(valid_keys(tree)), with_foreign=True)
    return f"{error.message}; a setting is written {key}=VALUE" if key else ""


# ---- a mistake as pydantic reports it


def allowed(error: ErrorDetails) -> str:
    """What is allowed where the error is."""
    words = error["msg"].removeprefix("Input should be ")
    for theirs, ours in _PLAIN.items():
        if words.startswith(theirs):  # what follows says how it failed: the value is in the line
            return ours
    return words


# -- words of other systems ---------------------------------------------------------------------


SYSTEMS = ("trl", "verl", "openrlhf", "colossalai", "xtuner")
COMMON = "common"  # words that have no key of their own there, or that several systems use


def rows(system: str) -> list[dict[str, str]]:
    """The rows of a system's table, with the columns word, key, value and note."""
    text = (files(__package__) / "systems" / f"{system}.csv").read_text("utf-8")
    return list(csv.DictReader(text.splitlines()))


def key_of_word(word: str) -> str:
    """The key that means the same as a word of TRL, verl or OpenRLHF; empty if it is none."""
    return _keys().get(word, "")


@cache
def _keys() -> dict[str, str]:
    systems = ("openrlhf", "verl", "trl", COMMON)
    tables = [row for system in systems for row in reversed(rows(system))]
    return {
        row["word"].partition(" ")[0].rsplit(".", 1)[-1]: row["key"] for row in tables if row["key"]
    }
