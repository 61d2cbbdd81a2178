"""Problems from the optional reasoning-gym package: `reasoning_gym:NAME`.

Problems are generated from a seed, without a download. A hash of the question puts each problem into the
training or the held-out split (`reasoning_gym:NAME:heldout`), so the two never share a question, whatever
the seeds. The package is imported when first needed.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
from typing import Any

from penstock.data.builtin import HELDOUT_SHARE, SPLITS, Record, hash_fraction
from penstock.errors import UserError
from penstock.types import Prompt

PREFIX = "reasoning_gym:"
DEFAULT_SIZE = 1000
MAX_TRIES_PER_PROBLEM = 40


def load(name: str, options: dict[str, Any], seed: int) -> list[Record]:
    """`size` records of one generator; options: size, seed, the generator's own settings."""
    generator, split = _parse(name)
    size = _size(name, options)
    problems = _create(name, generator, {"seed": seed, **options}, size * MAX_TRIES_PER_PROBLEM)
    records: list[Record] = []
    for index in range(size * MAX_TRIES_PER_PROBLEM):
        item = problems[index]
        is_heldout = hash_fraction(item["question"]) < HELDOUT_SHARE
        if is_heldout is (split == "heldout"):
            metadata = json.loads(json.dumps(item["metadata"], default=str))
            records.append(
                {
                    "messages": [{"role": "user", "content": item["question"]}],
                    "gt_answer": item["answer"],
                    "metadata": metadata,
                    "reasoning_gym": generator,
                }
            )
            if len(records) == size:
                return records
    raise UserError(
        f"data_options.size of {name}: got {size}, allowed: at most {len(records)}, because only "
        f"{len(records)} of {size * MAX_TRIES_PER_PROBLEM} problems are in the {split} split"
    )


def validate(name: str, options: dict[str, Any]) -> None:
    """Raise a UserError if the package is missing, or the generator or its options are unknown."""
    generator, _ = _parse(name)
    _size(name, options)
    _create(name, generator, {"seed": 0, **options}, 1)


def score(response: str, prompt: Prompt) -> float:
    """The generator's own score, in [0, 1], of the text in the answer tags. A reward.

    Meant for problems with more than one right answer. Without answer tags it judges the whole response.
    """
    generator = prompt.extra["reasoning_gym"]
    _, opened, tail = response.rpartition("<answer>")
    answer = tail.partition("</answer>")[0] if opened else response
    entry = {
        "question": prompt.messages[-1]["content"],
        "answer": prompt.gt_answer,
        "metadata": prompt.extra["metadata"],
    }
    judge = _import_package(generator).get_score_answer_fn(generator)
    return float(judge(answer.strip(), entry))


def _parse(name: str) -> tuple[str, str]:
    generator, _, split = name.removeprefix(PREFIX).partition(":")
    if split not in ("", *SPLITS):
        raise UserError(f"data: got {name!r}, allowed: {PREFIX}{generator} with :train or :heldout")
    return generator, split or "train"


def _size(name: str, options: dict[str, Any]) -> int:
    size = options.get("size", DEFAULT_SIZE)
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise UserError(f"data_options.size of {name}: got {size!r}, allowed: 1 or more")
    return size


def _create(name: str, generator: str, options: dict[str, Any], size: int) -> Any:
    package = _import_package(name)
    from reasoning_gym.factory import DATASETS

    if generator not in DATASETS:
        near = difflib.get_close_matches(generator, DATASETS, n=1)
        hint = f"; did you mean {PREFIX}{near[0]}?" if near else ""
        raise UserError(f"data: got {name!r}, allowed: a reasoning-gym dataset{hint}")
    try:
        return package.create_dataset(generator, **{**options, "size": size})
    except (TypeError, AssertionError, ValueError) as error:
        raise UserError(
            f"data_options of {name}: got {options}, allowed: settings of that generator ({error})"
        ) from error


def _import_package(name: str) -> Any:
    if importlib.util.find_spec("reasoning_gym") is None:
        raise UserError(
            f"data: got {name!r}, but the package reasoning-gym is not installed; "
            "install it with: pip install 'penstock[reasoning-gym]'"
        )
    import reasoning_gym

    return reasoning_gym
