"""Recipes of tinker-cookbook, unchanged, against a server; one is killed under one. Run by scripts/test_agents.sh.

Tokenizers and datasets are folders of the working directory with the names that the recipes ask the hub for.
`recipes.sdft` of 0.5.8 ends by a mistake of its own before it asks for samples. `off_policy_reasoning`,
`code_rl`, `search_tool`, `harbor_rl`, `verifiers_rl`, `vlm_classifier`, `audio` and `rubric` need a download, sandboxes
or another service.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from penstock.config.demo import resolve_model_path
from penstock.service.audit import audit_service
from stages.service_client import ServerProcess, serving

PYTHON = os.environ.get("PENSTOCK_TEST_TINKER", "")
if not PYTHON:
    pytest.skip("run by scripts/test_agents.sh", allow_module_level=True)
MODEL = (
    "Qwen/Qwen3-8B-Base"  # a name to which the cookbook knows a renderer that suits any tokenizer
)
GSM8K_README = """---
configs:
- config_name: main
  data_files:
  - split: train
    path: train.jsonl
---
"""


def datasets() -> dict[str, list[dict[str, Any]]]:
    """The rows of each dataset, by the name of its folder."""

    def chat(n: int) -> list[dict[str, str]]:
        asked = {"role": "user", "content": f"What is {n}+{n}?"}
        return [asked, {"role": "assistant", "content": f"It is {2 * n}."}]

    def pair(n: int, answer: str) -> str:
        return f"\n\nHuman: What is {n}+{n}?\n\nAssistant: {answer}"

    return {
        "HuggingFaceH4/no_robots": [{"messages": chat(n)} for n in range(40)],
        "openai/gsm8k": [{"question": f"{n}+{n}?", "answer": f"#### {2 * n}"} for n in range(8)],
        "zwhe99/DeepMath-103K": [{"question": f"What is {n}+{n}?"} for n in range(8)],
        "Anthropic/hh-rlhf": [
            {"chosen": pair(n, str(2 * n)), "rejected": pair(n, "I do not know")}
            for n in range(1060)  # the recipe takes 1024 away to test with
        ],
        "own": [{"messages": chat(n)} for n in range(12)],
    }


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("recipes")
    shutil.copytree(resolve_model_path("demo"), folder / MODEL)
    config = json.loads((folder / MODEL / "config.json").read_text())
    config["max_position_embeddings"] = 4096  # the prompts of recipes are longer than the demo's
    (folder / MODEL / "config.json").write_text(json.dumps(config))
    for name, rows in datasets().items():
        (folder / name).mkdir(parents=True)
        for split, part in (("train", rows), ("test", rows[:4])):
            text = "".join(f"{json.dumps(row)}\n" for row in part)
            (folder / name / f"{split}.jsonl").write_text(text)
    (folder / "openai" / "gsm8k" / "README.md").write_text(GSM8K_README)
    with serving(folder, "train.threads=1", model=MODEL) as server:
        yield server


@dataclass(frozen=True)
class Recipe:
    """A recipe with its options, and how many steps it logs."""

    module: str
    options: Mapping[str, Any]
    steps: int = 2
    killed: bool = False  # the server, when the first step is logged

    def run(self, server: ServerProcess, log: Path, *more: str, stop: bool = False) -> list[Any]:
        """Run the recipe; the metrics that it logged. `stop`: the recipe itself, after its first checkpoint."""
        words = [f"{name}={value}" for name, value in self.options.items()]
        words += [f"model_name={MODEL}", f"log_path={log}", *more]
        process = subprocess.Popen(
            [PYTHON, "-m", f"tinker_cookbook.recipes.{self.module}", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=server.folder,
            env={
                **os.environ,
                "TINKER_BASE_URL": f"http://127.0.0.1:{server.port}",
                "TINKER_API_KEY": "tml-me",
                "TINKER_TELEMETRY": "0",
                "HF_HUB_OFFLINE": "1",
                "HF_HOME": str(server.folder / "hf"),
            },
        )
        assert process.stdout is not None
        lines, kills = [], int(self.killed)
        try:
            for line in process.stdout:
                lines.append(line)
                if kills and "Wrote metrics" in line:
                    kills -= 1
                    server.kill()
                    server.start()
                if stop and "Saved checkpoints" in line:
                    process.kill()
        except BaseException:  # such as the test's time limit: the recipe would ask for ever
            process.kill()
            raise
        assert (process.wait(), kills) == (-signal.SIGKILL if stop else 0, 0), "".join(lines[-40:])
        return [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]


SUPERVISED = {"batch_size": 4, "learning_rate": 3e-3, "max_steps": 3, "lora_rank": 4}
COLON = {"renderer_name": "role_colon"}
SAMPLED = {**COLON, "max_steps": 2, "max_tokens": 8}
ARITHMETIC = {"env": "arithmetic", "groups_per_batch": 4, "group_size": 16, "lora_rank": 4}
RECIPES = {
    "supervised loop": Recipe("sl_loop", {**SUPERVISED, "save_every": 2}, steps=3),
    "supervised": Recipe(
        "chat_sl.train", {**SUPERVISED, **COLON, "dataset": "own/train.jsonl", "save_every": 1}, 3
    ),
    "RL loop": Recipe(
        "rl_loop", {"batch_size": 2, "group_size": 2, "max_tokens": 8, "max_steps": 2}
    ),
    "RL, killed": Recipe("math_rl.train", {**SAMPLED, **ARITHMETIC, "save_every": 1}, killed=True),
    "RL off policy, PPO": Recipe(
        "math_rl.train", {**SAMPLED, **ARITHMETIC, "loss_fn": "ppo", "max_steps_off_policy": 1}
    ),
    "RL with preferences": Recipe(
        "preference.shorter.train", {**SAMPLED, "batch_size": 2, "group_size": 4}
    ),
    "prompt distillation": Recipe(
        "prompt_distillation.train",
        {**SUPERVISED, **COLON, "file_path": "own/train.jsonl", "max_length": 64},
        steps=3,
    ),
    "preferences": Recipe("preference.dpo.train", {**COLON, "max_steps": 2, "batch_size": 4}),
    "distillation": Recipe(
        "distillation.on_policy_distillation",
        {**SAMPLED, "teacher_model": MODEL, "groups_per_batch": 2, "group_size": 2, "lora_rank": 4},
    ),
}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_runs_unchanged(server: ServerProcess, tmp_path: Path, name: str) -> None:
    recipe = RECIPES[name]
    metrics = recipe.run(server, tmp_path / "log")
    wanted = ("train_mean_nll", "dpo_loss", "reward/total", "env/all/reward/total")
    trained = [row for row in metrics if any(key in row for key in wanted)]
    assert len(trained) >= recipe.steps
    check(name, trained)


def check(name: str, steps: Sequence[Mapping[str, float]]) -> None:
    """What a recipe's own metrics say about the server's numbers."""
    if name.startswith("supervised"):
        losses = [row["train_mean_nll"] for row in steps]
        assert losses[-1] < losses[0]
    if name == "preferences":  # before the first step both models are the base
        assert steps[0]["dpo_loss"] == pytest.approx(0.693147, abs=1e-5)
    if name == "distillation":  # nothing is trained before the first step, so the teacher agrees
        assert steps[0]["teacher_kl"] == pytest.approx(0, abs=1e-4)
    for row in steps:  # the engine's log-probs of what it sampled are those of the trainer
        if "optim/kl_sample_train_v1" in row and "off policy" not in name:
            assert row["optim/kl_sample_train_v1"] == pytest.approx(0, abs=1e-4)


@pytest.mark.timeout(240)
def test_a_recipe_that_was_stopped_goes_on(server: ServerProcess, tmp_path: Path) -> None:
    recipe, log = RECIPES["supervised"], tmp_path / "log"
    recipe.run(server, log, stop=True)
    metrics = recipe.run(server, log, "behavior_if_log_dir_exists=resume")
    losses = [row["train_mean_nll"] for row in metrics if "train_mean_nll" in row]
    assert len(losses) >= recipe.steps  # a step may be logged by both
    assert losses[-1] < losses[0]
    assert audit_service(server.folder / "service") == 0
