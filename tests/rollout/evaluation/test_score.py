"""`penstock score`: recorded responses in, one line each out, in order."""

from __future__ import annotations

import io
import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from penstock.config.source import parse_settings
from penstock.errors import UserError
from penstock.rollout.evaluation.score import score_file


def write(path: Path, *lines: dict[str, Any] | str) -> Path:
    text = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(text) + "\n")
    return path


def boxed(answer: object, gold: object = "42", **more: Any) -> dict[str, Any]:
    return {"response": f"\\boxed{{{answer}}}", "gt_answer": gold, **more}


def run(data: Path, reward: str = "boxed", **more: Any) -> tuple[list[dict[str, Any]], str, Any]:
    shown, out = io.StringIO(), data.parent / "scored.jsonl"
    console = Console(file=shown, width=200)
    summary = score_file(data, reward, out, more.pop("options", {}), console=console, **more)
    return [json.loads(line) for line in out.read_text().splitlines()], shown.getvalue(), summary


def test_lines_come_out_in_order_with_a_summary(tmp_path: Path) -> None:
    answers = [42, 41, "42.0", "x"] * 50
    data = write(tmp_path / "data.jsonl", *(boxed(answer) for answer in answers))
    lines, shown, summary = run(data)
    assert [line["line"] for line in lines] == list(range(1, 201))
    assert [line["reward"] for line in lines] == [1.0, 0.0, 1.0, 0.0] * 50
    first = lines[0]
    assert first.pop("time_ms") >= 0
    assert first == {
        "line": 1,
        "reward": 1.0,
        "format_ok": True,
        "answer_ok": True,
        "parts": {"boxed": 1.0},
        "note": "",
    }
    assert "200 responses in" in shown
    assert "mean reward 0.5000" in shown
    assert "answer right: 50.0%" in shown
    assert (summary.count, summary.failed, summary.exit_code) == (200, 0, 0)


def test_options_are_given_as_words(tmp_path: Path) -> None:
    assert parse_settings(["right=10", "format=add", "sandbox.memory_mb=64"]) == {
        "right": 10,
        "format": "add",
        "sandbox": {"memory_mb": 64},
    }
    with pytest.raises(UserError, match="override: got 'right', allowed: key"):
        parse_settings(["right"])
    data = write(tmp_path / "data.jsonl", boxed(42))
    assert run(data, options={"right": 10})[0][0]["reward"] == 10.0
    with pytest.raises(UserError, match="did you mean right"):
        run(data, options={"rihgt": 10})


def test_malformed_lines_are_told_with_their_numbers(tmp_path: Path) -> None:
    data = write(
        tmp_path / "data.jsonl",
        boxed(42),
        "{",
        "[]",
        {"gt_answer": "1"},
        {"response": "x"},
        "",
        {"response": "x", "test_cases": []},
        {"response": 5, "gt_answer": "1"},
        {"response": "x", "gt_answer": [1]},
    )
    with pytest.raises(UserError) as error:
        run(data)
    for number in (2, 3, 4, 5, 7, 8, 9):
        assert f"line {number}: " in str(error.value)
    assert "line 1:" not in str(error.value)


def test_an_absent_or_empty_file_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a JSONL file, or a folder with"):
        score_file(tmp_path / "absent.jsonl", "boxed")
    with pytest.raises(UserError, match=r"which a run writes every track\.rollouts_every_steps"):
        score_file(tmp_path, "boxed")
    with pytest.raises(UserError, match="got no line"):
        run(write(tmp_path / "empty.jsonl"))


def test_the_rollouts_of_a_run_can_be_scored_again(tmp_path: Path) -> None:
    logged = boxed(42, rollout_id="g.0", response_length=4095, finish_reason="length", group_id="g")
    write(tmp_path / "rollouts.jsonl", logged, boxed(42, response_length=10))
    console = Console(file=io.StringIO())
    out = tmp_path / "scored"
    score_file(tmp_path, "soft_overlong", out, {}, console=console)
    assert [json.loads(line)["reward"] for line in out.read_text().splitlines()] == [-1.0, 0.0]


def test_numbers_as_gold_answers_and_lines_without_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write(tmp_path / "data.jsonl", boxed(42, 42), boxed(1.5, 1.5))
    summary = score_file(data, "boxed", console=Console(file=io.StringIO()))
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["reward"] for line in printed] == [1.0, 1.0]
    assert summary.answer_right == 2


@pytest.fixture
def users_module() -> Iterator[None]:
    module = types.ModuleType("users_scores")
    source = "def rank(rollouts, prompt):\n    return [len(rollouts)] * len(rollouts)\n"
    source += "def sometimes(response):\n    return 1 / len(response)\n"
    source += "def right(response, gt_answer):\n    return gt_answer in response\n"
    exec(source, module.__dict__)
    sys.modules["users_scores"] = module
    yield
    del sys.modules["users_scores"]


@pytest.mark.usefixtures("users_module")
def test_group_rewards_see_neighbours_of_the_same_group(tmp_path: Path) -> None:
    rows = [{"response": "x", "gt_answer": "1", "group_id": name} for name in "aabccc"]
    lines, _, _ = run(write(tmp_path / "data.jsonl", *rows), "users_scores:rank")
    assert [line["reward"] for line in lines] == [2, 2, 1, 3, 3, 3]


@pytest.mark.usefixtures("users_module")
def test_a_reward_that_fails_is_an_error_and_never_a_zero(tmp_path: Path) -> None:
    rows = [{"response": text, "gt_answer": "1"} for text in ("ab", "", "a")]
    lines, shown, summary = run(write(tmp_path / "data.jsonl", *rows), "users_scores:sometimes")
    assert [line["reward"] for line in lines] == [0.5, None, 1.0]
    assert "ZeroDivisionError" in lines[1]["error"]
    assert "failed: 1" in shown
    assert summary.exit_code == 1


@pytest.mark.usefixtures("users_module")
def test_an_answer_is_needed_only_by_a_reward_that_compares(tmp_path: Path) -> None:
    data = write(tmp_path / "data.jsonl", {"response": "x"}, {"response": "xx"})
    assert [row["reward"] for row in run(data, "users_scores:sometimes")[0]] == [1.0, 0.5]
    for reward in ("boxed", "users_scores:right"):
        with pytest.raises(UserError, match=r"data .*data\.jsonl line 1: neither `gt_answer`"):
            run(data, reward)
