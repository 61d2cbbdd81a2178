"""The demo that ships: the documented claims about the policy hold, and its config fits it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from penstock.config.demo import policy_path, resolve_model_path
from penstock.config.source import load_config
from penstock.data import builtin
from penstock.data.chat import ChatTemplate, load_tokenizer
from penstock.errors import UserError
from penstock.run import preflight

SCRIPT = Path(__file__).parents[2] / "scripts" / "make_demo_policy.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_demo_policy", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["make_demo_policy"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def chat() -> ChatTemplate:
    return ChatTemplate(load_tokenizer("demo"))


@pytest.fixture(scope="module")
def corpus(script: ModuleType, chat: ChatTemplate) -> Any:
    return script.Corpus(chat)


def test_the_policy_is_small() -> None:
    files = list(policy_path().iterdir())
    assert {"model.safetensors", "config.json", "tokenizer.json", "README.md"} <= {
        path.name for path in files
    }
    assert sum(path.stat().st_size for path in files) <= 4_000_000


@pytest.mark.slow
def test_it_seldom_thinks_and_is_right_when_it_does(script: ModuleType, chat: ChatTemplate) -> None:
    """Before training, accuracy is below one half, greedy or sampled; a forced thought raises it."""
    torch.set_num_threads(1)
    model = script.Qwen3ForCausalLM.from_pretrained(policy_path(), dtype=torch.float32)
    assert model.num_parameters() <= 1_000_000
    measured = script.measure(model, chat, size=256)
    assert measured["greedy accuracy"] <= 0.45
    assert 0.2 <= measured["sampled accuracy"] <= 0.45
    assert 0.05 <= measured["thinking share"] <= 0.3
    assert measured["thinking accuracy"] >= 0.97


@pytest.mark.slow
def test_heldout_sums_are_not_in_the_pretraining_corpus(corpus: Any, chat: ChatTemplate) -> None:
    heldout = {chat.encode(record["messages"]).tobytes() for record in builtin.addition("heldout")}
    for rows in corpus.rows.values():
        prompts = {ids[:start].astype("int32").tobytes() for ids, start in rows}
        assert len(prompts) == len(rows)
        assert not prompts & heldout


@pytest.mark.parametrize(
    ("style", "text"),
    [
        ("think", "<think>7+8=15 4+3+1=8</think><answer>85</answer>"),
        ("hasty", "<think></think><answer>75</answer>"),
        ("untagged", "<answer>75</answer>"),
    ],
)
def test_the_three_styles(script: ModuleType, style: str, text: str) -> None:
    assert script.response(47, 38, style) == text
    assert script.is_right(text, "85") is (style == "think")


def test_pretraining_is_reproducible(script: ModuleType, corpus: Any, chat: ChatTemplate) -> None:
    torch.set_num_threads(1)
    recipe = script.Recipe(steps=3, batch_size=8, hidden_size=32, num_layers=1, mlp_size=32)
    states = []
    for _ in range(2):
        model = script.build_model(recipe, chat.tokenizer)
        script.pretrain(model, corpus, recipe)
        states.append(model.state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_the_tokenizer_is_the_one_the_script_builds(script: ModuleType, chat: ChatTemplate) -> None:
    built = script.build_tokenizer()
    assert built.get_vocab() == chat.tokenizer.get_vocab()
    assert built.chat_template == chat.tokenizer.chat_template


def test_the_demo_config_fits_the_policy(script: ModuleType, chat: ChatTemplate) -> None:
    config = load_config().config
    preflight.check(config)
    assert config.produce.max_staleness == 1
    task, evaluation = config.tasks["train"], config.eval.tasks["heldout"]
    assert (task.data, evaluation.data) == ("addition", "addition:heldout")
    prompts = chat.encode_many([record["messages"] for record in builtin.addition("train")])
    longest = max(len(ids) for ids in prompts)
    assert longest <= task.max_prompt_tokens
    worked = len(chat.encode_text(script.response(99, 99, "think"))) + 1  # end of sequence
    assert worked <= config.sampling.max_tokens
    assert longest + config.sampling.max_tokens <= 40


def test_model_paths(tmp_path: Path) -> None:
    assert resolve_model_path("demo") == str(policy_path())
    assert resolve_model_path(str(policy_path())) == str(policy_path())
    assert resolve_model_path("someone/some-model") == "someone/some-model"
    with pytest.raises(UserError, match=r"model: got .*a folder without config.json"):
        resolve_model_path(str(tmp_path))
    with pytest.raises(UserError, match="no such folder"):
        resolve_model_path(str(tmp_path / "gone"))
