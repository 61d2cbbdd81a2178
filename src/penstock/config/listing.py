"""`penstock config`: every setting as TOML that can be used again, with its doc, origin and allowed values."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from penstock.config.source import LoadedConfig, toml_key, toml_value


def config_lines(loaded: LoadedConfig, only: str = "") -> Iterator[str]:
    """Yield the lines of the config; `only` keeps settings whose key or doc has these words."""
    tree = loaded.config.model_dump(mode="json")
    yield from _lines(loaded.config, tree, "", loaded, only.lower())


def _lines(
    section: BaseModel, tree: dict[str, Any], prefix: str, loaded: LoadedConfig, only: str
) -> Iterator[str]:
    own, below = list[str](), list[str]()
    for name, field in type(section).model_fields.items():
        value, key = getattr(section, name), f"{prefix}{name}"
        if isinstance(value, BaseModel):
            below += _lines(value, tree[name], f"{key}.", loaded, only)
        elif _is_table_of_sections(value):
            for item, inner in value.items():
                table = f"{key}.{toml_key(item)}."
                below += _lines(inner, tree[name][item], table, loaded, only)
        elif only in key.lower() or only in (field.description or "").lower():
            own += _setting(name, tree[name], field, loaded.origin(key))
    if own and prefix:
        yield f"[{prefix.removesuffix('.')}]"
    yield from own
    yield from below


def _is_table_of_sections(value: object) -> bool:
    items = value.values() if isinstance(value, dict) else ()
    return bool(items) and all(isinstance(item, BaseModel) for item in items)


def _setting(name: str, value: Any, field: FieldInfo, origin: str) -> Iterator[str]:
    doc = " ".join((field.description or "").split())
    allowed = _allowed(field)
    yield f"# {doc}{f' Allowed: {allowed}.' if allowed else ''} ({origin})"
    yield f"# {name} = (not set)" if value is None else f"{name} = {toml_value(value)}"
    yield ""


def _allowed(field: FieldInfo) -> str:
    """Return the values that a field takes, if its type limits them."""
    kinds = [field.annotation]
    if get_origin(field.annotation) in (Union, types.UnionType):
        kinds = [kind for kind in get_args(field.annotation) if kind is not type(None)]
    for kind in kinds:
        if get_origin(kind) is Literal:
            return " | ".join(str(value) for value in get_args(kind))
        if kind is bool:
            return "true | false"
    words = {Ge: "at least {}", Gt: "above {}", Le: "at most {}", Lt: "below {}"}
    bounds = []
    for bound in field.metadata:
        for kind, text in words.items():
            if isinstance(bound, kind):
                bounds.append(text.format(f"{getattr(bound, kind.__name__.lower()):g}"))
    return ", ".join(bounds)
