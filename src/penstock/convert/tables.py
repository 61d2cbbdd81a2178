"""What each word of another system means here: the rows of `config/systems/SYSTEM.csv`.

A row has a word, our key, the translation of the value, and a note that is written beside it. A row without
a key has no counterpart; its note says why. A row without a word is a default of theirs that differs from
ours and so must be written down. A translation is a name of `TRANSLATIONS`, or pairs such as
`gae>grpo *>reinforce`: a value that is not listed becomes that of `*`, or stays.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.config.foreign_words import SYSTEMS, rows

TASK, EVAL = "tasks.train", "eval.tasks.heldout"


def read(value: Any) -> Any:
    """A number, bool or text as it was meant."""
    if not isinstance(value, str):
        return value
    lowered = value.strip().lower()
    if lowered in ("true", "false"):
        return lowered == "true"
    if lowered in ("none", "null"):
        return None
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value


def trackers(value: Any) -> list[str]:
    """The console and the trackers that are named."""
    return ["console", *(name for name in ("tensorboard", "wandb") if name in str(value).lower())]


def _rewards(value: Any) -> list[dict[str, Any]]:
    names = value if isinstance(value, list) else str(value).split()
    return [{"type": str(name)} for name in names]


def _words(value: Any) -> list[str]:
    """The names of a list; "all-linear" means all, which an empty list means here."""
    names = value if isinstance(value, list) else str(value).strip("[]").replace(",", " ").split()
    return [] if names == ["all-linear"] else [str(name) for name in names]


TRANSLATIONS: dict[str, Callable[[Any], Any]] = {
    "": read,
    "joined": read,  # translated together with other words, in write.py
    "secret": read,
    "str": str,
    "float": float,
    "floats": lambda numbers: [float(number) for number in numbers],
    "list": list,
    "words": _words,
    "rewards": _rewards,
    "reward_model": lambda path: [{"type": "reward_model", "options": {"path": str(path)}}],
    "trackers": trackers,
    "wandb": lambda key: ["console", "wandb"],
    "at_least_0": lambda number: max(0, int(number or 0)),
    "at_least_1": lambda number: max(1, int(number)),
    "positive": lambda number: int(number) if int(number or 0) > 0 else None,
    "above_0": lambda number: float(number) > 0,
}


@dataclass(slots=True, frozen=True)
class Rule:
    """The key that a word sets, and how its value is translated."""

    key: str = ""
    translation: str = ""
    note: str = ""

    @property
    def is_joined(self) -> bool:
        return self.translation == "joined"

    @property
    def is_secret(self) -> bool:
        """Whether the value of the word is not to be shown."""
        return self.translation in ("secret", "wandb")

    def value(self, value: Any) -> Any:
        if ">" not in self.translation:
            return TRANSLATIONS[self.translation](value)
        names = dict(pair.split(">") for pair in self.translation.split())
        name = names.get(str(value).strip().lower(), names.get("*"))
        return value if name is None else {"true": True, "false": False}.get(name, name)


def _default(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


WORDS = {
    system: {
        row["word"]: Rule(row["key"], row["value"], row["note"])
        for row in rows(system)
        if row["word"]
    }
    for system in SYSTEMS
}
DEFAULTS = {  # key, value, note
    system: [
        (row["key"], _default(row["value"]), row["note"]) for row in rows(system) if not row["word"]
    ]
    for system in SYSTEMS
}
