"""`penstock init`: write a commented config, a reward and sample data that train as they are."""

from __future__ import annotations

import json
import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

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
_REWARD = '''"""The reward of this run: what one response is worth.

Parameters are filled by name: response, gt_answer, messages, extra (the other fields of a data line), ...
Return a number, True or False (then accuracy is shown), or a penstock.types.Score. See docs/rewards.md.
"""

import re


def score(response: str, gt_answer: str) -> bool:
    """Whether the last number of the response is the answer."""
    numbers = re.findall(r"-?\\d+", response)
    return bool(numbers) and int(numbers[-1]) == int(gt_answer)
'''


@dataclass(slots=True, frozen=True, kw_only=True)
class Answers:
    """What a user was asked."""

    model: str = "demo"  # a folder or hub name
    data: str = ""  # a file with prompts and answers; empty: write a sample
    reward: RewardKind = "tags"
    max_tokens: int = 0  # of a response; 0: what suits the model
    steps: int = 20


def write_starter(folder: Path, answers: Answers) -> list[Path]:
    """Write the files into a folder that has none of them; return their paths, the config first."""
    if answers.reward not in REWARD_KINDS:
        raise UserError(f"--reward: got {answers.reward!r}, allowed: {', '.join(REWARD_KINDS)}")
    files = {"train.toml": _config(folder, answers)}
    if answers.reward == "own":
        files["reward.py"] = _REWARD
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


def _reward(answers: Answers) -> str:
    if answers.reward == "own":
        return '[{ type = "reward.py:score" }]'
    if answers.reward == "boxed":
        return '[{ type = "boxed" }]'
    return '[{ type = "think_answer_tags", options = { equality = "numeric" } }]'


def _config(folder: Path, answers: Answers) -> str:
    demo = answers.model == "demo"
    tokens = answers.max_tokens or (DEMO_TOKENS if demo else OTHER_TOKENS)
    data = _from(folder, answers.data) or "train.jsonl"
    system = "" if demo else f"system_prompt = {toml_value(_ASK[answers.reward])}\n"
    rewards = _reward(answers)
    evaluation = "" if answers.data else _EVALUATION.format(rewards=rewards)
    return _CONFIG.format(
        path=(folder / "train.toml").as_posix(),
        model=toml_value(_from(folder, answers.model)),
        data=toml_value(data),
        system=system,
        rewards=rewards,
        tokens=tokens,
        steps=answers.steps,
        groups=32 if demo else 16,
        lr="1e-4" if demo else "1e-6",
        evaluation=evaluation,
    )


def _from(folder: Path, path: str) -> str:
    """A relative path as the config in the folder names it; a name or an absolute path as it is."""
    if not path or Path(path).is_absolute() or not Path(path).exists():
        return path
    return Path(os.path.relpath(path, folder)).as_posix()


_CONFIG = """\
# Written by penstock init. Paths are relative to this file. Any key can also be given on the command line: penstock train {path} train.lr=5e-6
#   penstock check {path}     rehearse the run on three prompts, with an estimate of memory and time
#   penstock train {path}     train
#   penstock config {path}    print every setting, with its meaning and the allowed values

[model]
# a folder or hub name of a transformers causal LM; "demo" is a small policy that ships
path = {model}

[tasks.train]
# JSONL, JSON, CSV, Parquet, a folder or a hub name: a prompt and a gt_answer in each record
data = {data}
# summed up; your own: {{ type = "file.py:function" }}; see docs/rewards.md
rewards = {rewards}
{system}
[sampling]
num_generations = 8  # responses to each prompt, which are compared with each other
max_tokens = {tokens}  # longest response

[algorithm]
name = "grpo"  # dapo, rloo, reinforce_pp, dr_grpo, gspo, cispo, ...

[produce]
max_staleness = 1  # generate while the last step trains; 0: on-policy

[train]
steps = {steps}  # updates; or episodes = 1 for one pass over the prompts
groups_per_step = {groups}  # prompts in an update
lr = {lr}
{evaluation}
[checkpoint]
every_steps = 0  # updates between checkpoints; 0: ten minutes between them
"""
_EVALUATION = """
[eval]
every_steps = 10
sampling = {{ temperature = 1.0 }}  # as the policy samples; 0 is greedy

[eval.tasks.test]
data = "test.jsonl"  # problems that are not trained on
rewards = {rewards}
"""
