"""Rows that a Python program gives as data: a list, a `datasets.Dataset`, a data frame, a dict of columns."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from penstock.data.source import plain
from penstock.errors import UserError


def write_rows(path: Path, source: Any) -> None:
    """Write each row as a JSON line; a string is a prompt."""
    with path.open("w", encoding="utf-8") as file:
        for number, row in enumerate(_rows(source), start=1):
            record = {"prompt": row} if isinstance(row, str) else row
            if not isinstance(record, Mapping):
                raise UserError(
                    f"data: row {number}: got {type(row).__name__}, allowed: a dict or a string"
                )
            file.write(f"{json.dumps(plain(record))}\n")


def _rows(source: Any) -> Iterable[Any]:
    if hasattr(source, "iloc"):  # a data frame
        return cast(Iterable[Any], source.to_dict("records"))
    if isinstance(source, Mapping):
        if any(hasattr(value, "column_names") for value in source.values()):
            raise UserError(
                f"data: got the splits {', '.join(source)}, allowed: one of them, as in "
                f"data=dataset[{next(iter(source))!r}]"
            )
        sizes = {len(value) for value in source.values() if isinstance(value, Sequence)}
        if len(sizes) != 1 or any(isinstance(v, str) for v in source.values()):
            raise UserError("data: got a dict, allowed: a list of dicts, or columns of one length")
        return (dict(zip(source, row, strict=True)) for row in zip(*source.values(), strict=True))
    if not isinstance(source, Iterable) or isinstance(source, bytes):
        raise UserError(
            f"data: got {type(source).__name__}, allowed: a path or name, a list of dicts, a "
            "datasets.Dataset or a data frame"
        )
    return source
