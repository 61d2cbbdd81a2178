"""The config tree: overrides, origins, and one clear line for every mistake."""

from __future__ import annotations

import json
import re
import sys
import tomllib
import types
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from penstock.config import Config
from penstock.config.doubts import doubts
from penstock.config.mistakes import COMMON, rows, valid_keys
from penstock.config.plugins import load
from penstock.config.source import (
    LoadedConfig,
    config_lines,
    load_config,
    to_toml,
    validate,
    with_overrides,
)
from penstock.errors import UserError
from penstock.run import preflight
from penstock.store.run_folder import create

PROMISED_KEYS = [
    "seed",
    "run.dir",
    "run.name",
    "model.path",
    "train.steps",
    "train.episodes",
    "train.lr",
    "train.groups_per_step",
    "sampling.num_generations",
    "sampling.temperature",
    "algorithm.name",
    "engine.name",
    "produce.max_staleness",
    "sync.every_steps",
    "eval.every_steps",
    "checkpoint.every_steps",
    "launch.kind",
]


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "config.toml"
    path.write_text(text)
    return path


def test_keys_that_scripts_rely_on_exist() -> None:
    assert set(PROMISED_KEYS) <= set(valid_keys(Config))


def test_every_field_has_a_line_of_doc() -> None:
    lines = list(config_lines(LoadedConfig(config=Config(), origins={})))
    assert [line for line in lines if line.startswith("# (")] == []
    assert len(lines) > 300


def test_words_of_other_systems_lead_to_keys_that_exist() -> None:
    common = {row["word"]: row["key"] for row in rows(COMMON)}
    assert set(common.values()) <= set(valid_keys(Config))
    assert not set(common) & {key.rsplit(".")[-1] for key in valid_keys(Config)}


def overrides_with(pattern: str) -> list[str]:
    """Overrides that set a removed key: of a whole section, and of one task's."""
    if pattern == "launch.producer_kinds.place":
        return ["launch.producer_kinds=[{place={}}]"]
    if pattern.startswith("*"):
        return [f"{pattern[1:]}=1", f"tasks.train.{pattern[1:]}=1"]
    return [f"{pattern.replace('*', 'heldout')}=1"]


REMOVED = {row["key"]: row["advice"] for row in rows("removed")}


@pytest.mark.parametrize("pattern", REMOVED)
def test_a_removed_key_is_answered_with_what_to_do_instead(pattern: str) -> None:
    assert not [key for key in valid_keys(Config) if fnmatchcase(key, pattern)]
    for override in overrides_with(pattern):
        with pytest.raises(UserError) as caught:
            load_config(None, [override])
        assert str(caught.value).startswith(override.split("=")[0])
        assert str(caught.value).endswith(f": this key was removed; {REMOVED[pattern]}")


def test_a_date_is_a_name_as_any_other_word() -> None:
    words = ["run.name=2026-11-19", "run.dir=2026-11-19T08:00:00"]
    run = load_config(None, words).config.run
    assert (run.name, run.dir) == ("2026-11-19", "2026-11-19T08:00:00")


def test_overrides_win_over_the_file_and_origins_say_so(tmp_path: Path) -> None:
    path = write(tmp_path, "[train]\nlr = 1e-5\nsteps = 3\n")
    loaded = load_config(path, ["train.lr=0.5", "model.path=some/model"])
    assert (loaded.config.train.lr, loaded.config.train.steps) == (0.5, 3)
    assert loaded.origin("train.lr") == "command line"
    assert loaded.origin("train.steps") == f"file {path}"
    assert loaded.origin("train.weight_decay") == "default"


def test_the_resolved_tree_survives_toml() -> None:
    config = load_config(None, ["tasks.train.system_prompt='a \"b\" \\ c'", "seed=4"]).config
    assert validate(tomllib.loads(to_toml(config))) == config


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["trian.lr=1"], ["unknown key 'trian", "train"]),
        (["train.learning_rate=1"], ["unknown key 'train.learning_rate'", "mean train.lr?"]),
        (["learning_rate=1"], ["unknown key 'learning_rate'", "did you mean train.lr?"]),
        (["epochs=2"], ["did you mean train.episodes?"]),
        (["rollout.gpu_memory_utilization=0.5"], ["mean engine.options.gpu_memory_utilization?"]),
        (["rollout.n=8"], ["did you mean sampling.num_generations?"]),
        (["rollout.temperature=1.0"], ["did you mean sampling.temperature?"]),
        (["algorithm.kl_coef=0.1"], ["did you mean algorithm.kl_beta?"]),
        (["trainer.total_epochs=1"], ["'trainer.total_epochs'", "mean train.episodes?"]),
        (["train.group_per_step=1"], ["did you mean train.groups_per_step?"]),
        (["train.lr=fast"], ["train.lr: got 'fast'", "number"]),
        (["train.lr=-1"], ["train.lr: got -1", "greater than 0"]),
        (["train.steps=1.5"], ["train.steps: got 1.5, allowed: a whole number"]),
        (["train.steps=many"], ["train.steps: got 'many', allowed: a whole number"]),
        (["train.steps=2", "train.episodes=1"], ["train.steps and train.episodes: got both"]),
        (
            ["train.groups_per_step=6", "train.mini_batches=4"],
            ["train.mini_batches: got 4", "divisor"],
        ),
        (["sampling.min_tokens=9", "sampling.max_tokens=8"], ["min_tokens got 9"]),
        (["produce.strategy=later"], ["produce.strategy: got 'later'", "'async' or 'sync'"]),
        (["tasks.train.sampling.top_k=-1"], ["tasks.train.sampling.top_k: got -1"]),
        (["tasks.train.sampling.topk=1"], ["tasks.train.sampling.topk: got 1", "top_k"]),
        (["eval.tasks.heldout.sampling.topk=1"], ["eval.tasks.heldout.sampling.topk: got 1"]),
        (["tasks.train.rewards[0].type=x"], ["override: got", "tasks.train.rewards=[...]"]),
        (["launch.kind=inline", "launch.num_consumers=2"], ["launch.num_consumers: got 2"]),
        (["eval.tasks.heldout.weight=2"], ["unknown key 'eval.tasks.heldout.weight'"]),
        (["eval.tasks.heldout.produce.max_tries=2"], ["unknown key 'eval.tasks.heldout.produce"]),
        (["eval.tasks.heldout.sampling.anneal.end=1"], ["eval.tasks.heldout: got sampling.anneal"]),
        (["novalue"], ["override: got 'novalue'"]),
        (["train.steps=true"], ["train.steps: got True, allowed: a number"]),
        (["train.lr=nan"], ["train.lr: got nan"]),
        (["train.lr=inf"], ["train.lr: got inf, allowed: a finite number"]),
        (["train=3"], ["train: got 3, allowed: a table"]),
        (["sampling.stop=x"], ["sampling.stop: got 'x', allowed: a list"]),
        (
            ["sampling.stop=['x','']"],
            ["sampling.stop: got ['x', ''], allowed: texts of at least one"],
        ),
        (["model.path=3"], ["model.path: got 3, allowed: a text"]),
        (["run.name=7"], ["run.name: got 7, allowed: a text (in a shell: 'run.name=\"7\"')"]),
        (["eval.at_start=perhaps"], ["eval.at_start: got 'perhaps', allowed: true or false"]),
        (["train.lr.deep=1"], ["train.lr"]),
    ],
)
def test_a_mistake_is_one_line_that_names_key_value_and_what_is_allowed(
    overrides: list[str], words: list[str]
) -> None:
    with pytest.raises(UserError) as caught:
        load_config(None, overrides)
    message = str(caught.value)
    assert "\n" not in message
    assert message.count("got ") <= 1 + message.count("; ")
    for word in words:
        assert word in message


def test_a_length_on_the_command_line_replaces_the_one_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[train]\nepisodes = 2\n[tasks.train]\n")
    train = load_config(file, ["train.steps=3"]).config.train
    assert (train.steps, train.episodes) == (3, None)
    again = with_overrides(load_config(file).config, ["train.steps=3"]).train
    assert (again.steps, again.episodes) == (3, None)
    train = load_config(None, ["train.episodes=1.5"]).config.train  # the demo has steps
    assert (train.steps, train.episodes) == (None, 1.5)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["launch.ray_options.producers.num_gpus=1.5"],
            "launch.ray_options.producers.num_gpus: got 1.5, allowed: a part of one GPU, or whole GPUs",
        ),
        (
            ["launch.ray_options.producers.num_gpus=true"],
            "launch.ray_options.producers.num_gpus: got True, allowed: a number",
        ),
        (
            ["launch.ray_options.producers.num_cpus=inf"],
            "launch.ray_options.producers.num_cpus: got inf, allowed: a finite number",
        ),
        (
            ["launch.ray_options.producers.resources={GPU=1}"],
            "launch.ray_options.producers.resources: got GPU = 1, allowed:",
        ),
        (
            ["launch.ray_options.producers.resources={fast=nan}"],
            "launch.ray_options.producers.resources.fast: got nan, allowed: a finite number",
        ),
        (
            ["launch.ray_options.producers=3"],
            "launch.ray_options.producers: got 3, allowed: a table",
        ),
        (
            ["launch.ray_options.producers.label_selector={zone='in(a'}"],
            "launch.ray_options.producers.label_selector: got zone = 'in(a', allowed: values such as ",
        ),
        (
            [
                "engine.name=openai",
                "engine.options.urls=['http://a', 'http://b']",
                "launch.num_producers=3",
            ],
            "launch.num_producers: got 3 engines, allowed: 2, one for each server of engine.options.urls",
        ),
        (
            ["launch.num_producers=3", "launch.producer_kinds=[{count=2, engine={name='openai'}}]"],
            "launch.producer_kinds[0].count: got 2 engines, allowed: 1, one for each server of ",
        ),
        (
            ["launch.producer_kinds={count=1}"],
            "launch.producer_kinds: got {'count': 1}, allowed: a list",
        ),
        (
            ["launch.producer_kinds=[{count=0}]"],
            "launch.producer_kinds[0].count: got 0, allowed: greater than or equal to 1",
        ),
        (
            ["launch.producer_kinds=[{counts=1}]"],
            "unknown key 'launch.producer_kinds[0].counts', allowed: a key that `penstock config` "
            "lists; did you mean launch.producer_kinds[0].count?",
        ),
        (
            ["launch.producer_kinds=[{count=2}]"],
            "launch.producer_kinds: got 2 engines, allowed: at most num_producers = 1",
        ),
        (
            ["launch.producer_kinds=[{ray_options={gpu=1}}]"],
            "launch.producer_kinds[0].ray_options.gpu: got 1, allowed: the keys num_cpus, num_gpus, ",
        ),
        (
            ["launch.producer_kinds=[{ray_options={num_gpus=1.5}}]"],
            "launch.producer_kinds[0].ray_options.num_gpus: got 1.5, allowed: a part of one GPU",
        ),
        (
            ["launch.producer_kinds=[{engine={slots=1}}]"],
            "launch.producer_kinds[0].engine.slots: got 1, allowed: the keys name, ",
        ),
        (
            ["launch.producer_kinds=[{engine={max_slots='many'}}]"],
            "launch.producer_kinds[0].engine.max_slots: got 'many', allowed: a whole number",
        ),
        (
            ["launch.producer_kinds=[{engine={update='rolling'}}]"],
            "launch.producer_kinds[0].engine: got update, allowed: engine.update",
        ),
        (
            ["launch.colocate=true", "launch.ray_options.producers.accelerator_type=H100"],
            "launch.ray_options.producers: got a place with colocate, allowed: label",
        ),
    ],
)
def test_places_and_kinds_of_engines_that_cannot_work_are_refused(
    words: list[str], line: str
) -> None:
    with pytest.raises(UserError) as refused:
        load_config(None, words)
    assert str(refused.value).startswith(line)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["launch.num_producers=1000000"],
            "launch.num_producers: got 1000000, allowed: at most ",
        ),
        (
            ["launch.producer_kinds=[{engine={name='nope'}}]"],
            "launch.producer_kinds[0].engine.name: got 'nope', allowed: ",
        ),
    ],
)
def test_engines_that_this_machine_cannot_have_are_refused(words: list[str], line: str) -> None:
    with pytest.raises(UserError) as refused:
        preflight.check(load_config(None, words).config)
    assert str(refused.value).startswith(line)


def test_a_model_that_the_default_engine_cannot_sample_is_told_at_once(tmp_path: Path) -> None:
    """Linear attention, also in the text part of an image model; another engine samples it."""
    words = [f"model.path={tmp_path}", "train.steps=1"]
    for settings in ({"model_type": "lfm2"}, {"text_config": {"model_type": "qwen3_5_text"}}):
        (tmp_path / "config.json").write_text(json.dumps(settings))
        with pytest.raises(
            UserError, match=r"^engine.name: got 'transformers' .* 'vllm' or 'openai'"
        ):
            preflight.check(load_config(None, words).config)
    preflight.check_engine(load_config(None, [*words, "engine.name=openai"]).config)


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["launch.ray_options.producers.num_gpus=1"], "launch.ray_options"),
        (["launch.ray_options.consumers.label_selector={zone='a'}"], "launch.ray_options"),
        (["launch.ray_options.agents.num_cpus=2"], "launch.ray_options"),
        (["launch.address=somewhere"], "launch.address"),
        (["launch.wait_for_nodes_s=5"], "launch.wait_for_nodes_s"),
        (
            ["launch.producer_kinds=[{ray_options={num_gpus=1}}]"],
            "launch.producer_kinds[0].ray_options",
        ),
    ],
)
def test_places_without_a_cluster_are_warned_of(words: list[str], key: str) -> None:
    assert doubts(load_config(None, words).config) == [
        f"{key} has no effect with launch.kind local: only a Ray cluster has nodes to choose from"
    ]
    assert doubts(load_config(None, [*words, "launch.kind=ray"]).config) == []


@pytest.mark.parametrize("text", ["[train\n", "= 3"])
def test_broken_toml_and_missing_file_are_named(tmp_path: Path, text: str) -> None:
    with pytest.raises(UserError, match="not valid TOML"):
        load_config(write(tmp_path, text))
    with pytest.raises(UserError, match=r"nowhere\.toml"):
        load_config(tmp_path / "nowhere.toml")


@pytest.mark.parametrize("where", ["tasks.train", "eval.tasks.held"])
def test_a_reward_that_compares_is_refused_for_one_response(where: str) -> None:
    """Each of its scores would fail, in an evaluation without ending the run."""
    judge = "{type='judge', options={model='policy', rubric='x', mode='rank'}}"
    words = [f"{where}.data=addition", f"{where}.rewards=[{judge}]", "train.steps=1"]
    one = [
        *words,
        f"{where}.sampling={{num_generations=1, temperature=1.0}}",
        "algorithm.name=reinforce",
    ]
    line = rf"{where}: num_generations got 1 with the reward judge, which compares responses, allowed: 2 or more"
    with pytest.raises(UserError, match=line):
        preflight.check(load_config(None, one).config)
    two = [*words, f"{where}.sampling={{num_generations=2, temperature=1.0}}"]
    preflight.check(load_config(None, two).config)


def test_rewards_that_are_all_only_shown_are_refused() -> None:
    words = ["tasks.train.rewards=[{type='boxed', weight=0}]", "train.steps=1"]
    with pytest.raises(UserError, match=r"tasks.train.rewards: got weight 0 for every reward"):
        preflight.check(load_config(None, words).config)


def test_partial_rollouts_that_can_do_nothing_are_warned_of() -> None:
    partial = ["produce.enable_partial_rollout=true", "sync.on_update=abort"]
    useless = [*partial, "produce.max_staleness=0", "produce.over_sample_threshold=0.5"]
    assert any("expired" in line for line in doubts(load_config(None, useless).config))
    useful = [*partial, "produce.max_staleness=1"]
    assert doubts(load_config(None, useful).config) == []


def test_a_cut_sampling_distribution_is_warned_of_unless_the_engine_records_it() -> None:
    for words in (["sampling.top_k=20"], ["tasks.train.sampling={top_p=0.9}"]):
        assert doubts(load_config(None, words).config) == []
        warning, *_ = doubts(load_config(None, [*words, "engine.name=vllm"]).config)
        assert "tasks.train: top_k" in warning
        assert "mismatch/kl" in warning


@pytest.mark.parametrize(
    ("word", "switch"),
    [
        ("model.lora.alpha=8", "model.lora.rank 0"),
        ("train.ptx.sequences_per_step=3", "train.ptx.coefficient 0.0"),
        ("train.min_lr_ratio=0.5", "train.schedule constant"),
        ("sampling.anneal.steps=5", "sampling.anneal.end None"),
    ],
)
def test_a_setting_behind_a_switch_that_is_off_is_warned_of(word: str, switch: str) -> None:
    key = word.split("=")[0]
    assert doubts(load_config(None, [word]).config) == [f"{key} has no effect with {switch}"]


def test_turns_that_nobody_takes_are_warned_of() -> None:
    inline = ["launch.colocate=true", "launch.kind=inline"]
    assert "launch.colocate" in doubts(load_config(None, inline).config)[0]
    assert doubts(load_config(None, ["launch.colocate=true"]).config) == []


def test_each_server_of_the_openai_engine_is_one_engine() -> None:
    words = ["engine.name=openai", "engine.options.urls=['http://a', 'http://b']"]
    config = load_config(None, words).config
    assert config.launch.num_producers == 2
    urls = [config.of_engine(number).engine.options["urls"] for number in range(2)]
    assert urls == [["http://a"], ["http://b"]]
    kind = "{count=1, engine={name='transformers', options={}}}"
    mixed = load_config(None, [*words, f"launch.producer_kinds=[{kind}]"]).config
    assert mixed.launch.num_producers == 3
    assert mixed.of_engine(2).engine.options["urls"] == ["http://b"]


def test_an_evaluation_task_inherits_the_system_prompt_of_training() -> None:
    def prompts(*overrides: str) -> tuple[str, list[str]]:
        config = load_config(None, overrides).config
        assert validate(tomllib.loads(to_toml(config))) == config  # a resumed run keeps it
        return config.eval.tasks["heldout"].system_prompt, doubts(config)

    first, second = "tasks.train.system_prompt=Think.", "tasks.other.system_prompt=Answer."
    assert prompts() == ("", [])
    assert prompts(first) == ("Think.", [])
    assert prompts(first, "eval.tasks.heldout.system_prompt=Own.") == ("Own.", [])
    for words in ([first, second], [first, 'eval.tasks.heldout.system_prompt=""']):
        prompt, (warning,) = prompts(*words)
        assert prompt == ""
        assert "eval.tasks.heldout: evaluated without a system prompt" in warning


SHIPPED = sorted((Path(__file__).parents[2] / "configs").glob("*.toml"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.name)
def test_every_shipped_config_loads(path: Path) -> None:
    load_config(path)


def test_a_module_that_was_made_without_a_spec_can_be_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such as `__main__` of a script, or a module that a notebook made."""
    module = types.ModuleType("made_by_hand")
    module.__dict__["double"] = lambda number: 2 * number
    monkeypatch.setitem(sys.modules, "made_by_hand", module)
    assert load("reward", "made_by_hand:double", {})(4) == 8


def test_files_are_looked_for_beside_the_config_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    for name in ("reward.py", "rules.py", "train.jsonl", "model.txt"):
        (tmp_path / "mine" / name).touch()
    (tmp_path / "here.jsonl").touch()
    path = tmp_path / "mine" / "train.toml"
    path.write_text(
        "[tasks.a]\ndata = 'train.jsonl'\nrewards = [{type = 'reward.py:score'}, {type = 'rules:f'}]\n"
        "[tasks.b]\ndata = 'here.jsonl'\n[tasks.c]\ndata = 'addition'\n"
    )
    monkeypatch.chdir(tmp_path)
    loaded = load_config("mine/train.toml")
    loaded.require_files()
    tasks = loaded.config.tasks
    assert [task.data for task in tasks.values()] == [
        *("mine/train.jsonl", "here.jsonl", "addition")
    ]
    types = [reward.type for reward in tasks["a"].rewards]
    assert types == ["mine/reward.py:score", "mine/rules.py:f"]
    monkeypatch.chdir(tmp_path / "mine")
    inside = load_config("train.toml").config.tasks["a"]
    assert (inside.data, inside.rewards[0].type) == ("train.jsonl", "reward.py:score")


@pytest.mark.parametrize(("given", "meant"), [("out", "out"), ("~/out", "{home}/out")])
def test_a_run_folder_is_the_shells_or_in_your_home(
    given: str, meant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine" / "out").mkdir(parents=True)
    (tmp_path / "mine" / "run.toml").write_text(f'run.dir = "{given}"\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    config = load_config("mine/run.toml", ["run.name=new"]).config
    assert config.run.dir == meant.format(home=tmp_path / "home")
    create(config)
    assert Path(config.run.dir, "new", "config.toml").is_file()


def test_a_file_that_is_in_neither_place_is_told_with_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    path = tmp_path / "mine" / "train.toml"
    path.write_text("[tasks.a]\nrewards = [{type = 'no.py:score'}]\n")
    monkeypatch.chdir(tmp_path)
    both = f"tried {tmp_path / 'mine' / 'no.py'} and {tmp_path / 'no.py'}"
    with pytest.raises(UserError, match=re.escape(both)) as caught:
        load_config("mine/train.toml").require_files()
    assert "tasks.a.rewards[0].type: got 'no.py'" in str(caught.value)
    load_config("mine/train.toml", ["tasks.a.rewards=[]"]).require_files()
    path.write_text("[tasks.a]\ndata = 'parts/*.jsonl'\n")
    both = f"tried {tmp_path / 'mine' / 'parts/*.jsonl'} and {tmp_path / 'parts/*.jsonl'}"
    with pytest.raises(UserError, match=re.escape(both)):
        load_config("mine/train.toml").require_files()
    (tmp_path / "mine" / "parts").mkdir()
    (tmp_path / "mine" / "parts" / "a.jsonl").touch()
    assert load_config("mine/train.toml").config.tasks["a"].data == "mine/parts/*.jsonl"


def test_a_file_of_the_user_imports_the_modules_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "worth_beside.py").write_text("WORTH = 7")
    (tmp_path / "json.py").write_text("raise RuntimeError  # an installed module comes first")
    (tmp_path / "reward.py").write_text(
        "import json\nfrom worth_beside import WORTH\ndef score(response): return WORTH"
    )
    assert load("reward", f"{tmp_path}/reward.py:score", {})("") == 7


@pytest.mark.parametrize(
    "text", ["x = " + "[" * 20_000, "a." * 5_000 + "b = 1", "seed = " + "9" * 6_000, "\ufeff\x00"]
)
def test_a_hostile_file_or_word_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "theirs.toml").write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as told:
        load_config(tmp_path / "theirs.toml")
    assert len(str(told.value).splitlines()) == 1
    with pytest.raises(UserError):
        load_config(None, [text.replace(" = ", "=")])


@pytest.mark.parametrize("key", ["model.path", "train.reference", "teachers.big.path"])
def test_a_run_stands_for_the_model_of_its_newest_checkpoint(tmp_path: Path, key: str) -> None:
    for step in (2, 10, 9):
        (tmp_path / f"checkpoints/step-{step}/model").mkdir(parents=True)
    config = load_config(None, [f"{key}={tmp_path}"]).config
    value: Any = config.model_dump()
    for part in key.split("."):
        value = value[part]
    assert value == str(tmp_path / "checkpoints/step-10/model")


def test_a_checkpoint_stands_for_its_model(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoints/step-2"
    (checkpoint / "model").mkdir(parents=True)
    (checkpoint / "manifest.json").touch()
    path = load_config(None, [f"model.path={checkpoint}"]).config.model.path
    assert path == str(checkpoint / "model")
    (checkpoint / "ema").mkdir()
    path = load_config(None, [f"model.path={checkpoint}"]).config.model.path
    assert path == str(checkpoint / "ema")
