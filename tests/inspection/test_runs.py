"""`penstock runs` and `penstock compare`: on made runs, by the command line."""

from __future__ import annotations

import io
import json
import math
import shutil
import time
from pathlib import Path

import pytest
from rich.console import Console

from penstock import cli
from penstock.inspection.compare import compare, interval, read_samples
from penstock.inspection.record import RunLine, print_runs
from penstock.inspection.rollout_viewer import find_evaluated
from penstock.store.run_folder import RunFolder
from stages.made_run import make_run
from stages.made_service import MadeService


def penstock(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str
) -> tuple[int, str]:
    monkeypatch.setattr("sys.argv", ["penstock", *words])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as left:
        cli.main()
    said = capsys.readouterr()
    return int(left.value.code or 0), said.out + said.err


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    make_run(root / "a", steps=4, groups_per_step=2)
    make_run(root / "b", steps=4, groups_per_step=2, seed=1)
    write_samples(root / "a", "heldout", 4, [[1, 0], [0, 0], [1, 1], [0, 0]])
    write_samples(root / "b", "heldout", 2, [[0, 0]] * 4)  # an older evaluation
    write_samples(root / "b", "heldout", 4, [[1, 1], [1, 0], [1, 1], [0, 0]])
    return root


def test_a_narrow_terminal_gets_one_line_for_each_run() -> None:
    name, held_out = "train-grpo-20261116-100757", "heldout accuracy 0.344 -> 0.992"
    line = RunLine(name=name, state="finished", steps=80, total_steps=80, reward=0.953)
    line.size_bytes = 17 * 2**20
    line.changed_at = time.time() - 35 * 60
    line.held_out, line.rewards = held_out, (0.1, 0.9)
    for width, shown in ((80, "0.992"), (160, held_out)):
        out = io.StringIO()
        print_runs([line, line], Console(file=out, width=width))
        _, first, second = out.getvalue().splitlines()
        assert first == second
        assert name in first
        assert shown in first
        assert "17 MiB" in first
        assert first.rstrip().endswith(" 35 min")


def test_a_service_has_one_row_and_commands_on_runs_name_those_that_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = MadeService(tmp_path / "mine")
    made.wait(made.model("k"), 1, "k", "optim_step")
    made.close()
    code, said = penstock(monkeypatch, capsys, "runs", str(tmp_path))
    _, row = said.splitlines()
    assert code == 0
    assert row.split()[:2] == ["mine", "stopped"]
    assert "1 model of demo, 1 waiting, last optim_step" in row
    for command in ("doctor", "report", "rollouts", "rm"):
        code, said = penstock(monkeypatch, capsys, command, str(tmp_path / "mine"))
        [line] = said.splitlines()
        assert code == 2
        assert "the folder of a service, allowed for it: penstock audit, replay" in line
    assert (tmp_path / "mine" / "commands.db").is_file()


def write_samples(
    run: Path, task: str, step: int, right: list[list[int]], *, judged: bool = True
) -> None:
    """Write the samples of an evaluation: for each problem, which of its answers are right."""
    lines = [
        {
            "prompt_id": f"{task}:{number}",
            "prompt": [{"role": "user", "content": f"question {number}"}],
            "prediction": f"answer of {run.name}",
            "ans_valid": bool(one) if judged else None,
            "reward": float(one),
        }
        for number, answers in enumerate(right)
        for one in answers
    ]
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    (run / "eval" / f"{task}-step-{step}.jsonl").write_text(text)


def test_runs_lists_what_each_run_reached(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (folder / "no-run").mkdir(exist_ok=True)
    with RunFolder(folder / "b").lock():
        code, said = penstock(monkeypatch, capsys, "runs", str(folder))
    rows = {line.split()[0]: line for line in said.splitlines()}
    assert code == 0
    assert rows.keys() == {"run", "a", "b"}
    assert "finished" in rows["a"]
    assert "4/4" in rows["a"]
    assert "heldout accuracy 0.3" in rows["a"]
    assert "training" in rows["b"]
    once = tmp_path / "once"  # evaluated once: there is no change to show
    shutil.copytree(folder / "a", once)
    summary = once / "eval" / "summary.jsonl"
    first, *_ = summary.read_text().splitlines()
    summary.write_text(f"{first}\n")
    code, said = penstock(monkeypatch, capsys, "runs", str(tmp_path))
    assert "->" in rows["a"]
    assert "heldout accuracy 0.3" in said
    assert "->" not in said
    code, said = penstock(monkeypatch, capsys, "runs", str(folder), "--json")
    assert {line["name"]: line["steps"] for line in json.loads(said)} == {"a": 4, "b": 4}


def test_a_run_whose_journal_cannot_be_read_is_listed_as_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "config.toml").write_text("not toml")
    (tmp_path / "x" / "metrics.jsonl").write_text('{"step": 3, "reward/mean": 0.5}\n{"st')
    code, said = penstock(monkeypatch, capsys, "runs", str(tmp_path))
    assert code == 0
    assert "damaged" in said
    assert "0.500" in said


def test_compare_pairs_the_problems_of_the_newest_evaluations(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = penstock(monkeypatch, capsys, "compare", str(folder / "a"), str(folder / "b"))
    assert code == 0
    assert "B differs in seed=1" in said
    assert "4 prompts that both answered, steps 4 and 4" in said
    assert "A 0.375, B 0.625" in said  # (0.5 + 0 + 1 + 0) / 4 and (1 + 0.5 + 1 + 0) / 4
    assert "+0.250, 95 % interval" in said
    assert "no difference is shown" in said  # four prompts prove nothing
    assert "B wins 2, A wins 0, 2 equal" in said
    assert "A 0.00  answer of a" in said


def test_answers_with_any_line_break_are_read_and_cut_lines_are_not(tmp_path: Path) -> None:
    """A file of samples has a line for each answer as written, and an answer may hold U+2028 or U+0085."""
    line = {
        **{"prompt_id": "p", "prompt": [], "prediction": "one\u2028two\x85three", "gold": "3"},
        **{"note": "", "format_valid": True, "ans_valid": True, "response_length": 3, "error": ""},
        **{"reward": 1.0, "finish_reason": "stop", "policy_version": 4},
    }
    path = tmp_path / "eval" / "heldout-step-4.jsonl"
    path.parent.mkdir()
    text = json.dumps(line, ensure_ascii=False)
    path.write_text(f"{text}\n{text[:20]}", encoding="utf-8")
    assert read_samples(path) == [line]
    options = {"where": None, "step": None, "limit": 9}
    (shown,) = find_evaluated(RunFolder(tmp_path), "eval/heldout", **options)
    assert shown.response == line["prediction"]


def test_a_difference_is_shown_when_its_interval_leaves_zero_out(
    folder: Path, tmp_path: Path
) -> None:
    for name, score in (("x", 0), ("y", 1)):
        (tmp_path / name / "eval").mkdir(parents=True)
        write_samples(tmp_path / name, "t", 1, [[score]] * 60, judged=False)
    x, y = RunFolder(tmp_path / "x"), RunFolder(tmp_path / "y")
    [one] = compare(x, y)
    assert (one.measure, one.verdict, one.second_wins) == ("reward", "B is better", 60)
    [one] = compare(y, x)
    assert (one.verdict, one.difference) == ("A is better", -1.0)
    [one] = compare(x, x)
    assert one.verdict == "no difference is shown"


def test_the_interval_by_hand() -> None:
    low, high = interval([1.0, 0.0, 1.0, 0.0])
    half = 1.959963984540054 * math.sqrt((1.0 + 2.0) / 4 / 4)
    assert (low, high) == pytest.approx((0.5 - half, 0.5 + half))


def test_runs_without_evaluations_are_compared_on_their_training_prompts(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, steps=3, groups_per_step=2) for name in ("a", "b")]
    [one] = compare(*runs)
    assert (one.task, one.pairs, one.difference) == ("training prompts", 6, 0.0)


def test_runs_without_a_common_prompt_are_refused(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.toml").write_text("")
    code, said = penstock(
        monkeypatch, capsys, "compare", str(folder / "a"), str(tmp_path / "other")
    )
    assert code == 2
    assert "a and other have no prompt in common" in said
