"""Read a config: a TOML file, then `key.sub=value` overrides; and write it back as TOML.

Returns the validated tree and the origin of every value. Each mistake is a `UserError` of one line: the
key, what was given, what is allowed, and the nearest valid key for a misspelt one.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from penstock.config import Config
from penstock.config.secrets import refuse_secrets
from penstock.config.section import allowed, key_of
from penstock.config.unknown_keys import nearest_key, removed_key
from penstock.errors import UserError

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")  # TOML takes none of them as they are
_KEY_GOT = re.compile(r"([\w.\[\]]+) got ")
DEMO_CONFIG = Path(__file__).parent / "demo" / "demo.toml"


@dataclass(slots=True, frozen=True)
class LoadedConfig:
    """A valid config and the origin of each value that is not a default."""

    config: Config
    origins: dict[str, str]  # dotted key -> "file NAME" | "command line"

    def origin(self, key: str) -> str:
        """Return where the value of a key came from."""
        parts = key.split(".")
        for length in range(len(parts), 0, -1):
            if found := self.origins.get(".".join(parts[:length])):
                return found
        below = [origin for other, origin in self.origins.items() if other.startswith(f"{key}.")]
        return below[0] if below else "default"

    def require_tasks(self) -> None:
        """Refuse a config file without tasks: it would train the demo's in silence."""
        if not any(key.split(".")[0] == "tasks" for key in self.origins):
            raise UserError(
                "tasks: got none, allowed: at least one [tasks.NAME] with its data and rewards; "
                "penstock init writes a config with one"
            )


def load_config(
    path: str | Path | None = None, overrides: Sequence[str] = (), *, bare: bool = False
) -> LoadedConfig:
    """Read and check a config; without a file, the demo's, or with `bare` the defaults alone."""
    source = DEMO_CONFIG if path is None else Path(path)
    tree = {} if bare else _read_toml(source)
    label = "built-in demo" if path is None else f"file {source}"
    origins = {key: label for key, _ in _leaves(tree)}
    for text in overrides:
        key, value = _parse_override(text)
        _put(tree, key, value)
        origins = {k: v for k, v in origins.items() if not k.startswith(f"{key}.")}
        origins[key] = "command line"
    refuse_secrets(tree)
    return LoadedConfig(config=validate(tree), origins=origins)


def with_overrides(config: Config, overrides: Sequence[str]) -> Config:
    """Return the config with `key.sub=value` settings laid over it."""
    tree = config.model_dump(mode="json")
    for text in overrides:
        _put(tree, *_parse_override(text))
    refuse_secrets(tree)
    return validate(tree)


def validate(tree: dict[str, Any]) -> Config:
    """Build the config, or raise a UserError that names the first mistake."""
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise UserError(explain(error)) from None


def to_toml(config: Config) -> str:
    """Return the resolved config as TOML, for the run folder; `listing.py` prints it for people."""
    return "\n".join(_toml_lines(config.model_dump(mode="json"), prefix="")) + "\n"


def _read_toml(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise UserError(f"config: got {str(path)!r}, allowed: a TOML file that exists")
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"config {path}: not valid TOML: {error}") from None


def as_override(key: str, value: Any) -> str:
    """Return `key.sub=value` with the value as TOML."""
    return f"{key}={toml_value(value)}"


def _parse_override(text: str) -> tuple[str, Any]:
    key, equals, raw = text.partition("=")
    if not equals or not key or not all(key.split(".")):
        raise UserError(f"override: got {text!r}, allowed: key.sub=value")
    if "[" in key:
        table = key.partition("[")[0]
        raise UserError(f"override: got {text!r}, allowed: the whole list, {table}=[...]")
    try:
        return key, tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        return key, raw  # a bare word is a string: model.path=my/model


def _put(tree: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    for depth, parent in enumerate(parents):
        tree = tree.setdefault(parent, {})
        if not isinstance(tree, dict):
            above = ".".join(parents[: depth + 1])
            raise UserError(
                f"{key}: got a key below {above}, allowed: {above} is a value, not a table"
            )
    tree[last] = value


def _leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def explain(error: ValidationError, tree: type[BaseModel] = Config) -> str:
    """Return the first mistake in one line: the key, what was given, what is allowed in the tree."""
    return _explain(error.errors()[0], tree)


def _explain(error: ErrorDetails, tree: type[BaseModel]) -> str:
    key = key_of(error)
    if error["type"] == "extra_forbidden":
        return _unknown_key(key, error["input"], tree)
    if error["type"] != "value_error":
        return f"{key}: got {error['input']!r}, allowed: {allowed(error)}"
    message = error["msg"].removeprefix("Value error, ")
    if below := _KEY_GOT.match(message):  # of a check of the whole table: say its key first
        place = f"{key}.{below[1]}".removeprefix(".")
        return f"{place}: {message[below.end(1) + 1 :]}"
    return f"{key}: {message}" if key else message


def _unknown_key(key: str, value: Any, tree: type[BaseModel]) -> str:
    if tree is Config and (answer := removed_key(key)):
        return answer
    valid = list(valid_keys(tree))
    if isinstance(value, dict) and len(value) == 1:  # a table that is not known, with one key
        key = f"{key}.{next(_leaves(value))[0]}"
    near = nearest_key(key, valid, with_foreign=tree is Config)
    hint = f"; did you mean {near}?" if near else ""
    words = "a key that `penstock config` lists" if tree is Config else ", ".join(valid)
    return f"unknown key {key!r}, allowed: {words}{hint}"


def valid_keys(tree: type[BaseModel] = Config) -> Iterator[str]:
    """Yield every dotted key of the tree; a named table shows as `tasks.NAME.field`."""
    yield from _model_keys(tree, "")


def _model_keys(model: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}"
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                outer = get_origin(field.annotation)
                middle = "[0]." if outer is list else ".NAME." if outer is dict else "."
                yield from _model_keys(kind, f"{prefix}{name}{middle}")


def _toml_lines(table: dict[str, Any], prefix: str) -> Iterator[str]:
    for key, value in table.items():
        if not isinstance(value, dict) and value is not None:
            yield f"{toml_key(key)} = {toml_value(value)}"
    for key, value in table.items():
        if isinstance(value, dict):
            name = f"{prefix}{toml_key(key)}"
            yield ""
            yield f"[{name}]"
            yield from _toml_lines(value, f"{name}.")


@lru_cache(maxsize=4096)
def toml_key(key: str) -> str:
    """Return a key as TOML writes it: bare if it may be."""
    bare = key.replace("-", "").replace("_", "")
    return key if bare.isalnum() and bare.isascii() else toml_value(key)


def toml_value(value: Any) -> str:
    """Return a value as TOML, on one line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        for raw, code in (("\n", "\\n"), ("\t", "\\t"), ("\r", "\\r")):
            escaped = escaped.replace(raw, code)
        return '"' + _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", escaped) + '"'
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    if isinstance(value, Mapping):
        pairs = (f"{toml_key(k)} = {toml_value(v)}" for k, v in value.items() if v is not None)
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, Path):
        return toml_value(str(value))
    raise UserError(
        f"settings: got {value!r}, allowed: a text, a number, a boolean, or a list or dict of these"
    )
