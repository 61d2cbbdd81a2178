"""Which tokens end a response: the sources of a checkpoint, and a run of one whose sources differ."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from penstock.config import Config
from penstock.config.demo import policy_path
from penstock.data.chat import ChatTemplate, load_tokenizer, response_end_ids
from penstock.model.loading import end_ids
from penstock.run.generate import generate_samples
from penstock.training.policy import load_policy
from stages.command_runs import train
from stages.tiny_run import SUMS

PAD, EOS, USER, ASSISTANT, SYSTEM = 0, 1, 3, 4, 5
GEMMA = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}<system>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The demo's policy, whose generation config names another end than its tokenizer."""
    folder = shutil.copytree(policy_path(), tmp_path / "model")
    write_end(folder, "generation_config.json", PAD)
    return folder


def write_end(folder: Path, name: str, end: object) -> None:
    settings = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps({**settings, "eos_token_id": end}))


def test_a_run_whose_end_tokens_differ_learns_as_before(tmp_path: Path, model: Path) -> None:
    """Training, evaluation and the saved model end at the tokenizer's end too, and a line says so."""
    run = train(
        tmp_path,
        "two-ends",
        f"model.path={model}",
        "train.steps=2",
        "sampling.max_tokens=24",
        f"eval.tasks.heldout.data={SUMS}",
        "eval.tasks.heldout.rewards=[{type='think_answer_tags', options={equality='numeric'}}]",
        "eval.every_steps=2",
    )
    assert run.code == 0, run.told
    assert run.told.count("note: end tokens differ, and a response ends at any") == 1
    assert max(line.get("truncated/share", 0.0) for line in run.metrics) < 0.5
    responses = run.folder.evaluations.glob("heldout-step-2*")
    lines = [json.loads(line) for file in responses for line in file.read_text().splitlines()]
    assert sum(line["finish_reason"] == "stop" for line in lines) > len(lines) / 2
    assert any(line["prediction"].endswith("</answer>") for line in lines)
    (saved,) = run.folder.checkpoints.glob("step-2/**/generation_config.json")
    assert json.loads(saved.read_text())["eos_token_id"] == [PAD, EOS]


def test_generate_trainer_and_engine_agree(model: Path) -> None:
    config = Config.model_validate(
        {"model": {"path": str(model)}, "sampling": {"max_tokens": 24, "temperature": 0.01}}
    )
    (sample,) = generate_samples(config, ["12+34="])
    assert sample.finish_reason == "stop"
    assert sample.tokens[-1] == "<eos>"
    assert set(response_end_ids(config.model)) == {PAD, EOS}
    policy = load_policy(str(model), config.model, torch.float32)
    assert set(end_ids(policy)) == {PAD, EOS}


def test_a_saved_model_ends_where_its_config_does(model: Path) -> None:
    """transformers reads config.json only if there is no generation config; some have one without an end."""
    write_end(model, "generation_config.json", None)
    config = Config.model_validate({"model": {"path": str(model)}})
    policy = load_policy(str(model), config.model, torch.float32)
    assert policy.generation_config.eos_token_id == [EOS]


def test_the_sources_of_a_checkpoint(model: Path) -> None:
    assert ChatTemplate(load_tokenizer(model)).end_tokens.sources == {
        "tokenizer": (EOS,),
        "generation_config.json": (PAD,),
        "config.json": (EOS,),
    }
    write_end(model, "config.json", 50)  # an ordinary token: a default that nobody meant
    assert ChatTemplate(load_tokenizer(model)).eos_ids == (EOS, PAD)
    (model / "generation_config.json").unlink()
    assert ChatTemplate(load_tokenizer(model)).eos_ids == (EOS, 50)


def test_the_model_answers_also_with_the_tokenizer_of_another(model: Path) -> None:
    """An instruct tokenizer on a base model: both ends count, whichever folder names them."""
    config = Config.model_validate({"model": {"path": str(model), "tokenizer": "demo"}})
    assert response_end_ids(config.model) == (EOS, PAD)


def test_the_end_of_a_turn_of_the_template_is_an_end() -> None:
    """Gemma's tokenizer ends with <eos>, its turns with <end_of_turn>."""
    tokenizer = load_tokenizer("demo")
    tokenizer.chat_template = GEMMA
    chat = ChatTemplate(tokenizer)
    assert chat.eos_ids == (EOS, SYSTEM)
    (line,) = chat.end_tokens.difference(tokenizer)
    assert "chat template: 5 '<system>'" in line


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>",
        "{% for m in messages %}<user>{{ m.content }}{% endfor %}<user>",
        "{% for m in messages %}{{ m.content }} done{% endfor %}",
        "{{ raise_exception('no') }}",
    ],
)
def test_a_template_without_an_end_adds_none(template: str) -> None:
    tokenizer = load_tokenizer("demo")
    tokenizer.chat_template = template
    assert ChatTemplate(tokenizer).eos_ids == (EOS,)
    assert not ChatTemplate(tokenizer).end_tokens.difference(tokenizer)
