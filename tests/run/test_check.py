"""`penstock init` and `penstock check` as a user meets them: what was written trains, and mistakes are found first."""

from __future__ import annotations

import asyncio
import io
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from penstock import cli
from penstock.config import SamplingConfig
from penstock.config.demo import policy_path
from penstock.config.source import load_config
from penstock.data.identity import MACHINE
from penstock.engine.protocol import GenerationRequest
from penstock.run import check
from penstock.run.check import Rehearsal, print_rehearsal
from stages.tiny_run import SUMS, CrashServer

SMALL = [
    "launch.kind=inline",
    "train.groups_per_step=2",
    "sampling.num_generations=2",
    "sampling.max_tokens=6",
    "engine.max_slots=8",
]
FEW = f"tasks.train.data={SUMS}"  # the demo's thousands would be tokenised for every check


def penstock(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr("sys.argv", ["penstock", *words])
    with pytest.raises(SystemExit) as left:
        cli.main()
    return int(left.value.code or 0)


@pytest.mark.slow
def test_what_init_writes_is_checked_and_trains_as_it_is(
    server: CrashServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert penstock(monkeypatch, "init", "mine", "--reward", "own", "--steps", "1") == 0
    assert capsys.readouterr().out.split() == [
        "mine/train.toml",
        "mine/reward.py",
        "mine/train.jsonl",
        "mine/test.jsonl",
    ]
    assert server.run("check", "mine/train.toml", *SMALL, directory=tmp_path) == 0, server.output()
    said = server.output()
    for words in (
        "train, line ",
        "<user>",  # the prompt as the model gets it
        "reward ",
        "200 prompts of 7 to 7 tokens (median 7); responses of at most 6",
        "trainer on cpu; engine (transformers) on cpu",
        "trainer, host",
        "Packs: activations of the smallest.",
        "tokens are generated in",
        "1 step, about",
    ):
        assert words in said
    assert not (tmp_path / "runs").exists()
    train = ("train", "mine/train.toml", *SMALL, "eval.at_start=false", "track.trackers=[]")
    assert server.run(*train, directory=tmp_path) == 0, server.output()
    assert len(list((tmp_path / "runs").iterdir())) == 1


@pytest.mark.parametrize("reward", ["tags", "boxed", "own"])
@pytest.mark.parametrize("model", ["demo", "Qwen/Qwen2.5-0.5B-Instruct"])
def test_every_config_that_init_writes_is_valid(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    reward: str,
    model: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [
        "init",
        "x",
        "--reward",
        reward,
        "--model",
        model,
        "--data",
        "own.jsonl",
        "--max-tokens",
        "77",
    ]
    assert penstock(monkeypatch, *words) == 2
    assert "--data: got 'own.jsonl', allowed: a file that exists" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
    (tmp_path / "own.jsonl").touch()
    assert penstock(monkeypatch, *words, "--eval-data", "held.jsonl") == 2
    assert "--eval-data: got 'held.jsonl', allowed: a file that" in capsys.readouterr().err
    (tmp_path / "held.jsonl").touch()
    assert penstock(monkeypatch, *words, "--eval-data", "held.jsonl") == 0
    text = (tmp_path / "x" / "train.toml").read_text()
    (tmp_path / "best.toml").write_text(text.replace("# keep_best", "keep_best"))
    best = load_config("best.toml").config
    assert best.eval.tasks["test"].data == "../held.jsonl"
    assert best.checkpoint.keep_best == "test/accuracy"
    for path in (tmp_path / "x").iterdir():
        path.unlink()
    assert penstock(monkeypatch, *words) == 0
    assert "# [eval.tasks.test]" in (tmp_path / "x" / "train.toml").read_text()
    config = load_config("x/train.toml").config
    assert (config.model.path, config.sampling.max_tokens) == (model, 77)
    assert config.tasks["train"].data == "x/../own.jsonl"
    assert (tmp_path / "x" / "reward.py").exists() == (reward == "own")
    assert all(len(line) < 150 for line in (tmp_path / "x" / "train.toml").read_text().splitlines())


def test_init_asks_five_questions_on_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    asked: list[str] = []

    def answer(question: str, *, default: object, **_: object) -> object:
        asked.append(question)
        return {"Reward": "boxed", "Steps": 3}.get(question.split(":")[0], default)

    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("typer.prompt", answer)
    assert penstock(monkeypatch, "init", "x") == 0
    assert [question.split(":")[0] for question in asked] == [
        "Model",
        "Data",
        "Reward",
        "Longest response in tokens",
        "Steps",
    ]
    config = load_config("x/train.toml").config
    assert (config.tasks["train"].rewards[0].type, config.train.steps) == ("boxed", 3)
    assert penstock(monkeypatch, "init", "x") == 2
    assert "x/train.toml exists already" in capsys.readouterr().err


def test_a_reward_that_raises_is_found_with_its_file_and_line(
    server: CrashServer, tmp_path: Path
) -> None:
    (tmp_path / "reward.py").write_text("def score(response):\n    return {}['level']\n")
    words = ["tasks.train.rewards=[{type='reward.py:score'}]", *SMALL, FEW]
    assert server.run("check", *words, directory=tmp_path) == 1
    assert f"KeyError: 'level' ({tmp_path}/reward.py:2)" in server.output().replace("\n", "")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import os\ndef score(response:\n    return 1\n", "SyntaxError: "),
        ("level = 1\nlimit = levels[0]\n", "NameError: name 'levels' is not defined ("),
    ],
)
def test_a_reward_file_that_cannot_be_imported_is_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    text: str,
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reward.py").write_text(text)
    assert penstock(monkeypatch, "train", "tasks.train.rewards=[{type='reward.py:score'}]") == 2
    error = capsys.readouterr().err.strip()
    assert len(error.splitlines()) == 1
    assert f"but reward.py cannot be imported: {words}" in error
    assert error.endswith(f"({tmp_path}/reward.py:2)")


def test_prompts_and_responses_that_do_not_fit_the_model_are_refused(server: CrashServer) -> None:
    words = ["launch.kind=inline", "sampling.max_tokens=250", FEW]
    for command in ("check", "train"):
        assert server.run(command, *words) == 2
        assert (
            "tasks.train: a prompt of 7 tokens and sampling.max_tokens = 250 are 257 tokens, allowed: "
            "the model's context of 256; lower sampling.max_tokens or tasks.train.max_prompt_tokens"
        ) in server.output()


def test_check_says_that_end_tokens_differ(server: CrashServer, tmp_path: Path) -> None:
    model = shutil.copytree(policy_path(), tmp_path / "model")
    (model / "generation_config.json").write_text('{"eos_token_id": 0}')
    assert server.run("check", f"model.path={model}", FEW, *SMALL) == 0, server.output()
    assert server.output().count("note: end tokens differ") == 1


def test_check_says_what_would_be_found(server: CrashServer) -> None:
    assert server.run("check", *SMALL, FEW, "sampling.max_tokens=2") == 0
    said = " ".join(server.output().split())
    assert "If the run stays like these prompts:" in said
    assert "are cut off at max_tokens" in said
    assert "sampling.max_tokens=4" in said


def test_check_counts_prompts_that_are_repeated_or_evaluated(
    server: CrashServer, tmp_path: Path
) -> None:
    row = SUMS.read_text().splitlines()[0]
    (tmp_path / "twice.jsonl").write_text(f"{row}\n{row}\n")
    data = f"tasks.train.data={tmp_path}/twice.jsonl"
    assert server.run("check", *SMALL, data, f"eval.tasks.heldout.data={tmp_path}/twice.jsonl") == 0
    said = " ".join(server.output().split())
    assert "note: tasks.train: 1 of 2 prompts are repeated" in said
    assert "2 of 2 problems of eval.tasks.heldout are prompts of tasks.train" in said


@pytest.mark.parametrize(
    ("second_per_token", "kept"),
    [(0.01, (8, 512)), (0.0125, (4, 512)), (0.125, (4, 96)), (9.0, (4, 16))],
)
def test_a_slow_machine_samples_fewer_and_shorter_responses_in_a_check(
    monkeypatch: pytest.MonkeyPatch, second_per_token: float, kept: tuple[int, int]
) -> None:
    """So that a check takes half a minute there too."""
    now = [0.0]

    class Engine:
        async def generate(self, request: GenerationRequest) -> None:
            now[0] += second_per_token * request.sampling.max_tokens / 24  # of all 24 at once

    monkeypatch.setattr(check, "time", SimpleNamespace(monotonic=lambda: now[0]))
    sampling = SamplingConfig(num_generations=8, max_tokens=512)
    engine: Any = Engine()
    found, seconds = asyncio.run(check.bearable_sampling(engine, sampling, np.arange(4), 3))
    assert (found.num_generations, found.max_tokens) == kept
    assert seconds == pytest.approx(512 * second_per_token)  # as the run samples


def test_a_check_with_shorter_responses_says_so_and_estimates_for_whole_ones() -> None:
    config = load_config(None, ["sampling.max_tokens=512"]).config
    here = config.sampling.model_copy(update={"num_generations": 4, "max_tokens": 16})
    seen = Rehearsal(config=config, total_steps=10, cut={"train": here}, whole_s=3.0)
    seen.facts = {MACHINE: '{"gpus": 0}'}
    assert seen.stretch == 32.0
    assert seen.seconds_per_step()[0] == 3.0 * config.train.groups_per_step
    out = Console(file=io.StringIO(), width=200)
    assert print_rehearsal(out, seen) == 0
    said = "4 responses a prompt of at most 16 tokens here, 8 of 512 in the run"
    assert said in out.file.getvalue()  # type: ignore[attr-defined]


def test_a_check_of_demonstrations_counts_each_once_and_names_no_engine(
    server: CrashServer, tmp_path: Path
) -> None:
    (tmp_path / "shown.jsonl").write_text(json.dumps({"prompt": "1+1", "completion": "2"}))
    (tmp_path / "shown.toml").write_text("tasks.train.data = 'shown.jsonl'")
    words = [str(tmp_path / "shown.toml"), "algorithm.name=sft", "sampling.num_generations=8"]
    assert server.run("check", *words, "train.steps=3", "train.groups_per_step=2") == 0, (
        server.output()
    )
    said = " ".join(server.output().split())
    assert "placement trainer on cpu" in said
    assert "engine (" not in said
    assert ": 4 tokens are trained in " in said  # two groups of one response of two tokens


def test_check_says_what_tests_with_several_names_lack(server: CrashServer, tmp_path: Path) -> None:
    cases = {"asserts": "assert double(half(4)) == 4"}
    record = {"prompt": "12+34", "test_cases": cases}
    (tmp_path / "tests.jsonl").write_text(json.dumps(record) + "\n")
    data = ["tasks.train.data=tests.jsonl", "tasks.train.rewards=[{type='code'}]"]
    assert server.run("check", *data, *SMALL, directory=tmp_path) == 1
    output = " ".join(server.output().split())
    assert 'they use double, half without a definition, allowed: "entry_point": ' in output
    assert '["double", "half"] if the solution defines them, else "prelude": SOURCE' in output
