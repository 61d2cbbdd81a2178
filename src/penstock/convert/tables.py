"""What each word of another system means here: the rows of `config/systems/SYSTEM.csv`.

A row has a word, our key, the translation of the value, and a note that is written beside it. A row without
a key has no counterpart; its note says why. A word may be a pattern (`critic.*`). A row without a word is a default of theirs that differs from
ours and so must be written down. A translation is a name of `TRANSLATIONS`, or pairs such as
`gae>grpo *>reinforce`: a value that is not listed becomes that of `*`, or stays. A word may have other
spellings behind it (`model m`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from penstock.config.mistakes import SYSTEMS, rows
from penstock.convert.words import Unread

TASK, EVAL = "tasks.train", "eval.tasks.heldout"

# ColossalAI's algorithms are GRPO's loss of token ratios with other advantages, a mean of each response first.
_OF_RESPONSES = {"name": "grpo", "aggregation": "sequence"}
COLOSSALAI_LOSSES: dict[str, dict[str, Any]] = {
    "GRPO": _OF_RESPONSES,
    "RLOO": {**_OF_RESPONSES, "baseline": "leave_one_out", "normalize": "none"},
    "REINFORCE_PPB": {
        "name": "reinforce_pp_baseline",
        "aggregation": "sequence",
        "kl_in": "reward",
        "kl_estimator": "k3",
    },
    "DAPO": {
        "name": "dapo",
        "aggregation": "token",
        "kl_beta": 0.0,
        "filter_range": [0.01, 0.99],
        "overlong_penalty": 10.0,
    },
}
COLOSSALAI_FORMS = {  # reward type: the system prompt, in our words, and the stop strings
    "think_answer_tags": (
        "Reason in <think> </think>, then give only the final answer in <answer> </answer>.",
        ["</answer>"],
    ),
    "boxed": ("Reason step by step and put the final answer in \\boxed{}.", []),
    "code": ("You are a helpful assistant.", []),
}


def colossalai_reward(name: str, servers: list[str]) -> dict[str, Any]:
    """A reward by its name there, where a right answer is 10; one of the user's own has its own scale."""
    scale: dict[str, Any] = {"weight": 10.0} if name in COLOSSALAI_FORMS else {}
    options: dict[str, Any] = (
        {"options": {"servers": servers}} if servers and name == "code" else {}
    )
    return {"type": name, **scale, **options}


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


def _reward_file(path: object) -> list[dict[str, Any]]:
    if not str(path).endswith(".py"):
        raise ValueError("an address of a server")
    return [{"type": f"{path}:reward_func"}]


def words_of(value: Any) -> list[str]:
    """The names of a list; "all-linear" means all, which an empty list means here."""
    plain = re.sub(r"[\[\](),'\"]", " ", str(value))
    names = value if isinstance(value, list) else plain.split()
    return [] if names == ["all-linear"] else [str(name) for name in names]


def task_name(text: str) -> str:
    """A text as the name of a task, which is a key without dots."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", text) or "task"


TRANSLATIONS: dict[str, Callable[[Any], Any]] = {
    "": read,
    "joined": read,  # translated together with other words, in write.py
    "secret": read,
    "str": str,
    "float": float,
    "floats": lambda numbers: [float(number) for number in words_of(numbers)],
    "list": list,
    "words": words_of,
    "rewards": lambda names: [
        {"type": str(name)} for name in (names if isinstance(names, list) else str(names).split())
    ],
    "reward_file": _reward_file,
    "reward_model": lambda path: [{"type": "reward_model", "options": {"path": str(path)}}],
    "trackers": trackers,
    "wandb": lambda key: ["console", "wandb"],
    "tensorboard": lambda folder: ["console", "tensorboard"],
    "at_least_0": lambda number: max(0, int(number or 0)),
    "at_least_1": lambda number: max(1, int(number)),
    "positive": lambda number: int(number) if int(number or 0) > 0 else None,
    "above_0": lambda number: float(number) > 0,
    "above_0_only": lambda number: read(number) or None,
    "ten_if_true": lambda on: 10.0 if on else 0.0,
    "dtype": lambda dtype: str(dtype).removeprefix("torch."),
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


def rules(table: str) -> dict[str, Rule]:
    """The rules of a table by their words, in every spelling."""
    return {
        word: Rule(row["key"], row["value"], row["note"])
        for row in rows(table)
        for word in row["word"].split()
    }


WORDS = {system: rules(system) for system in SYSTEMS}
SPELLINGS = {  # other spelling: word
    system: {other: row["word"].split()[0] for row in rows(system) for other in row["word"].split()}
    for system in SYSTEMS
}


def _defaults(system: str) -> Iterator[tuple[str, Any, str]]:
    for row in rows(system):
        if not row["word"]:
            try:
                value = json.loads(row["value"])
            except ValueError:
                value = row["value"]
            yield row["key"], value, row["note"]


DEFAULTS = {system: list(_defaults(system)) for system in SYSTEMS}  # key, value, note


def rule_of(system: str, word: str) -> Rule | None:
    """The rule of a word, or of the pattern that it fits."""
    if rule := WORDS[system].get(word):
        return rule
    patterns = (pattern for pattern in WORDS[system] if fnmatchcase(word, pattern))
    return next((WORDS[system][pattern] for pattern in patterns), None)


@dataclass(slots=True)
class Conversion:
    """What was read, what it became, and what is left."""

    words: dict[str, Any]
    settings: dict[str, tuple[Any, str]] = field(default_factory=dict)  # key: (value, comment)
    left: list[str] = field(default_factory=list)  # words without a counterpart, and why
    used: set[str] = field(default_factory=set)

    def take(self, word: str, default: Any = None) -> Any:
        """The value of a word that is translated together with others."""
        value = self.words.get(word, default)
        self.used.add(word)
        if isinstance(value, Unread):
            self.left.append(f"{word} = {value}: code, or a variable that is not set")
            return default
        return read(value)

    def put(self, key: str, value: Any, comment: str = "") -> None:
        self.settings[key] = (value, comment)

    def value(self, key: str, default: Any = None) -> Any:
        return self.settings[key][0] if key in self.settings else default
