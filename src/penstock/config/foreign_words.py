"""The settings of other systems and the keys that mean the same here: the rows of `systems/SYSTEM.csv`.

`penstock convert` translates whole configs by these tables; a config with such a word in it is told the key.
"""

from __future__ import annotations

import csv
from functools import cache
from importlib.resources import files

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
