"""`penstock init`: write a commented config, a reward and sample data that train as they are."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from string import Template

from penstock.config.plugins import beside
from penstock.config.source import load_config, toml_value
from penstock.errors import UserError

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


def write_starter(
    folder: Path,
    *,
    model: str = "demo",
    data: str = "",
    eval_data: str = "",
    reward: str = "tags",
    max_tokens: int = 0,
    steps: int = 20,
) -> list[Path]:
    """Write the files into a folder that has none of them; return their paths, the config first.

    data: a file with prompts and answers; empty: write a sample. eval_data: beside data, one with other problems;
    empty: nothing is evaluated. max_tokens: of a response; 0: what suits the model.
    """
    if reward not in _REWARDS:
        raise UserError(f"--reward: got {reward!r}, allowed: {', '.join(_REWARDS)}")
    if eval_data and not data:
        raise UserError(f"--eval-data: got {eval_data!r} without --data, allowed: both")
    for option, name in (("--data", data), ("--eval-data", eval_data)):
        _, missing = beside({"tasks": {"train": {"data": name}}}, Path())
        for text in missing.values():
            raise UserError(f"{option}: {text}")
    demo = model == "demo"
    judged = eval_data if data else "test.jsonl"
    evaluation = _template("evaluation.toml").substitute(
        rewards=_REWARDS[reward],
        data=toml_value(_from(folder, judged) or "test.jsonl"),
        every=max(1, min(10, steps // 2)),
    )
    if not judged:  # nothing yet to evaluate on: as comments
        evaluation = "".join(f"# {line}".rstrip() + "\n" for line in evaluation.splitlines())
    config = _template("train.toml").substitute(
        path=(folder / "train.toml").as_posix(),
        model=toml_value(_from(folder, model)),
        data=toml_value(_from(folder, data) or "train.jsonl"),
        system="" if demo else f"system_prompt = {toml_value(_ASK[reward])}\n",
        rewards=_REWARDS[reward],
        tokens=max_tokens or (DEMO_TOKENS if demo else OTHER_TOKENS),
        steps=steps,
        groups=32 if demo else 16,
        lr="1e-4" if demo else "1e-6",
        evaluation=evaluation,
    )
    files = {"train.toml": config}
    if reward == "own":
        files["reward.py"] = _template("reward.txt").template
    if not data:  # sums of two numbers, 200 to train on and 50 others to evaluate
        numbers = [(a, b) for a in range(10, 100) for b in range(10, 100)]
        asked = "{}+{}" if demo else "What is {} + {}?"
        rows = [
            json.dumps({"prompt": asked.format(a, b), "gt_answer": str(a + b)}) + "\n"
            for a, b in random.Random(0).sample(numbers, 250)
        ]
        files |= {"train.jsonl": "".join(rows[:200]), "test.jsonl": "".join(rows[200:])}
    for name in files:
        if (folder / name).exists():
            raise UserError(f"init: {folder / name} exists already, allowed: a folder without it")
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    load_config(folder / "train.toml")
    return [folder / name for name in files]


def _template(name: str) -> Template:
    return Template((Path(__file__).parent / "demo" / "starter" / name).read_text("utf-8"))


def _from(folder: Path, path: str) -> str:
    """A relative path as the config in the folder names it; a name or an absolute path as it is."""
    if not path or Path(path).is_absolute() or not Path(path).exists():
        return path
    return Path(os.path.relpath(path, folder)).as_posix()
