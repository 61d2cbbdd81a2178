"""Extension tables: a name -> "module:Class", and the user's own "module:Class" in its place.

Each package keeps one literal table. There are no decorators and no registration: a name from a config
is looked up when it is needed, so that importing Penstock never imports an optional package.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.errors import UserError


def check_name(kind: str, name: str, table: Mapping[str, str]) -> None:
    """Raise a UserError unless `name` is in the table or has the form of the user's own object."""
    if name not in table and ":" not in name:
        allowed = ", ".join(sorted(table))
        raise UserError(f"{kind}: got {name!r}, allowed: {allowed}, or your own module:Name")


def load(kind: str, name: str, table: Mapping[str, str]) -> Any:
    """Return the object that `name` stands for, importing its module."""
    check_name(kind, name, table)
    module_name, _, attribute = table.get(name, name).rpartition(":")
    try:
        module = _import(module_name)
    except ImportError as error:
        raise UserError(
            f"{kind}: got {name!r}, but {module_name} cannot be imported: {error}"
        ) from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        raise UserError(f"{kind}: got {name!r}, but {module_name} has no {attribute!r}") from None


def _import(module_name: str) -> Any:
    if module_name.endswith(".py"):
        return _import_file(Path(module_name))
    if os.getcwd() not in sys.path and importlib.util.find_spec(module_name.split(".")[0]) is None:
        sys.path.insert(0, os.getcwd())  # a user's module beside their config
    return importlib.import_module(module_name)


def _import_file(path: Path) -> Any:
    if not path.is_file():
        raise ImportError(f"no such file: {path}")
    name = f"penstock_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if spec is None or spec.loader is None:
        raise ImportError(f"not a Python file: {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
