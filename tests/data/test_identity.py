"""Paths of a config are absolute in its record; content and code are compared by their facts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from penstock.config.demo import policy_path
from penstock.config.source import load_config, to_toml, with_overrides
from penstock.data import load_dataset
from penstock.data.chat import ChatTemplate, load_tokenizer
from penstock.data.identity import (
    absolute_paths,
    changed_code,
    changed_content,
    check_files,
    measure,
)
from penstock.errors import UserError
from penstock.inspection.findings import Observed, find
from penstock.inspection.findings.observed import looked_at_settings
from penstock.store.run_folder import RunFolder

LINE = json.dumps({"prompt": "1+1", "answer": "2"})


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a working directory with data, a model and a reward."""
    (tmp_path / "data").mkdir()
    for name in ("train", "test", "text"):
        (tmp_path / "data" / f"{name}.jsonl").write_text(f"{LINE}\n")
    (tmp_path / "mine.py").write_text("def score(response): return 1.0\n")
    shutil.copytree(policy_path(), tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "way"),
    [
        (["train.reference=/gone/model"], "; put it back, or name its new place with: "),
        (["model.path=/gone/model"], "; put it back"),
        (["model.path=demo", "model.tokenizer=/gone/model"], "; put it back"),
    ],
)
def test_a_model_that_is_gone_is_named_by_its_key_before_anything_is_loaded(
    tmp_path: Path, words: list[str], way: str
) -> None:
    config, key = load_config(None, words).config, words[-1].partition("=")[0]
    command = f"penstock resume {tmp_path} {key}=PATH" if way.endswith(": ") else ""
    with pytest.raises(UserError) as raised:
        check_files(RunFolder(tmp_path), config, accept_changes=False)
    assert str(raised.value) == f"{key}: got /gone/model, which does not exist{way}{command}"


def test_every_path_becomes_absolute_and_names_stay(here: Path) -> None:
    words = [
        "model.path=model",
        "train.reference=model",
        "tasks.train.data=data/train.jsonl",
        "tasks.train.rewards=[{type='mine.py:score', options={path='data/text.jsonl', kind='a/b'}}]",
        "tasks.sums.data=addition",
        "eval.tasks.test.data=./data/../data/test.jsonl",
        "eval.tasks.heldout.data=addition:heldout",
        "train.ptx.data=data/text.jsonl",
    ]
    config = absolute_paths(load_config(None, words).config)
    assert config.model.path == config.train.reference == str(here / "model")
    assert config.tasks["train"].data == str(here / "data" / "train.jsonl")
    (reward,) = config.tasks["train"].rewards
    assert reward.type == f"{here / 'mine.py'}:score"
    assert reward.options == {"path": str(here / "data" / "text.jsonl"), "kind": "a/b"}
    assert config.tasks["sums"].data == "addition"
    assert config.eval.tasks["test"].data == str(here / "data" / "test.jsonl")
    assert config.eval.tasks["heldout"].data == "addition:heldout"
    assert config.train.ptx.data == str(here / "data" / "text.jsonl")
    assert absolute_paths(config) == config


def test_the_demo_and_hub_names_are_no_paths(here: Path) -> None:
    (here / "demo").mkdir()
    for name in ("demo", "owner/model"):
        config = load_config(None, [f"model.path={name}"]).config
        assert absolute_paths(config).model.path == name


def test_a_tokenizer_folder_without_a_model_is_a_fact(here: Path) -> None:
    (here / "words").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(here / "model" / name, here / "words" / name)
    apart = measure(absolute_paths(load_config(None, ["model.tokenizer=words"]).config))
    assert json.loads(apart["tokenizer"])["source"] == str(here / "words")


def test_a_hub_tokenizer_that_is_not_in_the_cache_has_no_fact_yet(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(here / "cache"))
    config = load_config(None, ["model.path=owner/model"]).config
    assert not measure(config).keys() & {"tokenizer", "chat template"}


def test_each_input_has_a_fact_and_a_difference_names_it(here: Path) -> None:
    words = [
        "model.path=model",
        "tasks.train.data=data/train.jsonl",
        "eval.tasks.test.data=data/test.jsonl",
        "train.ptx.data=data/text.jsonl",
        "tasks.train.rewards=[{type='mine.py:score'}]",
    ]
    config = absolute_paths(load_config(None, words).config)
    before = measure(config)
    assert changed_content(before, measure(config)) == {}
    for name in ("train", "test", "text"):
        (here / "data" / f"{name}.jsonl").write_text(f"{LINE}\n{LINE}\n")
    settings = json.loads((here / "model" / "tokenizer_config.json").read_text())
    settings["model_max_length"] = 77
    (here / "model" / "tokenizer_config.json").write_text(json.dumps(settings))
    (here / "mine.py").write_text("def score(response): return 2.0\n")
    after = measure(config)
    assert list(changed_content(before, after)) == [
        *("eval.tasks.test.data", "tasks.train.data", "tokenizer", "train.ptx.data")
    ]
    phrase = changed_content(before, after)["tasks.train.data"]
    assert f"({len(LINE) + 1} bytes, sha256 " in phrase
    assert f"-> {2 * len(LINE) + 2} bytes, sha256 " in phrase
    assert changed_code(before, after).startswith(f"code changed since the run began: {here}")
    assert changed_code({}, after) == ""


def test_loaded_data_has_the_fact_of_its_file(here: Path) -> None:
    config = absolute_paths(load_config(None, ["tasks.train.data=data/train.jsonl"]).config)
    chat = ChatTemplate(load_tokenizer("demo"))
    sets = {
        "tasks.train.data": load_dataset("train", config.tasks["train"], chat),
        "eval.tasks.heldout.data": load_dataset("heldout", config.eval.tasks["heldout"], chat),
    }
    loaded, hashed = measure(config, sets), measure(config)
    assert changed_content(loaded, hashed) == {}
    assert json.loads(loaded["tasks.train.data"])["prompts"] == 1
    assert "eval.tasks.heldout.data" in loaded.keys() - hashed.keys()  # generated


def test_settings_lie_over_a_config_as_over_its_file(tmp_path: Path) -> None:
    config = load_config(None, ["tasks.train.produce.max_tries=2"]).config
    (tmp_path / "config.toml").write_text(to_toml(config))
    words = ["train.lr=0.5", "eval.tasks={}", "tasks.train.produce.max_staleness=3"]
    assert with_overrides(config, words) == load_config(tmp_path / "config.toml", words).config


def test_facts_of_the_start_lead_to_findings(here: Path) -> None:
    """A tokenizer without a chat template, and a prompt that is too long, are facts of a run."""
    settings = json.loads((here / "model" / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (here / "model" / "tokenizer_config.json").write_text(json.dumps(settings))
    (here / "model" / "chat_template.jinja").unlink(missing_ok=True)
    long = json.dumps({"prompt": "11+22+33", "answer": "66"})
    (here / "data" / "train.jsonl").write_text(f"{LINE}\n{long}\n")
    words = ["model.path=model", "tasks.train.data=data/train.jsonl"]
    config = load_config(None, [*words, "tasks.train.max_prompt_tokens=5"]).config
    chat = ChatTemplate(load_tokenizer("model"))
    dataset = load_dataset("train", config.tasks["train"], chat)
    facts = measure(config, {"tasks.train.data": dataset})
    settings = looked_at_settings(config)
    found = find(Observed(run="x", config=config, settings=settings, facts=facts))
    assert [finding.name for finding in found] == ["skipped", "no_template"]
    assert "1 of 2 prompts of tasks.train are longer than 5 tokens" in found[0].evidence
    assert json.loads(facts["machine"])["cpus"] >= 1
