"""Which settings a resumed run may change, and when a change takes effect.

A resumed run redoes the steps that are journalled but in no checkpoint. A setting that the update reads
would change those steps, so it is applied after those steps were redone with the old value and
saved. A setting that would change the meaning of the journal is refused.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from penstock.config import Config
from penstock.config.tree import leaves
from penstock.errors import UserError

FREE, UPDATE = "free", "update"
_FOLDER = "a run keeps its folder; move the folder instead"
_SIZE = "the unfinished groups in the journal have the old size"

# The first pattern that matches decides: FREE (applied at once), UPDATE (after the redo), or why it is refused.
RULES = (
    ("run.dir", _FOLDER),
    ("run.name", _FOLDER),
    ("run.*", FREE),
    ("seed", "earlier prompts and samples were drawn with it"),
    ("model.device", UPDATE),
    ("model.arithmetic", UPDATE),
    ("model.*", "the run's weights and their digests depend on it"),
    ("sampling.num_generations", _SIZE),
    ("sampling.max_tokens", UPDATE),  # the overlong penalty reads it
    ("sampling.*", FREE),
    ("engine.*", FREE),
    ("produce.*", FREE),
    ("algorithm.*", UPDATE),
    ("teachers.*", UPDATE),
    ("train.groups_per_step", "the recorded progress counts batches of this size"),
    ("train.ptx.data", "the position in the text stream refers to it"),
    ("train.masters", "the masters were started with it, and merged adapters are rounded by it"),
    ("train.stop_when", FREE),
    ("train.offload_moments", FREE),
    ("train.*", UPDATE),
    ("sync.every_steps", "the staleness of the recorded groups is measured in it"),
    ("sync.*", FREE),
    ("launch.num_consumers", UPDATE),
    ("launch.*", FREE),
    ("eval.*", FREE),
    ("checkpoint.*", FREE),
    ("journal.*", FREE),
    ("track.*", FREE),
    ("watchdog.*", FREE),
    ("tasks.*.sampling.num_generations", _SIZE),
    ("tasks.*.sampling.max_tokens", UPDATE),
    ("tasks.*.sampling.*", FREE),
    ("tasks.*.produce.*", FREE),
    ("tasks.*.algorithm.*", UPDATE),
    ("tasks.*.teacher_template", UPDATE),
    ("tasks.*.weight", FREE),
    ("tasks.*.sampler", FREE),
    ("tasks.*.retire_solved", FREE),
    ("tasks.*.rewards", FREE),
    ("tasks.*.agent*", FREE),
    ("tasks.*", "the journal's groups refer to positions in the tasks' original data"),
)


@dataclass(slots=True, frozen=True)
class Change:
    """One setting that differs between two configs."""

    key: str
    before: object
    after: object
    in_update: bool  # applied after the journalled steps were redone with the old value

    def __str__(self) -> str:
        return f"{self.key} {self.before!r} -> {self.after!r}"


def allowed_changes(before: Config, after: Config, *, pinned: Container[str] = ()) -> list[Change]:
    """The settings that differ; raise a UserError for one that must not change.

    `pinned`: paths that may change, because the content behind them is compared instead.
    """
    old, new = flat(before.model_dump()), flat(after.model_dump())
    changes = []
    whole = {*before.tasks} ^ {*after.tasks}  # tasks that only one of them has
    for key in _differing_keys(old, new):
        effect = FREE if key in pinned else effect_of(key)
        if key.startswith("tasks.") and (task := key.split(".")[1]) in whole:
            got = "a new task" if task in after.tasks else "a run without it"
            raise UserError(
                f"tasks.{task}: got {got}, allowed: the run's {', '.join(before.tasks)}"
            )
        if effect not in (FREE, UPDATE):
            raise UserError(
                f"{key}: got {new.get(key)!r} for a run with {old.get(key)!r}, "
                f"allowed: the same value; {effect}"
            )
        changes.append(Change(key, old.get(key), new.get(key), effect == UPDATE))
    for task in before.tasks:
        if after.asks_server(task) and not before.asks_server(task):
            raise UserError(
                f"tasks.{task}: got a teacher behind a server for a run without one, allowed: a teacher with a path; the "
                "groups in the journal lack the server's log-probs"
            )
    return changes


def differing(before: Config, after: Config) -> list[str]:
    """Each setting that differs as `key=value`, with the later value."""
    old, new = flat(before.model_dump()), flat(after.model_dump())
    return [f"{key}={new.get(key)}" for key in _differing_keys(old, new)]


def _differing_keys(old: dict[str, object], new: dict[str, object]) -> list[str]:
    return sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))


def effect_of(key: str) -> str:
    """FREE, UPDATE, or the reason why this key must not change."""
    return next(effect for pattern, effect in RULES if fnmatchcase(key, pattern))


def flat(tree: dict[str, Any]) -> dict[str, object]:
    """The settings of a tree by their dotted keys."""
    return {key: value for key, value in leaves(tree) if value != {}}
