"""The command line as a user meets it: exit codes, one-line errors, readable help."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from penstock import cli
from penstock.config.source import load_config
from penstock.config.starter import write_starter
from stages.command_line import commands
from stages.made_run import make_run


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["penstock", *arguments])
    with pytest.raises(SystemExit) as left:
        cli.main()
    return int(left.value.code or 0)


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write_lines(path: Path, *lines: object) -> str:
    path.write_text(
        "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)
    )
    return str(path)


def test_help_is_a_page_with_every_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--help") == 0
    listed = set(re.findall(r"^│ ([a-z]+)  ", capsys.readouterr().out, re.MULTILINE))
    assert {words.split()[0] for words in commands()} == listed


@pytest.mark.parametrize("words", sorted(commands()))
def test_help_of_a_command_says_what_it_does_and_what_each_option_means(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str
) -> None:
    command = commands()[words]
    assert run(monkeypatch, *words.split(), "--help") == 0
    assert command.help.split("\n")[0].split()[0] in capsys.readouterr().out
    for parameter in command.params:
        assert getattr(parameter, "help", None), f"{words}: {parameter.name} has no help"


@pytest.mark.slow
def test_a_shell_completes_commands_and_names_of_runs(tmp_path: Path) -> None:
    for name in ("sums-1", "sums-2", "other"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "journal.db").touch()

    def completed(*words: str) -> list[str]:
        line = {"COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
        asked = {**os.environ, "_PENSTOCK_COMPLETE": "complete_bash", **line}
        command = [sys.executable, "-m", "penstock.cli"]
        done = subprocess.run(command, env=asked, cwd=tmp_path, capture_output=True, text=True)
        return done.stdout.split()

    assert completed("penstock", "resu") == ["resume"]
    assert completed("penstock", "resume", "su") == ["sums-1", "sums-2"]


def test_a_group_without_a_command_shows_its_help(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in ([], ["sandbox"]):
        assert run(monkeypatch, *words) == 2
        assert "--help" in "".join(capsys.readouterr())


WRONG = {  # for each command a wrong argument, and words of its error message
    "train": (["no-such.toml"], "no-such.toml"),
    "sft": (["no-such.toml"], "no-such.toml"),
    "resume": (["no-such-run"], "no-such-run"),
    "replay": (["no-such-run", "--to", "0"], "--to"),
    "scale": (["no-such-run", "producers=2"], "no-such-run"),
    "eval": (["eval.max_problems=-1"], "eval.max_problems: got -1"),
    "backup": (["no-such-run"], "no-such-run"),
    "audit": (["no-such-run"], "no-such-run"),
    "doctor": (["no-such-run"], "no-such-run"),
    "export": (["no-such-run", "--to", "model"], "no-such-run"),
    "runs": (["no-such-folder"], "no-such-folder"),
    "rm": (["no-such-run"], "no-such-run"),
    "chat": (["no-such-run"], "model: got 'no-such-run', allowed: a config file, a run"),
    "version": (["more"], "more"),
    "dashboard": (["no-such-folder"], "no-such-folder"),
    "serve": (["no-such-model"], "no-such-model"),
    "compare": (["no-such-run", "other"], "no-such-run"),
    "check": (["no-such.toml"], "no-such.toml"),
    "init": (["x", "--reward", "best"], "--reward: got 'best'"),
    "convert": (["nemo", "run.sh"], "convert: got 'nemo', allowed: trl"),
    "report": (["no-such-run"], "no-such-run"),
    "timeline": (["no-such-run"], "no-such-run"),
    "simulate": (["--nodes", "many"], "--nodes: got 'many'"),
    "rollouts": (["no-such-run", "--limit", "0"], "--limit"),
    "generate": (["--prompt", "1+1", "engine.name=tgi"], "engine.name: got 'tgi'"),
    "config": (["trian.lr=1"], "unknown key 'trian"),
    "score": (["missing.jsonl"], "missing.jsonl"),
    "sandbox check": (["workers=0"], "workers: got 0"),
    "sandbox serve": (["--host", "0.0.0.0"], "token"),
    "agent check": (["tasks.train.agent=nowhere.py:f"], "no such file: nowhere.py"),
}


def test_every_command_has_a_wrong_argument_here() -> None:
    assert commands().keys() == WRONG.keys()


@pytest.mark.parametrize("words", sorted(WRONG))
@pytest.mark.parametrize("kind", ["argument", "option"])
def test_a_wrong_argument_is_one_line_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str, kind: str
) -> None:
    arguments, named = WRONG[words]
    if kind == "option":
        arguments, named = ["--no-such-option"], "--no-such-option"
    assert run(monkeypatch, *words.split(), *arguments) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("error: ")
    assert named in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "wrong", "meant"),
    [
        ("sandbox check", "wrokers", "workers"),
        ("sandbox serve", "que_size", "queue_size"),
        ("sandbox serve", "sandbox.wrokers", "sandbox.workers"),
    ],
)
def test_an_unknown_setting_of_the_sandbox_is_refused_with_those_that_exist(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: str,
    wrong: str,
    meant: str,
) -> None:
    assert run(monkeypatch, *words.split(), f"{wrong}=1") == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith(f"error: unknown key '{wrong}', allowed: ")
    assert f" {meant}," in error
    assert error.endswith(f"; did you mean {meant}?")


def test_greedy_evaluation_with_several_samples_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("eval", "train"):
        assert (
            run(
                monkeypatch,
                command,
                "eval.sampling.num_generations=4",
                "eval.sampling.temperature=0",
            )
            == 2
        )
        error = capsys.readouterr().err
        assert "eval.tasks.heldout: num_generations got 4 with temperature 0" in error


def test_an_unknown_command_is_one_line_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "trian") == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("error: No such command 'trian'")
    assert error.endswith("(see penstock --help)")
    assert len(error.splitlines()) == 1


def test_an_option_that_is_a_setting_is_told_how_it_is_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "train", "--learning-rate", "1e-6") == 2
    line = "No such option: --learning-rate; a setting is written train.lr=VALUE (see penstock train --help)"
    assert capsys.readouterr().err.strip() == f"error: {line}"
    assert run(monkeypatch, "runs", "--learning-rate") == 2
    assert "a setting" not in capsys.readouterr().err, "it takes none"


def test_config_prints_toml_that_can_be_used_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(monkeypatch, "config", "train.lr=0.25", "tasks.train.system_prompt=[b] think") == 0
    text = capsys.readouterr().out
    assert (
        "# Learning rate after the warm-up. Allowed: above 0. (command line)\nlr = 0.25\n" in text
    )
    assert "[sampling]" in text
    assert 'schedule = "constant"' in text
    assert "Allowed: constant | linear | cosine. (default)" in text
    assert 'system_prompt = "[b] think"' in text
    assert "(built-in demo)" in text
    (tmp_path / "again.toml").write_text(text)
    given = load_config(None, ["train.lr=0.25", "tasks.train.system_prompt=[b] think"]).config
    assert load_config(tmp_path / "again.toml").config == given


def test_config_shows_the_settings_that_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "config", "--filter", "staleness") == 0
    lines = capsys.readouterr().out.splitlines()
    assert "max_staleness = 1" in lines
    assert "[produce]" in lines
    assert "[model]" not in lines
    assert run(monkeypatch, "config", "--filter", "no such words") == 2


def test_settings_without_effect_are_warned_of_before_a_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("algorithm.name=reinforce", "algorithm.kl_estimator=k2", "model.lora.alpha=8")
    assert run(monkeypatch, "config", *words) == 0
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[:2] for line in lines] == [
        ["warning:", "model.lora.alpha"],
        ["warning:", "algorithm"],
        ["warning:", "algorithm.kl_estimator"],
    ]
    assert "samples of older weights count like fresh ones" in lines[1]


def test_a_config_without_tasks_does_not_train_the_demo(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "my.toml").write_text("[train]\nsteps = 1\n")
    assert run(monkeypatch, "train", "my.toml") == 2
    assert "error: tasks.train.data: got nothing, allowed: a file" in capsys.readouterr().err
    (tmp_path / "my.toml").write_text(
        '[tasks.math]\nrewards = [{type = "boxed"}]\n[train]\nsteps = 1\n'
    )
    assert run(monkeypatch, "train", "my.toml") == 2
    assert "error: tasks.math.data: got nothing, allowed: a file" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


LINE = {"messages": {"role": "user", "content": "1+1"}, "gt_answer": "2"}


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["trian.lr=1"], "unknown key 'trian"),
        (["train.lr=quick"], "train.lr: got 'quick'"),
        (["no/such.toml"], "no/such.toml"),
        (["model.path=./nowhere"], "model.path: got './nowhere'"),
        (["model.path=."], "a model folder (one with config.json)"),
        (["model.path=lora"], "got 'lora', adapters without their model (peft's merge_and_unload"),
        (["tasks.train.data=missing.jsonl"], "missing.jsonl"),
        (["tasks.train.data=empty.jsonl"], "empty"),
        (["tasks.train.data=bad.jsonl"], "bad.jsonl"),
        (["tasks.train.data=sudoku"], "sudoku"),
        (
            ["tasks.train.data=good.jsonl", "tasks.train.rewards=[{type='mine.py:by_level'}]"],
            "data good.jsonl line 1: got no 'level', which reward by_level reads",
        ),
        (
            ["tasks.train.data=good.jsonl", "tasks.train.columns={prompt='problem'}"],
            "line 1: columns.prompt: got 'problem', allowed: a field of the record (messages, gt_",
        ),
        (
            ["tasks.train.data=good.jsonl", "tasks.train.rewards=[{type='mine.py:vague'}]"],
            "reward vague: got a function of (a, b), allowed: a parameter named rollout or response",
        ),
        (["tasks.train.rewards=[{type='niceness'}]"], "niceness"),
        (["tasks.train.agent=chatty"], "chatty"),
        (["produce.strategy=no_such_module:Mine"], "no_such_module cannot be imported"),
        (["produce.strategy=json:JSONDecoder"], "a subclass of penstock.rollout.ProduceStrategy"),
        (["tasks.train.produce.strategy=json:Nothing"], "json has no 'Nothing'"),
        (["produce.is_valid_sample=json:nothing"], "json has no 'nothing'"),
        (
            ["produce.strategy=sync", "produce.over_sample_threshold=0.5"],
            "produce.over_sample_threshold: got 0.5 with strategy sync, allowed: 0.0",
        ),
        (
            ["produce.strategy=sync", "produce.enable_partial_rollout=true"],
            "enable_partial_rollout: got True with strategy sync, allowed: False",
        ),
        (
            ["produce.strategy=sync", "produce.max_staleness=2"],
            "max_staleness: got 2 with strategy",
        ),
        (["algorithm.name=ppo2"], "algorithm.name: got 'ppo2'"),
        (["engine.name=tgi"], "engine.name: got 'tgi'"),
        (["track.trackers=['mlflow']"], "track.trackers: got 'mlflow'"),
        (["sampling.num_generations=1"], "num_generations"),
        (["train.groups_per_step=6", "train.mini_batches=4"], "divisor"),
        (["train.steps=0"], "train.steps: got 0"),
        (["a.toml", "b.toml"], "got 2 config files"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2_and_leaves_no_run_folder(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    overrides: list[str],
    words: str,
) -> None:
    write_lines(tmp_path / "empty.jsonl")
    write_lines(tmp_path / "bad.jsonl", LINE, "{not json")
    write_lines(tmp_path / "good.jsonl", LINE)
    (tmp_path / "lora").mkdir()
    (tmp_path / "lora" / "adapter_config.json").write_text("{}")
    own = "def by_level(response, level): ...", "def vague(a, b): ..."
    write_lines(tmp_path / "mine.py", *own)
    assert run(monkeypatch, "train", *overrides) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("error: ")
    assert words in error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "runs").exists()


def test_an_existing_run_is_not_overwritten(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    (folder / "config.toml").touch()
    assert run(monkeypatch, "train", "run.name=mine") == 2
    assert "penstock resume" in capsys.readouterr().err


def test_a_config_is_talked_to_and_its_own_prompt_is_scored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The files that `init` writes, used from another folder."""
    (path, *_) = write_starter(tmp_path / "mine")
    record = json.loads((tmp_path / "mine" / "train.jsonl").read_text().splitlines()[0])
    typed = f"{record['prompt']}\n/reset\n1+2\n/what\n/exit\nnever asked\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    assert run(monkeypatch, "chat", str(path)) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[1].startswith("reward ")
    assert said[1].endswith(f", expected {record['gt_answer']}")
    assert said[2] == "a new conversation"
    assert "/reset begins a new conversation" in said[4]
    assert len(said) == 5


def test_a_run_is_removed_unless_it_is_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_run(tmp_path / "runs" / "old", steps=2)
    assert run(monkeypatch, "runs", "--json") == 0
    assert json.loads(capsys.readouterr().out)[0]["size_bytes"] > 10_000
    with folder.lock():
        assert run(monkeypatch, "rm", "old", "--yes") == 2
    assert "it is under way" in capsys.readouterr().err
    assert run(monkeypatch, "rm", "old", "--yes") == 0
    assert capsys.readouterr().out.startswith("removed runs/old (")
    assert not folder.path.exists()


def test_a_model_that_the_hub_does_not_have_is_said_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert run(monkeypatch, "train", "model.path=no-such/model") == 2
    said = capsys.readouterr().err
    assert "model.path: got 'no-such/model', which is neither a folder nor in the cache" in said
    assert "http://127.0.0.1:1 cannot be reached" in said
    assert "starting" not in said  # no worker, and no folder of a run
    assert run(monkeypatch, "serve", "no-such/model") == 2
    assert "model.path: got 'no-such/model', which is neither" in capsys.readouterr().err
    assert run(monkeypatch, "chat", "no-such/two words") == 2
    assert "model.path: got 'no-such/two words', allowed: " in capsys.readouterr().err
    assert run(monkeypatch, "check", "tasks.train.data=hub:no-such/data") == 2
    assert "tasks.train.data: got 'no-such/data', which is neither" in capsys.readouterr().err
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert run(monkeypatch, "generate", "no-such/model", "--prompt", "1+1") == 2
    assert "HF_HUB_OFFLINE is set" in capsys.readouterr().err


def test_a_bug_report_has_versions_devices_and_the_sandbox(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "version", "--verbose") == 0
    said = capsys.readouterr().out
    for words in ("penstock ", "python 3", "torch 2", "cores", "kernels: ", "isolation: "):
        assert words in said


def test_a_command_that_is_interrupted_says_that_it_stopped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("penstock.inspection.record.list_runs", interrupted)
    assert run(monkeypatch, "runs") == 130
    assert capsys.readouterr().err == "stopped\n"
