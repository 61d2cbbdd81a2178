"""The command line as a user meets it: exit codes, one-line errors, readable help."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock import cli


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
    text = capsys.readouterr().out
    for command in (
        "train",
        "resume",
        "eval",
        "config",
        "audit",
        "report",
        "rollouts",
        "score",
        "sandbox",
    ):
        assert command in text


def test_config_prints_value_origin_and_doc(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "config", "train.lr=0.25") == 0
    text = capsys.readouterr().out
    assert "train.lr = 0.25" in text
    assert "Learning rate after the warm-up. (command line)" in text
    assert "(built-in demo)" in text


LINE = {"messages": {"role": "user", "content": "1+1"}, "gt_answer": "2"}


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["trian.lr=1"], "unknown key 'trian"),
        (["train.lr=quick"], "train.lr: got 'quick'"),
        (["no/such.toml"], "no/such.toml"),
        (["model.path=./nowhere"], "model.path: got './nowhere'"),
        (["model.path=."], "a model folder (one with config.json)"),
        (["tasks.train.data=missing.jsonl"], "missing.jsonl"),
        (["tasks.train.data=empty.jsonl"], "empty"),
        (["tasks.train.data=bad.jsonl"], "bad.jsonl"),
        (["tasks.train.data=sudoku"], "sudoku"),
        (["tasks.train.rewards=[{type='niceness'}]"], "niceness"),
        (["tasks.train.agent=chatty"], "chatty"),
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
    assert run(monkeypatch, "train", *overrides) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("error: ")
    assert words in error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("command", ["resume", "audit", "rollouts", "report"])
def test_a_run_that_is_not_there_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert run(monkeypatch, command, "no-such-run") == 2
    assert "no-such-run" in capsys.readouterr().err


def test_an_existing_run_is_not_overwritten(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    write_lines(folder / "metrics.jsonl", {"step": 1})
    assert run(monkeypatch, "train", "run.name=mine") == 2
    assert "penstock resume" in capsys.readouterr().err
