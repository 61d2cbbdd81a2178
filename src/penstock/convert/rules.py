"""A rule says which key of ours a word of another system sets; the tables of words are made of rules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


def read(value: Any) -> Any:
    """Return a number, bool or text as it was meant."""
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


@dataclass(slots=True, frozen=True)
class Rule:
    """The key that a word sets; `note` is written beside it."""

    key: str = ""
    note: str = ""
    value: Callable[[Any], Any] = read
    is_secret: bool = False  # the word's value is not shown
    is_joined: bool = False  # translated together with other words, which says the result


def named(names: dict[str, Any], otherwise: Any = None) -> Callable[[Any], Any]:
    """Return a translation of values by name; unknown names stay, or become `otherwise`."""

    def translate(value: Any) -> Any:
        given = str(value).strip().lower()
        return names.get(given, value if otherwise is None else otherwise)

    return translate


def reward_list(value: Any) -> list[dict[str, Any]]:
    names = value if isinstance(value, list) else str(value).split()
    return [{"type": str(name)} for name in names]


def words_list(value: Any) -> list[str]:
    """Return the names of a list; "all-linear" means all, which an empty list means here."""
    names = value if isinstance(value, list) else str(value).strip("[]").replace(",", " ").split()
    return [] if names == ["all-linear"] else [str(name) for name in names]


def trackers(value: Any) -> list[str]:
    """Return the console and the trackers that are named."""
    return ["console", *(name for name in ("tensorboard", "wandb") if name in str(value).lower())]


SCHEDULES = named(
    {
        "cosine_with_min_lr": "cosine",
        "constant_with_warmup": "constant",
        "warmup_stable_decay": "linear",
    }
)
PER_TOKEN = "a token budget of a forward pass, chosen from memory; it never changes the gradient"
NO_PARALLEL = Rule(note="the trainer shards with FSDP2 over launch.num_consumers ranks")
ZERO = Rule("train.parallel.zero", "0: as 1", value=lambda stage: max(1, int(stage)))
BUILT_IN = Rule(note="always so here")
TASK, EVAL = "tasks.train", "eval.tasks.heldout"
