"""A config as text: read a TOML file and `key.sub=value` overrides, write TOML, list every setting.

Returns the validated tree and the origin of every value. Each mistake is a `UserError` of one line: the
key, what was given, what is allowed, and the nearest valid key for a misspelt one.
"""

from __future__ import annotations

import re
import tomllib
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, time
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from penstock.config import Config
from penstock.config.demo import context_length
from penstock.config.mistakes import explain
from penstock.config.plugins import beside, models_of_runs
from penstock.config.secrets import refuse_secrets
from penstock.config.tree import leaves
from penstock.errors import UserError

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")  # TOML takes none of them as they are
_LENGTHS = {"train.steps": "episodes", "train.episodes": "steps"}  # a run has one of them
_LOWERED = "lowered"
_DEEPEST = 40  # levels of tables and lists
DEMO_CONFIG = Path(__file__).parent / "demo" / "demo.toml"


@dataclass(slots=True, frozen=True)
class LoadedConfig:
    """A valid config and the origin of each value that is not a default."""

    config: Config
    origins: dict[str, str]  # dotted key -> "file NAME" | "command line" | "lowered: WHY"
    missing: dict[str, str] = field(default_factory=dict)  # key -> what is said of a file not there

    def origin(self, key: str) -> str:
        """Where the value of a key came from."""
        above = key
        while above:
            if origin := self.origins.get(above):
                return origin
            above = above.rpartition(".")[0]
        below = (origin for other, origin in self.origins.items() if other.startswith(f"{key}."))
        return next(below, "default")

    @property
    def notes(self) -> list[str]:
        """A line for each default that was lowered."""
        tree = dict(leaves(self.config.model_dump()))
        lowered = {key: text for key, text in self.origins.items() if text.startswith(_LOWERED)}
        return [f"{key} = {tree[key]}, {text}" for key, text in lowered.items()]

    def require_files(self) -> None:
        """Refuse a config file that names a file which is neither beside it nor in the shell's folder."""
        for key, text in self.missing.items():
            raise UserError(f"{key}: {text}")

    def require_tasks(self) -> None:
        """Refuse a config file without tasks, or a task without data: it would train the demo's in silence."""
        tables = {"tasks": list(self.config.tasks), "eval.tasks": list(self.config.eval.tasks)}
        for key in (f"{table}.{name}.data" for table, tasks in tables.items() for name in tasks):
            if self.origin(key) == "default":
                raise UserError(
                    f"{key}: got nothing, allowed: a file, a folder, a hub name or a built-in task; "
                    "penstock init writes a config with one"
                )


def load_config(
    path: str | Path | None = None, overrides: Sequence[str] = (), *, bare: bool = False
) -> LoadedConfig:
    """Read and check a config; without a file, the demo's, or with `bare` the defaults alone."""
    source = DEMO_CONFIG if path is None else Path(path)
    tree = {} if bare else _read_toml(source)
    missing: dict[str, str] = {}
    if path is not None and not bare:
        tree, missing = beside(tree, source.parent)
    label = "built-in demo" if path is None else f"file {source}"
    origins = {key: label for key, _ in leaves(tree)} if tree else {}
    for key in _override(tree, overrides):
        origins = {k: v for k, v in origins.items() if not k.startswith(f"{key}.")}
        origins[key] = "command line"
        missing = {k: v for k, v in missing.items() if not k.startswith(key)}
    return _checked(tree, origins, missing)


def config_of(settings: Mapping[str, Any]) -> LoadedConfig:
    """The config of settings that a Python call gives by their dotted keys."""
    return _checked(tree_of(settings), dict.fromkeys(settings, "the call"), {})


def _checked(
    tree: dict[str, Any], origins: dict[str, str], missing: dict[str, str]
) -> LoadedConfig:
    """The config, with a default of `sampling.max_tokens` that leaves half of the model's context to the prompt."""
    tree = models_of_runs(_refuse_depth(tree))
    refuse_secrets(tree)
    loaded = LoadedConfig(config=validate(tree), origins=origins, missing=missing)
    key, model = "sampling.max_tokens", loaded.config.model.path
    is_local = model == "demo" or (Path(model).expanduser() / "config.json").is_file()
    context = context_length(model) if is_local else None
    default = loaded.config.sampling.max_tokens
    if context is None or loaded.origin(key) != "default" or default <= context // 2:
        return loaded
    _put(tree, key, max(1, context // 2))
    why = f"{_LOWERED} from {default}: the context of the model {model} has {context} tokens"
    return LoadedConfig(validate(tree), {**origins, key: why}, missing)


def with_overrides(config: Config, overrides: Sequence[str]) -> Config:
    """The config with `key.sub=value` settings laid over it."""
    tree = config.model_dump(mode="json")
    _override(tree, overrides)
    tree = models_of_runs(tree)
    refuse_secrets(tree)
    return validate(tree)


def _override(tree: dict[str, Any], overrides: Sequence[str]) -> list[str]:
    """Lay settings over a tree and return their keys; the length of a run replaces the one it has."""
    settings = [_parse_override(text) for text in overrides]
    keys = [key for key, _ in settings]
    for key, other in _LENGTHS.items():
        section = tree.get("train")
        if key in keys and f"train.{other}" not in keys and isinstance(section, dict):
            section.pop(other, None)
    for key, value in settings:
        _put(tree, key, value)
    return keys


def validate(tree: dict[str, Any]) -> Config:
    """Build the config, or raise a UserError that names the first mistake."""
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise UserError(explain(error, Config, of_a_run=True)) from None


def to_toml(config: Config) -> str:
    """The resolved config as TOML, for the run folder; `config_lines` is for people."""
    return "\n".join(_toml_lines(config.model_dump(mode="json"), prefix="")) + "\n"


def _read_toml(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise UserError(f"config: got {str(path)!r}, allowed: a TOML file that exists")
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"config {path}: not valid TOML: {str(error).partition(';')[0]}") from None
    return _refuse_depth(tree)


def _refuse_depth(tree: dict[str, Any]) -> dict[str, Any]:
    """The tree; raise UserError for one that recursion cannot read."""
    tables: list[Any] = [tree]
    for _ in range(_DEEPEST):
        parts = [part for part in tables if isinstance(part, dict | list)]
        tables = [v for part in parts for v in (part.values() if isinstance(part, dict) else part)]
        if not tables:
            return tree
    raise UserError(f"config: got tables deeper than {_DEEPEST} levels, allowed: fewer")


def as_override(key: str, value: Any) -> str:
    """`key.sub=value` with the value as TOML."""
    return f"{key}={toml_value(value)}"


def _parse_override(text: str) -> tuple[str, Any]:
    key, equals, raw = text.partition("=")
    if not equals or not key or not all(key.split(".")):
        raise UserError(f"override: got {text!r}, allowed: key.sub=value")
    if "[" in key:
        table = key.partition("[")[0]
        raise UserError(f"override: got {text!r}, allowed: the whole list, {table}=[...]")
    try:
        value = tomllib.loads(f"value = {raw}")["value"]
    except (ValueError, RecursionError):
        return key, raw  # a bare word is a string: model.path=my/model
    return key, raw if isinstance(value, date | time) else value  # no setting takes a date


def parse_settings(words: Sequence[str]) -> dict[str, Any]:
    """The tree of `key.sub=value` words."""
    tree = tree_of(dict(map(_parse_override, words)))
    refuse_secrets(tree)  # a command line is in the list of processes
    return tree


def tree_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The tree of settings that are given by their dotted keys."""
    tree: dict[str, Any] = {}
    for key, value in settings.items():
        _put(tree, key, value)
    return tree


def split_words(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """The config file among the words of a command, and its `key=value` settings."""
    files = [word for word in words if "=" not in word]
    if len(files) > 1:
        raise UserError(f"arguments: got {len(files)} config files {files}, allowed: at most one")
    return (files[0] if files else None), [word for word in words if "=" in word]


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
    """A key as TOML writes it: bare if it may be."""
    bare = key.replace("-", "").replace("_", "")
    return key if bare.isalnum() and bare.isascii() else toml_value(key)


def toml_value(value: Any) -> str:
    """A value as TOML, on one line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        for raw, code in (("\n", "\\n"), ("\t", "\\t"), ("\r", "\\r")):
            escaped = escaped.replace(raw, code)
        return '"' + _CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", escaped) + '"'
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


# ---- penstock config


def config_lines(loaded: LoadedConfig, only: str = "") -> Iterator[str]:
    """Yield the lines of the config; `only` keeps settings whose key or doc has these words."""
    tree = loaded.config.model_dump(mode="json")
    yield from _lines(loaded.config, tree, "", loaded, only.lower())


def _lines(
    section: BaseModel, tree: dict[str, Any], prefix: str, loaded: LoadedConfig, only: str
) -> Iterator[str]:
    settings, tables = list[str](), list[str]()
    for name, info in type(section).model_fields.items():
        value, key = getattr(section, name), f"{prefix}{name}"
        if isinstance(value, BaseModel):
            tables += _lines(value, tree[name], f"{key}.", loaded, only)
        elif isinstance(value, dict) and any(isinstance(v, BaseModel) for v in value.values()):
            for item, inner in value.items():
                table = f"{key}.{toml_key(item)}."
                tables += _lines(inner, tree[name][item], table, loaded, only)
        elif only in key.lower() or only in (info.description or "").lower():
            doc = " ".join((info.description or "").split())
            allowed = f" Allowed: {words}." if (words := _allowed(info)) else ""
            written = tree[name]
            setting = f"# {name} = (not set)"
            if written is not None:
                setting = f"{name} = {toml_value(written)}"
            settings += [f"# {doc}{allowed} ({loaded.origin(key)})", setting, ""]
    if settings and prefix:
        yield f"[{prefix.removesuffix('.')}]"
    yield from settings
    yield from tables


def _allowed(field: FieldInfo) -> str:
    """The values that a field takes, if its type limits them."""
    is_union = get_origin(field.annotation) in (Union, types.UnionType)
    for kind in get_args(field.annotation) if is_union else [field.annotation]:
        if get_origin(kind) is Literal:
            return " | ".join(str(value) for value in get_args(kind))
        if kind is bool:
            return "true | false"
    words = {Ge: "at least", Gt: "above", Le: "at most", Lt: "below"}
    return ", ".join(
        f"{text} {getattr(bound, kind.__name__.lower()):g}"
        for bound in field.metadata
        for kind, text in words.items()
        if isinstance(bound, kind)
    )
