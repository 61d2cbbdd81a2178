"""Findings where a user sees them: told once in a run, in its log and metrics, and by `penstock doctor`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock import cli
from penstock.config.source import load_config
from penstock.inspection.findings.live import LiveFindings
from penstock.store.run_folder import RunFolder
from penstock.types import Batch
from stages.made_metrics import with_curves
from stages.made_run import make_run
from stages.tiny_run import CrashServer

NAME = "truncated/share"


def told(tmp_path: Path, shares: list[float]) -> list[tuple[int, str]]:
    """Return (step, line) of what a run with these shares of cut-off responses tells."""
    config = load_config(None, ["checkpoint.keep=1"]).config
    notes: list[str] = []
    live = LiveFindings(RunFolder(tmp_path), config, len(shares), note=notes.append)
    lines: list[tuple[int, str]] = []
    for row in with_curves({NAME: lambda step, _: shares[step - 1]}, len(shares)):
        live.look(row["step"], Batch(step=row["step"], groups=()), row)
        lines += [(row["step"], text) for text in notes]
        notes.clear()
    return lines


def test_a_finding_is_told_once_and_again_only_after_a_long_pause(tmp_path: Path) -> None:
    shares = [1.0] * 20 + [0.0] * 20 + [1.0] * 20 + [0.0] * 130 + [1.0] * 10
    assert [step for step, _ in told(tmp_path, shares)] == [5, 194]
    _, line = told(tmp_path, shares[:6])[0]
    assert line.startswith(
        "warning: The responses are cut off before they end (since step 1). 100%"
    )
    assert line.endswith("check that the model ends its answers: sampling.max_tokens=48")


@pytest.mark.parametrize("steps", [650, pytest.param(1200, marks=pytest.mark.slow)])
def test_a_long_run_keeps_few_rows_and_still_knows_its_start(tmp_path: Path, steps: int) -> None:
    config = load_config(None, []).config
    live = LiveFindings(RunFolder(tmp_path), config, 2000)
    for row in with_curves(
        {"response_length/mean": lambda step, _: 80.0 if step < 100 else 2.0, "reward/mean": 0.3},
        steps,
    ):
        live.look(row["step"], Batch(step=row["step"], groups=()), row)
    assert [finding.name for finding in live.open] == ["length_collapse"]
    assert len(live._rows) < min(steps, 700)


def doctor(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str
) -> tuple[int, str]:
    monkeypatch.setattr("sys.argv", ["penstock", "doctor", *words])
    monkeypatch.setenv("COLUMNS", "300")
    with pytest.raises(SystemExit) as left:
        cli.main()
    return int(left.value.code or 0), capsys.readouterr().out


def test_a_user_is_told_what_to_change_and_the_doctor_says_the_same(
    server: CrashServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    same = "tasks.train.rewards=[{type='think_answer_tags'}]"  # tiny responses have no tags
    words = ("model.path=demo", "train.steps=5", "sampling.max_tokens=2", "engine.max_slots=0")
    run, code = server.train("hopeless", same, *words)
    assert code == 0
    row = json.loads(run.metrics.read_text().splitlines()[-1])
    assert (row["reward/mean"], row["groups/zero_variance"], row["findings/open"]) == (0, 1, 1)
    line = (
        "warning: Nothing can be learned: all rewards are 0 (since step 1). Steps 1 to 5: "
        "100% of the responses are cut off at max_tokens; for example the response "
    )
    for text in (server.output(), (run.logs / "run.log").read_text()):
        assert text.count(line) == 1
        assert "answers: sampling.max_tokens=4\n" in text
    at_the_end = server.output().split(line)[1]
    assert "● Nothing can be learned: all rewards are 0  since step 1" in at_the_end
    code, said = doctor(monkeypatch, capsys, str(run.path))
    assert code == 1
    assert "Nothing can be learned: all rewards are 0  since step 1" in said
    assert "sampling.max_tokens=4" in said
    code, said = doctor(monkeypatch, capsys, str(run.path), "--json")
    [finding] = json.loads(said)
    assert (finding["name"], finding["change"]) == ("equal_rewards", ["sampling.max_tokens=4"])


def test_the_doctor_is_silent_about_a_run_that_learns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "made", steps=12, groups_per_step=3)
    code, said = doctor(monkeypatch, capsys, str(run.path))
    assert (code, said) == (0, "No problem was found in 12 steps.\n")
    run = make_run(tmp_path / "short", steps=1, groups_per_step=3)
    assert doctor(monkeypatch, capsys, str(run.path)) == (0, "No problem was found in 1 step.\n")


def test_a_reward_that_fails_is_found_with_its_error(
    server: CrashServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text(
        "calls = []\n"
        "def score(response):\n"
        "    calls.append(response)\n"
        "    if len(calls) % 4 == 0:\n"
        "        raise KeyError('level')\n"
        "    return float(len(calls) % 3)\n"
    )
    run, code = server.train(
        "failing",
        f"tasks.train.rewards=[{{type='{reward}:score'}}]",
        "produce.max_failure_share=1",
    )
    assert code == 0, server.output()
    code, said = doctor(monkeypatch, capsys, str(run.path))
    assert code == 1
    assert "The reward fails" in said
    assert "KeyError: 'level'" in said
