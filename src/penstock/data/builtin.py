"""Built-in tasks: generated problems with known answers, without a download.

A task returns dataset records, shaped like JSONL lines, in a fixed order that looks random: the first N
problems are a fair sample. `NAME` is the training part, `NAME:heldout` the part that is never trained on.
Nothing here tokenises or shuffles by seed.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from typing import Any

from penstock.errors import UserError

Record = dict[str, Any]

HELDOUT_SHARE = 0.1
SPLITS = ("train", "heldout")


def is_heldout(a: int, b: int) -> bool:
    """Whether a sum is kept for evaluation; a+b and b+a always fall on the same side."""
    return _pair_hash(min(a, b), max(a, b)) < HELDOUT_SHARE


def addition(split: str, *, low: int = 10, high: int = 99, size: int = 0) -> list[Record]:
    """The sums a+b with low <= a, b <= high of one split; `size` 0 returns all of them."""
    if not 0 <= low <= high <= 9999:
        raise UserError(f"addition: got low={low} high={high}, allowed: 0 <= low <= high <= 9999")
    if (high - low + 1) ** 2 > 1_000_000:
        raise UserError(f"addition: got low={low} high={high}, allowed: at most 1000 numbers apart")
    if size < 0:
        raise UserError(f"addition: got size={size}, allowed: 0 (all) or more")
    numbers = range(low, high + 1)
    wanted = split == "heldout"
    pairs = [(a, b) for a in numbers for b in numbers if is_heldout(a, b) is wanted]
    pairs.sort(key=lambda pair: _pair_hash(pair[0], pair[1], salt="order"))
    return [
        {"messages": [{"role": "user", "content": f"{a}+{b}"}], "gt_answer": str(a + b)}
        for a, b in pairs[: size or None]
    ]


def _pair_hash(a: int, b: int, salt: str = "split") -> float:
    return hash_fraction(f"{salt}:{a}+{b}")


def hash_fraction(text: str) -> float:
    """A number in [0, 1) that depends on the text alone, the same on every machine."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


TASKS: dict[str, Callable[..., list[Record]]] = {"addition": addition}


def is_builtin(name: str) -> bool:
    """Whether `name`, with or without a split, names a built-in task."""
    return name.partition(":")[0] in TASKS


def load(name: str, options: dict[str, Any]) -> list[Record]:
    """The records of `NAME` or `NAME:SPLIT`, made with the task's own options."""
    task, _, split = name.partition(":")
    split = split or "train"
    if split not in SPLITS:
        allowed = ", ".join([task] + [f"{task}:{s}" for s in SPLITS])
        raise UserError(f"data: got {name!r}, allowed: {allowed}")
    known = list(inspect.signature(TASKS[task]).parameters)[1:]
    for key, value in options.items():
        if key not in known:
            allowed = ", ".join(known)
            raise UserError(f"data_options of {name}: got {key!r}, allowed: {allowed}")
        if not isinstance(value, int) or isinstance(value, bool):
            raise UserError(f"data_options.{key} of {name}: got {value!r}, allowed: a whole number")
    return TASKS[task](split, **options)
