"""Every recipe of examples/ starts from its documented command, here for one step of a tiny policy."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from types import ModuleType

import pytest
from typer.testing import CliRunner

from penstock import cli
from stages.tiny_policy import save_policy

ROOT = Path(__file__).resolve().parents[3]
RECIPES = sorted(  # a folder with requirements has an environment of its own: make test-agents
    path
    for path in (ROOT / "examples").glob("*/*.toml")
    if not path.with_name("requirements.txt").exists()
)
QUICK = {"sums", "calculator"}  # a reward of its own, an agent
SMALL = [
    "launch.kind=inline",
    "engine.max_slots=8",
    "sampling.max_tokens=8",
    "sampling.num_generations=2",
    "train.groups_per_step=2",
    "train.steps=1",
    "eval.max_problems=2",
]


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of examples/ with its data made, in the current directory."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "examples"


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(path, id=path.stem, marks=[] if path.stem in QUICK else [pytest.mark.slow])
        for path in RECIPES
    ],
)
def test_a_recipe_trains(recipe: Path, examples: Path) -> None:
    named = recipe.read_text()
    for data in examples.glob("*/make_data.py"):
        if data.parent.name == recipe.parent.name or f"examples/{data.parent.name}/" in named:
            _load(data).write(data.parent)
    policy = examples / recipe.parent.name / "policy"  # a recipe may ship its own
    if f"examples/{recipe.parent.name}/policy" not in named:
        policy = save_policy(examples / "policy")
    path = examples / recipe.relative_to(ROOT / "examples")
    words = [f"model.path={policy}", "run.name=tried", *SMALL]
    done = CliRunner().invoke(cli.app, ["train", str(path), *words])
    assert done.exit_code == 0, done.output
    metrics = Path("runs/tried/metrics.jsonl").read_text()
    steps = [json.loads(line) for line in metrics.splitlines()]
    assert [line["step"] for line in steps if "tokens/trained" in line] == [1]


@pytest.mark.parametrize(
    ("response", "answer", "value"),
    [
        ("12 - 5 is 7", "7", 1.0),
        ("12-5", "5", 1.0),  # the minus after a digit is an operation
        ("so it is -5.", "-5", 1.0),
        ("in all 1,234", "1234", 1.0),
        ("7 and then 8", "7", 0.0),
        ("seven", "7", 0.0),
    ],
)
def test_the_last_number_is_the_answer(response: str, answer: str, value: float) -> None:
    reward = _load(ROOT / "examples/sums/reward.py")
    assert reward.last_number(response, answer) == value


def test_sums_and_their_answers_agree() -> None:
    sums = _load(ROOT / "examples/sums/make_data.py").make_sums(500)
    for record in sums:
        text = record["prompt"].removeprefix("What is ").removesuffix("?")
        assert eval(text) == int(record["gt_answer"])
    assert len({record["prompt"] for record in sums}) == 500
