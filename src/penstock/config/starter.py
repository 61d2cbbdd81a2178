"""`penstock init`: write a commented config, a reward and sample data that train as they are."""

from __future__ import annotations

import json
import os
import random
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Literal

from penstock.config.plugins import beside
from penstock.config.source import load_config, toml_value
from penstock.errors import UserError

RewardKind = Literal["tags", "boxed", "own"]
REWARD_KINDS: tuple[RewardKind, ...] = ("tags", "boxed", "own")
DEMO_TOKENS, OTHER_TOKENS = 24, 512

_ASK = {
    "tags": "Reason in <think></think>, then give only the final answer in <answer></answer>.",
    "boxed": "Reason step by step and put the final answer in \\boxed{}.",
    "own": "Answer with a number.",
}
_REWARDS = {
    "tags": '[{ type = "think_answer_tags", options = { equality = "numeric" } }]',
    "boxed": '[{ type = "boxed" }]',
    "own": '[{ type = "reward.py:score" }]',
}


@dataclass(slots=True, frozen=True, kw_only=True)
class Answers:
    """What a user was asked."""

    model: str = "demo"  # a folder or hub name
    data: str = ""  # a file with prompts and answers; empty: write a sample
    eval_data: str = ""  # beside data: one with other problems; empty: nothing is evaluated
    reward: RewardKind = "tags"
    max_tokens: int = 0  # of a response; 0: what suits the model
    steps: int = 20


def write_starter(folder: Path, answers: Answers) -> list[Path]:
    """Write the files into a folder that has none of them; return their paths, the config first."""
    if answers.reward not in REWARD_KINDS:
        raise UserError(f"--reward: got {answers.reward!r}, allowed: {', '.join(REWARD_KINDS)}")
    if answers.eval_data and not answers.data:
        raise UserError(f"--eval-data: got {answers.eval_data!r} without --data, allowed: both")
    for option, name in (("--data", answers.data), ("--eval-data", answers.eval_data)):
        _, missing = beside({"tasks": {"train": {"data": name}}}, Path())
        for text in missing.values():
            raise UserError(f"{option}: {text}")
    files = {"train.toml": _config(folder, answers)}
    if answers.reward == "own":
        files["reward.py"] = _template("reward.txt").template
    if not answers.data:
        files |= _sample(answers)
    for name in files:
        if (folder / name).exists():
            raise UserError(f"init: {folder / name} exists already, allowed: a folder without it")
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    load_config(folder / "train.toml")
    return [folder / name for name in files]


def _sample(answers: Answers) -> dict[str, str]:
    """Sums of two numbers, 200 to train on and 50 others to evaluate."""
    choice = random.Random(0)
    pairs = choice.sample([(a, b) for a in range(10, 100) for b in range(10, 100)], 250)
    asked = "{}+{}" if answers.model == "demo" else "What is {} + {}?"
    lines = [
        json.dumps({"prompt": asked.format(a, b), "gt_answer": str(a + b)}) + "\n" for a, b in pairs
    ]
    return {"train.jsonl": "".join(lines[:200]), "test.jsonl": "".join(lines[200:])}


def _config(folder: Path, answers: Answers) -> str:
    demo = answers.model == "demo"
    tokens = answers.max_tokens or (DEMO_TOKENS if demo else OTHER_TOKENS)
    data = _from(folder, answers.data) or "train.jsonl"
    system = "" if demo else f"system_prompt = {toml_value(_ASK[answers.reward])}\n"
    judged = answers.eval_data if answers.data else "test.jsonl"
    evaluation = _template("evaluation.toml").substitute(
        rewards=_REWARDS[answers.reward],
        data=toml_value(_from(folder, judged) or "test.jsonl"),
        every=max(1, min(10, answers.steps // 2)),
    )
    if not judged:  # nothing yet to evaluate on: as comments
        evaluation = "".join(f"# {line}".rstrip() + "\n" for line in evaluation.splitlines())
    return _template("train.toml").substitute(
        path=(folder / "train.toml").as_posix(),
        model=toml_value(_from(folder, answers.model)),
        data=toml_value(data),
        system=system,
        rewards=_REWARDS[answers.reward],
        tokens=tokens,
        steps=answers.steps,
        groups=32 if demo else 16,
        lr="1e-4" if demo else "1e-6",
        evaluation=evaluation,
    )


def _template(name: str) -> Template:
    return Template((Path(__file__).parent / "demo" / "starter" / name).read_text("utf-8"))


def _from(folder: Path, path: str) -> str:
    """A relative path as the config in the folder names it; a name or an absolute path as it is."""
    if not path or Path(path).is_absolute() or not Path(path).exists():
        return path
    return Path(os.path.relpath(path, folder)).as_posix()
